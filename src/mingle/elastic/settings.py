"""The settings of a torchrun agent: torchrun's options, ``--rdzv-conf`` and the ``MINGLE_*`` variables, all checked.

Options take precedence over variables. Torch's own keys of ``--rdzv-conf`` are checked here as well and passed on:
torch would find a mistake in them only after the wait for the other nodes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from mingle.config import settings, values
from mingle.config.launchers import Placement
from mingle.config.placement import asked_node_rank, with_node_rank
from mingle.config.settings import Arguments, Settings, Spelling
from mingle.elastic.quorum import Nodes, Policy
from mingle.errors import ConfigurationError
from mingle.text import nnodes_text, printable

ALLOW_MINORITY = "allow_minority"
OWN_KEYS = {
    **{name: f"{each.described} (default: {each.fallback})" for name, each in settings.SETTINGS.items() if each.key},
    ALLOW_MINORITY: "1: MIN nodes can begin and continue alone; two parts can then both run (default: 0)",
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
"""Torch's keys: whole seconds, or a count; torch always adds ``timeout``. Only those of `TORCH_DEFAULTS` are used: the
host of a session knows which nodes are alive."""
IS_HOST = "is_host"
"""A key of c10d: whether a node holds the store. The agents elect that node, so the key has no effect."""
TORCH_DEFAULTS = {"join_timeout": 600, "last_call_timeout": 30, "read_timeout": 60}
"""The keys that are used, with torch's own defaults (dynamic_rendezvous.py, c10d_rendezvous_backend.py)."""
CONF = "--rdzv-conf"
_SPELLING = Spelling(names={key: f"{CONF} {key}" for key in OWN_KEYS}, as_text=True)
_FLAGS = {**dict.fromkeys(("1", "true", "t", "yes", "y"), True), **dict.fromkeys(("0", "false", "f", "no", "n"), False)}


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """The settings of one torchrun agent.

    Attributes:
        settings: how to discover the other agents; ``world_size`` is the most nodes there may be.
        policy: how many nodes train, and how many found and keep a session.
        local_addr: the value of ``--local-addr``; None selects the address that the gathering finds.
        torch: the options of c10d's rendezvous that are given or used, under torch's keys.
    """

    settings: Settings
    policy: Policy
    local_addr: str | None
    torch: Mapping[str, int]


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
    """Return the settings of this agent. A launcher's ranks are not an agent's: only the number of the node is read.

    Args:
        environ: the environment.
        run_id: ``--rdzv-id``.
        endpoint: ``--rdzv-endpoint``.
        minimum: the first number of ``--nnodes``.
        maximum: its second number, or the first again.
        local_addr: ``--local-addr``.
        config: ``--rdzv-conf``; values are texts, or numbers if a program calls torch's ``elastic_launch``.

    Raises:
        ConfigurationError: one of them can't be used.
        LauncherError: the launcher's number of this node is not a number.
    """
    settings.refuse_windows()
    _check_place(run_id, endpoint, minimum, maximum)
    given = _unquoted(config or {})
    _check_known(given)
    _flag(given.get(IS_HOST, "0"), f"{CONF} {IS_HOST}")
    torch = TORCH_DEFAULTS | {
        key: values.parse_whole(given[key], f"{CONF} {key}", minimum=1) for key in TORCH_KEYS if key in given
    }
    own: dict[str, Any] = {key: given[key] for key in OWN_KEYS if key in given and key != ALLOW_MINORITY}
    arguments = Arguments(**own, spelling=_SPELLING)
    asked = asked_node_rank(environ, settings.node_rank_argument(arguments), nodes=maximum, torchrun=True)
    return AgentSettings(
        settings=Settings(
            **structs.asdict(settings.resolve_network(environ, arguments)),
            job_id=settings.check_job_id(run_id, "--rdzv-id"),
            placement=with_node_rank(Placement(rank=None, world_size=maximum), asked),
            master_port=settings.resolve_store_port(environ, arguments),
            mesh=settings.resolve_mesh(environ, arguments),
        ),
        policy=Policy(
            nodes=Nodes(minimum=minimum, maximum=maximum),
            last_call=torch["last_call_timeout"],
            last_call_is_set="last_call_timeout" in given,
            allow_minority=_flag(given.get(ALLOW_MINORITY, "0"), f"{CONF} {ALLOW_MINORITY}"),
        ),
        local_addr=local_addr or None,
        torch=torch,
    )


def check_host_name(name: str) -> None:
    """Check that torch can look up the name of this machine, which each of its agents does.

    Raises:
        ConfigurationError: it can't: Python refuses the name before it asks any server.
    """
    try:
        name.encode("idna")
    except UnicodeError:
        size = len(os.fsencode(name))
        raise ConfigurationError.explain(
            f"this machine's host name, {printable(name)} ({size} bytes), can't be looked up.",
            cause="torchrun looks up its own name, of which each part between dots must have 1 to 63 bytes, in UTF-8",
            remedy="give the machine a shorter name, of plain letters: `hostnamectl set-hostname NAME`.",
        ) from None


def _check_place(run_id: str, endpoint: str | None, minimum: int, maximum: int) -> None:
    nodes = nnodes_text(minimum, maximum)
    if not run_id or run_id == "none":
        raise ConfigurationError.explain(
            "torchrun was given no --rdzv-id (it is 'none', torchrun's default).",
            cause="c10d identifies a job by its endpoint, mingle by its id: jobs without an id would join each other",
            remedy="give every job a name, the same on all its nodes: "
            f"torchrun --rdzv-backend=mingle --rdzv-id=NAME --nnodes={nodes} …; "
            "PET_RDZV_ID=NAME accelerate launch …; notebook_launcher(rdzv_id=NAME).",
        )
    if endpoint and endpoint.strip():
        cause = "the line was written for the c10d backend; with mingle the nodes find each other"
        remedy = "remove --rdzv-endpoint (and PET_RDZV_ENDPOINT); or keep it and use --rdzv-backend=c10d."
        if endpoint.startswith("None:"):
            cause = "accelerate launch makes it of --main_process_ip, unless --same_network is given"
            remedy = "add --same_network to accelerate launch."
        raise ConfigurationError.explain(
            f"torchrun was given --rdzv-endpoint={endpoint}, which mingle does not use.", cause=cause, remedy=remedy
        )


def _unquoted(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys and values of ``--rdzv-conf`` as text, without quotes around the whole or around a value.

    A program that starts torchrun without a shell passes the quotes of a shell on, and torch splits the text without
    removing them.
    """
    return {key.strip(" '\""): str(value).strip(" '\"") for key, value in config.items() if value is not None}


def _check_known(given: Mapping[str, str]) -> None:
    unknown = sorted(set(given) - OWN_KEYS.keys() - {*TORCH_KEYS, IS_HOST})
    if unknown:
        raise ConfigurationError.explain(
            f"--rdzv-conf holds {', '.join(unknown)}, which mingle does not know.",
            cause="a mistyped key, one of another backend, or a list separated by commas: in --rdzv-conf a comma "
            "begins the next key, so lists are separated by semicolons",
            remedy=f"mingle's keys are {', '.join(OWN_KEYS)}; torch's are {', '.join((*TORCH_KEYS, IS_HOST))}.",
        )


def _flag(text: str, source: str) -> bool:
    meaning = _FLAGS.get(text.lower())
    if meaning is None:
        raise ConfigurationError.explain(
            f"{source}={text!r} is neither yes nor no", cause="a mistyped value", remedy="give 1 or 0"
        )
    return meaning
