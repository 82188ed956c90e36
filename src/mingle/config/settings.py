"""The settings of a process: arguments, environment and defaults.

Every entry point puts what it was given, unchecked, into one record, :class:`Arguments`. `resolve` makes a
:class:`Settings` of it, and `resolve_network` a :class:`Network` where there is no job: here alone are values checked.
Arguments take precedence over ``MINGLE_*`` variables, and these over the variables of other programs. The environment
is a mapping, without what mingle itself has written into it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from msgspec import Struct, structs

from mingle.config import launchers, values
from mingle.config.launchers import Placement
from mingle.config.placement import NodeRank, argued_node_rank, resolve_placement
from mingle.config.values import Peer, Secret
from mingle.errors import ConfigurationError, LauncherError
from mingle.wire.datagrams import MAX_JOB_ID_BYTES, MAX_WORLD_SIZE

if TYPE_CHECKING:
    from collections.abc import Iterable

DEFAULT_PORT = 29499
DEFAULT_DISCOVERY_TIMEOUT = 300.0

Family: TypeAlias = Literal["auto", "4", "6"]
"""The IP versions to use; `auto` is both."""
Progress: TypeAlias = Literal["auto", "off"]
Mesh: TypeAlias = Literal["on", "warn", "off"]
"""Whether a job forms only if all its nodes can open TCP connections to each other."""
DEFAULT_MESH: Mesh = "on"
Section: TypeAlias = Literal["Job", "Network", "torch"]


class Setting(Struct, frozen=True):
    """How one setting is written and documented: variable, option, ``env`` and documents are made from these records.

    Attributes:
        name: the argument of :func:`mingle.init`, the field of :class:`Arguments`, and the key of ``--rdzv-conf``.
        meaning: what it is, in one line, without its values and its default.
        default: what applies without it, as people read it.
        values: the words that it can be, the first one by default.
        limits: the smallest and the largest number that it can be.
        section: the part of ``mingle-discover env`` that shows it; an option of "Network" is one of all commands.
        key: whether it is a key of ``--rdzv-conf``.
        flags: of its option; empty: the commands that have one say what it means to them.
        metavar: what stands for the value of the option.
        repeated: whether the option can be repeated.
        suffix: of the variable, if it is not the name.
    """

    name: str
    meaning: str
    default: str = "none"
    values: tuple[str, ...] = ()
    limits: tuple[int, int] | None = None
    section: Section = "Network"
    key: bool = False
    flags: tuple[str, ...] = ()
    metavar: str | None = None
    repeated: bool = False
    suffix: str = ""

    @property
    def variable(self) -> str:
        """The environment variable."""
        return f"MINGLE_{self.suffix or self.name.upper()}"

    @property
    def fallback(self) -> str:
        """What applies without an argument or an option."""
        return f"{self.variable}, else {self.default}"

    @property
    def described(self) -> str:
        """The values and the meaning."""
        return f"{self.one_of}: {self.meaning}" if self.values else self.meaning

    @property
    def one_of(self) -> str:
        """The values, as an enumeration."""
        return f"{', '.join(self.values[:-1])} or {self.values[-1]}"


_PEERS = (
    "hosts to ask by unicast as well, host or host:port; for networks without multicast also dir:/path, a directory "
    "that all machines mount, or s3://bucket/prefix, a bucket"
)
_PROGRESS = "the progress line while ranks are missing, and warnings on stderr if no logging is configured"
_PORTS = (1, values.MAX_PORT)
SETTINGS: dict[str, Setting] = {
    each.name: each
    for each in (
        Setting(
            "job_id", f"the job's name, 1 to {MAX_JOB_ID_BYTES} bytes, the same on every rank",
            "the launcher's job id", section="Job"
        ),
        Setting("rank", "this process's rank", "the launcher's, then RANK", section="Job"),
        Setting("world_size", "the number of ranks in the job", "the launcher's, then WORLD_SIZE", section="Job"),
        Setting(
            "node_rank", "the rank that this node asks for where ranks are assigned",
            "the launcher's number of the node, else host names decide",
            limits=(0, MAX_WORLD_SIZE - 1), section="Job", key=True, flags=("--node-rank",), metavar="R"
        ),
        Setting(
            "discovery_timeout", "seconds until an incomplete job is an error", f"{DEFAULT_DISCOVERY_TIMEOUT:g}",
            section="Job", key=True, suffix="TIMEOUT"
        ),
        Setting(
            "interface", "interfaces to use, names or addresses",
            "those that `mingle-discover interfaces` shows as used",
            key=True, flags=("-i", "--interface"), metavar="NAME", repeated=True
        ),
        Setting(
            "port", "UDP port of the discovery, the same on all machines", str(DEFAULT_PORT),
            limits=_PORTS, key=True, flags=("-p", "--port"), metavar="PORT"
        ),
        Setting("peers", _PEERS, key=True, flags=("--peers",), metavar="HOST[:PORT]", repeated=True),
        Setting("secret", "the secret that all ranks share; ranks without it are rejected"),
        Setting(
            "secret_file", "the file that holds the secret, instead of the secret itself", "MINGLE_SECRET",
            key=True, flags=("--secret-file",), metavar="PATH"
        ),
        Setting(
            "ttl", "the hop limit of multicasts (1: the local network only)", "1",
            limits=(0, 255), key=True, flags=("--ttl",), metavar="HOPS"
        ),
        Setting("family", "the IP versions to use", "auto", ("auto", "4", "6"), key=True, flags=("--family",)),
        Setting("advertise", "the address to announce where NAT hides this host's own"),
        Setting("master_port", "TCP port of rank 0's store", "any free one", limits=_PORTS, section="torch"),
        Setting(
            "mesh", "whether the job forms only if all its nodes can open TCP connections to each other; warn only "
            "names those that can't", DEFAULT_MESH, ("on", "warn", "off"), section="Job", key=True, flags=("--mesh",)
        ),
        Setting("progress", _PROGRESS, "auto", ("auto", "off"), section="Job"),
    )
}  # fmt: skip
"""All settings, by name."""
VARIABLES: dict[str, Setting] = {each.variable: each for each in SETTINGS.values()}
"""The same by the environment variables that mingle reads for itself."""
GENERATION = "MINGLE_GENERATION"
"""A fencing token that names the session of elastic workers and sorts by its number; mingle does not read it."""
HOSTS, HOSTFILE = "MINGLE_HOSTS", "MINGLE_HOSTFILE"
"""The addresses of all machines, and a file of them, which the program of ``mingle-run`` gets; mingle reads neither."""
WRITTEN = frozenset({GENERATION, HOSTS, HOSTFILE})
"""What mingle writes for others under its own prefix."""

# This list is not read from torch, because this module must not import torch.
_BACKENDS = frozenset({"gloo", "nccl", "mpi", "ucc", "xccl", "hccl"})
# This cutoff matches JOB with JOB_ID, and matches nothing with LAB_HOSTS.
_SIMILAR = 0.65


class Spelling(Struct, frozen=True, kw_only=True):
    """How the arguments of an entry point are written.

    Attributes:
        names: what an error calls an argument; one that is missing is called by its name in :class:`Arguments`.
        as_text: whether numbers are written as text, as in a variable.
    """

    names: Mapping[str, str] = {}
    as_text: bool = False


class Arguments(Struct, frozen=True, kw_only=True):
    """What an entry point was given, unchecked; None: not given. :func:`mingle.init` documents the arguments.

    A secret is masked, because tracebacks that show local variables show the repr of this record. An empty sequence of
    interfaces or peers becomes None: it is a repeatable option that was not given.

    Attributes:
        secret_file: the file that holds the secret, of a command.
        may_leave_torchrun: whether rank and world_size, both given with another job id than torchrun's, form a job
            beside torchrun's. Such a job can have ranks that this torchrun did not start.
        spelling: how the entry point writes the arguments.
    """

    job_id: str | None = None
    rank: int | None = None
    world_size: int | None = None
    discovery_timeout: float | str | timedelta | None = None
    interface: str | Sequence[str] | None = None
    peers: str | Sequence[str] | None = None
    secret: str | bytes | Secret | None = None
    secret_file: str | None = None
    port: int | str | None = None
    master_port: int | None = None
    ttl: int | str | None = None
    family: str | int | None = None
    advertise: str | None = None
    node_rank: int | str | None = None
    mesh: str | None = None
    may_leave_torchrun: bool = False
    spelling: Spelling = Spelling()

    def __post_init__(self) -> None:
        structs.force_setattr(self, "secret", Secret.of(self.secret))
        for field in ("interface", "peers"):
            if (given := getattr(self, field)) is not None:
                structs.force_setattr(self, field, values.items(given) or None)

    def name_of(self, field: str) -> str:
        """Return what an error calls an argument."""
        return self.spelling.names.get(field, field)


class Network(Struct, frozen=True, kw_only=True):
    """How to discover: what concerns the network and not one job.

    Attributes:
        discovery_timeout: seconds until an incomplete job is an error.
        interfaces: names or addresses of the interfaces to use; empty: mingle chooses.
        interfaces_from: what named them (such as ``interface=``, ``--interface`` or a variable); empty: mingle chooses.
        peers: hosts to ask by unicast as well.
        folders: shared folders to look in as well.
        secret: what the job's members share; None: there is none.
        port: the UDP port of the discovery.
        ttl: the multicast time to live, in hops (RFC 1112); 0 keeps datagrams on this host.
        family: the IP versions to use.
        advertise: the address to announce in place of this host's own.
        progress: whether a progress line may be shown.
    """

    discovery_timeout: float = DEFAULT_DISCOVERY_TIMEOUT
    interfaces: tuple[str, ...] = ()
    interfaces_from: str = ""
    peers: tuple[Peer, ...] = ()
    folders: tuple[str, ...] = ()
    secret: Secret | None = None
    port: int = DEFAULT_PORT
    ttl: int = 1
    family: Family = "auto"
    advertise: str | None = None
    progress: Progress = "auto"

    @property
    def interface_was_named(self) -> bool:
        """Whether the user named the interfaces to mingle, and not to Gloo alone."""
        return self.interfaces_from not in ("", "GLOO_SOCKET_IFNAME")


class Settings(Network, frozen=True, kw_only=True):
    """All that a rank needs to find its job.

    Attributes:
        job_id: the job's name, 1 to 256 bytes in UTF-8.
        placement: what the arguments and the environment say about this process's place in the job.
        master_port: the TCP port of rank 0's store; None: any free one.
        master_addr: the address of rank 0's store, if torchrun has brought the ranks together already, so that nothing
            is discovered; else None.
        beside_torchrun: whether torchrun has placed this process in another job than this one.
        mesh: what to do if nodes of the job can't open TCP connections to each other.
    """

    job_id: str
    placement: Placement
    master_port: int | None = None
    master_addr: str | None = None
    beside_torchrun: bool = False
    mesh: Mesh


def resolve(environ: Mapping[str, str], arguments: Arguments) -> Settings:
    """Return the settings of this process; a blank variable does not count.

    Raises:
        ConfigurationError: when a value can't be used, or an argument contradicts the environment.
        LauncherError: when a launcher's environment is incomplete or contradicts itself.
    """
    job_id, rank, world_size = arguments.job_id, arguments.rank, arguments.world_size
    if (named := job_id if job_id is not None else environ.get("MINGLE_JOB_ID")) is not None:
        refuse_backend(named, "MINGLE_JOB_ID" if job_id is None else arguments.name_of("job_id"))
    network = resolve_network(environ, arguments)
    beside_torchrun = (
        arguments.may_leave_torchrun
        and None not in (named, rank, world_size)
        and launchers.TORCHRUN.is_seen(environ)
        and named != environ.get("TORCHELASTIC_RUN_ID")
    )
    placement = resolve_placement(
        environ,
        rank=rank,
        world_size=world_size,
        node_rank=node_rank_argument(arguments),
        beside_torchrun=beside_torchrun,
    )
    return Settings(
        **structs.asdict(network),
        job_id=_job_id(environ, arguments, placement),
        placement=placement,
        master_port=resolve_store_port(environ, arguments, launcher=placement.launcher),
        master_addr=environ["MASTER_ADDR"].strip() if placement.launcher == launchers.TORCHRUN.name else None,
        beside_torchrun=beside_torchrun,
        mesh=resolve_mesh(environ, arguments),
    )


def resolve_mesh(environ: Mapping[str, str], arguments: Arguments, default: Mesh = DEFAULT_MESH) -> Mesh:
    """Return what to do if nodes of the job can't open TCP connections to each other.

    Raises:
        ConfigurationError: the value is not known.
    """
    mesh: Mesh = _word(environ, arguments, "mesh", default)
    return mesh


def node_rank_argument(arguments: Arguments) -> NodeRank | None:
    """Return the node rank that an entry point was given; None: it was given none.

    Raises:
        ConfigurationError: it is not a whole number from 0 on.
    """
    return argued_node_rank(arguments.node_rank, arguments.name_of("node_rank"), as_text=arguments.spelling.as_text)


def resolve_network(environ: Mapping[str, str], arguments: Arguments) -> Network:
    """Return the settings of the network, for a command that has no job, or no place in it.

    Raises:
        ConfigurationError: when a value can't be used.
    """
    interfaces, interfaces_from = _interfaces(environ, arguments)
    timeout, timeout_from = _given(environ, arguments, "discovery_timeout")
    peers, peers_from = _given(environ, arguments, "peers")
    family: Family = _word(environ, arguments, "family")
    udp_port = _whole(environ, arguments, "port")
    hops = _whole(environ, arguments, "ttl")
    # First: an error of another peer shows the whole value, and a password in a URL must not be in it.
    folders = () if peers is None else values.folders(peers, peers_from)
    return Network(
        discovery_timeout=DEFAULT_DISCOVERY_TIMEOUT if timeout is None else values.seconds(timeout, timeout_from),
        interfaces=interfaces,
        interfaces_from=interfaces_from,
        peers=() if peers is None else values.peers(peers, peers_from),
        folders=folders,
        secret=_secret(environ, arguments),
        port=DEFAULT_PORT if udp_port is None else udp_port,
        ttl=1 if hops is None else hops,
        family=family,
        advertise=_advertise(environ, arguments, family),
        progress=_word(environ, arguments, "progress"),
    )


def refuse_windows() -> None:
    """Raise ConfigurationError on Windows, where mingle can be imported and does not run."""
    if sys.platform == "win32":
        raise ConfigurationError.explain(
            "mingle does not run on Windows.",
            cause="its sockets and process identities need Linux (macOS: best effort)",
            remedy="run it under WSL2 or in a Linux container.",
        )


def check_job_id(value: object, source: str) -> str:
    """Return a job id as it is: any text of 1 to 256 bytes in UTF-8, used verbatim.

    Raises:
        ConfigurationError: when it is not such a text.
    """
    if not isinstance(value, str):
        problem = "is not a str"
    elif not value:
        problem = "is empty"
    elif any("\ud800" <= character <= "\udfff" for character in value):
        problem = "holds a surrogate, so it is not text in UTF-8"
    elif len(value.encode()) > MAX_JOB_ID_BYTES:
        problem = f"is {len(value.encode())} bytes long in UTF-8"
    else:
        if value.startswith("-") or value.endswith("-"):
            values.remark(
                f"the job id {value!r} {'begins' if value.startswith('-') else 'ends'} with '-': a variable in it is "
                "probably unset, as USER is in many containers, and then other users' jobs get the same id; fix: write "
                "the name itself, or $(id -un)"
            )
        return value
    raise ConfigurationError.explain(
        f"{source}={value!r:.100} {problem}",
        cause="a variable that a template did not fill in, or another value in the job id's place",
        remedy=f"give any text of 1 to {MAX_JOB_ID_BYTES} bytes in UTF-8, the same on all ranks of the job",
    )


def refuse_backend(job_id: object, source: str, backends: Iterable[str] = _BACKENDS) -> None:
    """Reject the name of a torch backend as job id: ``init_process_group("gloo")`` after a search and replace.

    Raises:
        ConfigurationError: the job id is a backend's name, such as ``gloo`` or ``cpu:gloo,cuda:nccl``.
    """
    parts = job_id.split(",") if isinstance(job_id, str) else [""]
    if {part.rpartition(":")[2].lower() for part in parts} <= set(backends):
        raise ConfigurationError.explain(
            f"{source}={job_id!r} is the name of a torch backend and no job id",
            cause="init_process_group takes the backend as its first argument, mingle.init the job id",
            remedy=f"call mingle.init(job_id=NAME, backend={job_id!r}) with one NAME for all ranks of this job",
        )


def unknown_variables(environ: Mapping[str, str]) -> dict[str, str | None]:
    """Return the unknown variables that look like mingle's, each with the one that was most likely meant."""
    prefix = "MINGLE_"
    unknown = sorted(name for name in environ if name.startswith(prefix) and name not in {*VARIABLES, *WRITTEN})
    known = [name.removeprefix(prefix) for name in VARIABLES]
    near = {name: values.nearest(name.removeprefix(prefix), known, cutoff=_SIMILAR) for name in unknown}
    return {name: None if meant is None else prefix + meant for name, meant in near.items()}


def unknown_variable_text(name: str, meant: str | None) -> str:
    """Return the message for one of `unknown_variables`."""
    hint = "" if meant is None else f"; did you mean {meant}?"
    return f"{name} is set, and mingle reads no such variable{hint}"


def _job_id(environ: Mapping[str, str], arguments: Arguments, placement: Placement) -> str:
    if arguments.job_id is not None:
        return check_job_id(arguments.job_id, arguments.name_of("job_id"))
    if "MINGLE_JOB_ID" in environ:
        # Set but empty is not unset here: all jobs whose template failed in the same way would meet.
        return check_job_id(environ["MINGLE_JOB_ID"], "MINGLE_JOB_ID")
    if placement.job_id is not None:
        return check_job_id(placement.job_id, f"{placement.launcher}'s id")
    mistyped = [item for item in unknown_variables(environ).items() if item[1] == "MINGLE_JOB_ID"]
    raise ConfigurationError.explain(
        "there is no job id",
        cause=unknown_variable_text(*mistyped[0])
        if mistyped
        else "none was passed, MINGLE_JOB_ID is not set, and no launcher gives one",
        remedy="pass job_id= or set MINGLE_JOB_ID, the same on all ranks of the job and on no other job's",
    )


def resolve_store_port(environ: Mapping[str, str], arguments: Arguments, *, launcher: str | None = None) -> int | None:
    """Return the TCP port of rank 0's store: torchrun's where it has placed this process, else the fixed one.

    Raises:
        ConfigurationError: MINGLE_MASTER_PORT, or the argument, is not a port.
        LauncherError: torchrun's MASTER_PORT is not a port.
    """
    fixed = _whole(environ, arguments, "master_port")
    if launcher != launchers.TORCHRUN.name:
        return fixed
    text = environ["MASTER_PORT"].strip()
    return values.parse_whole(text, "MASTER_PORT", minimum=1, maximum=values.MAX_PORT, error=LauncherError)


def _given(environ: Mapping[str, str], arguments: Arguments, name: str) -> tuple[Any, str]:
    """Return the argument or else the variable's text (None: neither), and the name of its source."""
    if (argument := getattr(arguments, name, None)) is not None:
        return argument, arguments.name_of(name)
    variable = SETTINGS[name].variable
    return values.text_of(environ, variable), variable


def _word(environ: Mapping[str, str], arguments: Arguments, name: str, default: str = "") -> Any:
    """Return which of its values a setting has; without any the default, or the first one."""
    setting = SETTINGS[name]
    given, source = _given(environ, arguments, name)
    if given is None:
        return default or setting.values[0]
    if str(given) not in setting.values:
        raise ConfigurationError.explain(
            f"{source}={given!r} is not known", cause="a mistyped value", remedy=f"give {setting.one_of}"
        )
    return str(given)


def _whole(environ: Mapping[str, str], arguments: Arguments, name: str) -> int | None:
    given, source = _given(environ, arguments, name)
    if given is None:
        return None
    is_variable = source == SETTINGS[name].variable
    if is_variable and source.endswith("_PORT") and given.startswith(("tcp://", "udp://", "sctp://")):
        raise ConfigurationError.explain(
            f"{source}={given!r} is the address of a Kubernetes Service, not a number",
            cause="Kubernetes sets NAME_PORT in each pod that starts after a Service of that name: here "
            f"{source.removesuffix('_PORT').lower().replace('_', '-')}",
            remedy="rename the Service, or write enableServiceLinks: false in the pod's spec",
        )
    read = values.parse_whole if is_variable or arguments.spelling.as_text else values.check_whole
    minimum, maximum = SETTINGS[name].limits or (0, MAX_WORLD_SIZE)
    return read(given, source, minimum=minimum, maximum=maximum)


def _interfaces(environ: Mapping[str, str], arguments: Arguments) -> tuple[tuple[str, ...], str]:
    if arguments.interface is not None:
        source = arguments.name_of("interface")
        return values.words(arguments.interface, source), f"{source}=" if source == "interface" else source
    for variable in ("MINGLE_INTERFACE", "GLOO_SOCKET_IFNAME"):
        named = values.text_of(environ, variable)
        if named is not None and not (variable == "GLOO_SOCKET_IFNAME" and gloo_problem(environ)):
            return values.words(named, variable), variable
    return (), ""


def gloo_problem(environ: Mapping[str, str]) -> ConfigurationError | None:
    """Return the error for a ``GLOO_SOCKET_IFNAME`` with which Gloo makes no group; None: it has none."""
    named = values.text_of(environ, "GLOO_SOCKET_IFNAME") or ""
    words = [word for word in named.split(",") if word.startswith(("^", "=")) or values.parse_address(word)]
    if not words:
        return None
    return ConfigurationError.explain(
        f"GLOO_SOCKET_IFNAME={named!r}: Gloo looks for an interface with the name {words[0]!r}, finds none, and makes "
        "no process group",
        cause="a value for NCCL: only NCCL_SOCKET_IFNAME takes '^' and '=', and Gloo takes no address",
        remedy="give exact names, such as GLOO_SOCKET_IFNAME=eth0, or unset it: mingle sets it",
    )


def _secret(environ: Mapping[str, str], arguments: Arguments) -> Secret | None:
    if (argument := Secret.of(arguments.secret)) is not None:
        return values.checked_secret(argument, arguments.name_of("secret"))
    if arguments.secret_file is not None:
        return values.read_secret_file(arguments.secret_file, arguments.name_of("secret_file"))
    given = [name for name in ("MINGLE_SECRET", "MINGLE_SECRET_FILE") if name in environ]
    if not given:
        return None
    if len(given) > 1:
        raise ConfigurationError.explain(
            "both MINGLE_SECRET and MINGLE_SECRET_FILE are set",
            cause="one was added without taking the other away",
            remedy="set one of them",
        )
    if given == ["MINGLE_SECRET"]:
        return values.checked_secret(Secret(environ["MINGLE_SECRET"]), "MINGLE_SECRET")
    return values.read_secret_file(environ["MINGLE_SECRET_FILE"], "MINGLE_SECRET_FILE")


def _advertise(environ: Mapping[str, str], arguments: Arguments, family: Family) -> str | None:
    given, source = _given(environ, arguments, "advertise")
    if given is None:
        return None
    address = values.address(given, source)
    if family not in {"auto", "6" if ":" in address else "4"}:
        raise ConfigurationError.explain(
            f"{source}={given!r} is not an IPv{family} address, and only IPv{family} is used",
            cause="family= or MINGLE_FAMILY was set for another network than this address is of",
            remedy=f"advertise an IPv{family} address, or leave the family at auto",
        )
    return address
