"""What a torchrun agent was told: torchrun's options, ``--rdzv-conf`` and the ``MINGLE_*`` variables, checked at once.

An option comes before a variable. What torch itself wants to know by ``--rdzv-conf`` is checked here as well and handed
on: torch would find a mistake in it only after the whole wait for the other nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from mingle.config import settings, values
from mingle.config.settings import Network, Settings
from mingle.errors import ConfigurationError

DEFAULT_LAST_CALL = 30
DEFAULT_READ_TIMEOUT = 60
DEFAULT_CLOSE_TIMEOUT = 30
"""Torch's own defaults (dynamic_rendezvous.py, c10d_rendezvous_backend.py), which stay as they are."""

OWN_KEYS = {
    "interface": "interfaces to use, names or addresses (default: mingle chooses)",
    "peers": "hosts to ask by unicast as well, host[:port]",
    "secret_file": "the file that holds the job's secret",
    "port": f"UDP port of the discovery, the same everywhere (default {settings.DEFAULT_PORT})",
    "ttl": "how many routers a multicast may pass, plus one (default 1: the local network)",
    "family": "auto, 4 or 6: the IP versions to use (default auto)",
    "discovery_timeout": f"seconds to wait for the other nodes (default {settings.DEFAULT_DISCOVERY_TIMEOUT:g})",
    "allow_minority": "1: MIN nodes begin and go on alone; two parts may then both run (default 0)",
}
"""Each key of ``--rdzv-conf`` that is mingle's, with its meaning."""

TORCH_KEYS = (
    "join_timeout",
    "last_call_timeout",
    "close_timeout",
    "heartbeat_timeout",
    "keep_alive_interval",
    "keep_alive_max_attempt",
    "read_timeout",
    "timeout",
)
"""The keys that are torch's; all hold whole seconds, or a count. ``timeout`` is always there, torch adds it."""

_YES = frozenset({"1", "true", "t", "yes", "y"})
_NO = frozenset({"0", "false", "f", "no", "n"})


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """The settings of one torchrun agent.

    Attributes:
        settings: how to discover the other agents; ``world_size`` is the most nodes there may be.
        minimum: the fewest nodes that train.
        maximum: the most nodes that train.
        local_addr: the value of ``--local-addr``; None selects the address that the gathering finds.
        allow_minority: whether MIN nodes can start and continue alone.
        torch: options for c10d's rendezvous, under its own keys.
    """

    settings: Settings
    minimum: int
    maximum: int
    local_addr: str | None = None
    allow_minority: bool = False
    torch: Mapping[str, int] = field(default_factory=dict)

    @property
    def last_call(self) -> float:
        """How long, in seconds, those who are enough wait for one more."""
        return float(self.torch.get("last_call_timeout", DEFAULT_LAST_CALL))

    @property
    def read_timeout(self) -> float:
        """How long, in seconds, an operation on the agents' store may take."""
        return float(self.torch.get("read_timeout", DEFAULT_READ_TIMEOUT))

    @property
    def close_timeout(self) -> float:
        """How long, in seconds, closing the rendezvous may take."""
        return float(self.torch.get("close_timeout", DEFAULT_CLOSE_TIMEOUT))


def resolve(
    environ: Mapping[str, str],
    *,
    run_id: str,
    endpoint: str | None,
    minimum: int,
    maximum: int,
    local_addr: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> AgentSettings:
    """Returns the settings of this agent. A launcher's ranks in the environment are not an agent's, so none is read.

    Args:
        environ: the environment.
        run_id: ``--rdzv-id``.
        endpoint: ``--rdzv-endpoint``.
        minimum: the first number of ``--nnodes``.
        maximum: its second number, or the first again.
        local_addr: ``--local-addr``.
        config: ``--rdzv-conf``; values are texts, or numbers where a program calls torch's ``elastic_launch``.

    Raises:
        ConfigurationError: one of them can't be used.
    """
    _check_place(run_id, endpoint, minimum, maximum)
    given = {key: str(value).strip() for key, value in (config or {}).items() if value is not None}
    _check_known(given)
    numbers = {key: values.parse_whole(given[key], _named(key), minimum=1) for key in TORCH_KEYS if key in given}
    network = _network(environ, given)
    store_port = values.text_of(environ, "MINGLE_MASTER_PORT")
    return AgentSettings(
        settings=Settings(
            **structs.asdict(network),
            job_id=settings.check_job_id(run_id, "--rdzv-id"),
            rank=None,
            world_size=maximum,
            master_port=None
            if store_port is None
            else values.parse_whole(store_port, "MINGLE_MASTER_PORT", minimum=1, maximum=values.MAX_PORT),
        ),
        minimum=minimum,
        maximum=maximum,
        local_addr=local_addr or None,
        allow_minority=_flag(given, "allow_minority"),
        torch=numbers,
    )


def _check_place(run_id: str, endpoint: str | None, minimum: int, maximum: int) -> None:
    nodes = str(maximum) if minimum == maximum else f"{minimum}:{maximum}"
    if not run_id or run_id == "none":
        raise ConfigurationError.explain(
            "torchrun was given no --rdzv-id (it is 'none', torchrun's default).",
            cause="c10d tells jobs apart by their endpoint; here the id does, and all jobs without one would meet",
            remedy="give every job a name, the same on all its nodes: "
            f"torchrun --rdzv-backend=mingle --rdzv-id=NAME --nnodes={nodes} …",
        )
    if endpoint and endpoint.strip():
        raise ConfigurationError.explain(
            f"torchrun was given --rdzv-endpoint={endpoint}, which mingle has no use for.",
            cause="the line was written for the c10d backend; with mingle the nodes find each other",
            remedy="drop --rdzv-endpoint (and PET_RDZV_ENDPOINT); or keep it and use --rdzv-backend=c10d.",
        )


def _check_known(given: Mapping[str, str]) -> None:
    unknown = sorted(set(given) - OWN_KEYS.keys() - set(TORCH_KEYS))
    if unknown:
        raise ConfigurationError.explain(
            f"--rdzv-conf holds {', '.join(unknown)}, which mingle does not know.",
            cause="a mistyped key, one of another backend, or a list separated by commas: in --rdzv-conf a comma "
            "begins the next key, so lists are separated by semicolons",
            remedy=f"mingle's keys are {', '.join(OWN_KEYS)}; torch's are {', '.join(TORCH_KEYS)}.",
        )


def _network(environ: Mapping[str, str], given: Mapping[str, str]) -> Network:
    port = given.get("port")
    ttl = given.get("ttl")
    timeout = given.get("discovery_timeout")
    secret_file = given.get("secret_file")
    return settings.resolve_network(
        environ,
        discovery_timeout=None if timeout is None else values.seconds(timeout, _named("discovery_timeout")),
        interface=given.get("interface"),
        peers=given.get("peers"),
        secret=None if secret_file is None else values.read_secret_file(secret_file, _named("secret_file")),
        port=None if port is None else values.parse_whole(port, _named("port"), minimum=1, maximum=values.MAX_PORT),
        ttl=None if ttl is None else values.parse_whole(ttl, _named("ttl"), maximum=255),
        family=given.get("family"),
    )


def _flag(given: Mapping[str, str], key: str) -> bool:
    text = given.get(key, "0").lower()
    if text in _YES or text in _NO:
        return text in _YES
    raise ConfigurationError.explain(
        f"{_named(key)}={given[key]!r} is neither yes nor no", cause="a mistyped value", remedy="give 1 or 0"
    )


def _named(key: str) -> str:
    return f"--rdzv-conf {key}"
