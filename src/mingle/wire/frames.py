"""The frames of the control connection: what member and host say to each other, as types.

CONFIRM, SEALED, ACK and GO are a two-phase commit; VOID is its abort. ``docs/protocol.md`` shows the frames in their
order, and :mod:`mingle.wire.frame_codec` is their form on the wire.
"""

# No `from __future__ import annotations`: msgspec would have to compile each of them again, whenever this is imported.

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

from mingle.wire.datagrams import (
    MAX_WORLD_SIZE,
    Address,
    Addresses,
    Identifier,
    JobId,
    Kind,
    Offer,
    ProcessId,
    Rank,
    ShortText,
    TcpPort,
    WorldSize,
    check_address,
    make_printable,
)

# A roster comes in parts of at most so many seats, each below the limit of a frame.
ROSTER_CHUNK = 256
# The greatest number of agents of one job. MEMBERS lists at most MAX_PRESENT of them, for messages.
MAX_NODES = 1024
# Three decades: JSON has no infinity, and `list --json` prints this number.
MAX_SECONDS = 1e9
MAX_PRESENT = 64
MAX_LEFT_OUT = 4
# The greatest integer that every language reads exactly. A generation is a time in seconds, or slightly more.
MAX_GENERATION = 2**53

MAX_TEXT_CHARACTERS = 2048
SEATED_ID_BYTES = 4
MAX_SEATED = 128
# The lines of an error that a host sends to all its members.
MAX_REPORT_LINES = 16
Text: TypeAlias = Annotated[str, Meta(max_length=MAX_TEXT_CHARACTERS)]
Epoch: TypeAlias = Annotated[int, Meta(ge=0, lt=2**31)]
RoundNumber: TypeAlias = Annotated[int, Meta(ge=0, lt=2**31)]
Proof: TypeAlias = Annotated[bytes, Meta(max_length=32)]
Nonce: TypeAlias = Annotated[bytes, Meta(min_length=16, max_length=16)]
Token: TypeAlias = Annotated[bytes, Meta(max_length=16)]
MAX_NODE_KEY_BYTES = 256
MAX_ORDER_BYTES = 96
NodeKey: TypeAlias = Annotated[str, Meta(max_length=MAX_NODE_KEY_BYTES)]
Ranks: TypeAlias = Annotated[tuple[Rank, ...], Meta(max_length=4096)]
ProgramPort: TypeAlias = Annotated[int, Meta(ge=0, le=65535)]
"""The port that a member's program may bind; 0: it has none."""
Purpose: TypeAlias = Literal["join", "probe", "conflict", "mesh"]
# The most targets of one node, and so the greatest number of nodes of which every pair is proved.
MAX_TARGETS = 256
# The most nodes that a member is asked about, of those that it does not reach.
MAX_SUSPECTS = 4
PADDING_BYTES = 16_384
"""The padding of GREET. A path that drops large packets carries a handshake, so the proof of a pair needs more."""
Unreached: TypeAlias = Literal[
    "refused", "no answer", "no route", "another program", "silent", "closed", "large packets", "no descriptor"
]
"""How a node failed to open a connection to another one."""
# \Z, since $ lets a line feed pass: the names become part of a command that people copy.
_CHAIN_NAME = "[A-Za-z_][A-Za-z0-9_.-]{0,63}"
CHAIN_PATTERN = rf"^(inet|ip|ip6) {_CHAIN_NAME} {_CHAIN_NAME}\Z"
# What a rule of nft(8) consists of, and neither quotes nor anything else that makes a sentence or a line of a shell.
RULE_PATTERN = r"^[A-Za-z0-9 _.,:/{}()!=<>@&|*-]{0,200}\Z"
FirewallManager: TypeAlias = Literal["nft", "ufw", "firewalld", "iptables"]


class Path(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One way from a member to the host, proved by a conversation that went over it."""

    host_address: Address
    local_address: Address
    interface: ShortText
    """The member's interface that owns ``local_address``."""
    weak: bool = False
    """Whether it says nothing about the network of ``host_address``: see
    :func:`mingle.network.routes.reached_weakly`."""

    def __post_init__(self) -> None:
        make_printable(self, "interface")
        check_address(self.host_address)
        check_address(self.local_address)


Paths: TypeAlias = Annotated[tuple[Path, ...], Meta(max_length=64)]
MAX_OWN_ADDRESSES = 64


Unit: TypeAlias = Literal["rank", "node"]
"""What the ranks of a job count: ``mingle-run`` and agents count nodes."""


class ProcessInfo(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A process, as an error names it."""

    hostname: ShortText = ""
    pid: ProcessId = 0
    address: Annotated[str, Meta(max_length=64)] = ""
    rank: Rank | None = None
    unit: Unit = "rank"

    def __post_init__(self) -> None:
        make_printable(self, "hostname", "address")

    def __str__(self) -> str:
        rank = "" if self.rank is None else f"{self.unit} {self.rank} on "
        address = f" ({self.address})" if self.address else ""
        return f"{rank}host {self.hostname or 'unknown'}{address}, pid {self.pid}"


class Place(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A rank's place in a job that is complete."""

    rank: Rank
    world_size: WorldSize
    local_rank: Rank
    local_world_size: WorldSize
    node_rank: Rank
    num_nodes: WorldSize


class Frame(Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True):
    """Base of all frames."""


# --- the handshake ------------------------------------------------------------------------------------------


class Hello(Frame, frozen=True, kw_only=True, tag="hello", omit_defaults=True):
    """Member to host, first: the caller, the session, and the purpose."""

    job: JobId
    attempt: ShortText = ""
    member: Identifier
    nonce: Nonce
    session_hash: Identifier
    """Identifies the session to its host only (:func:`mingle.wire.authentication.session_hash`)."""
    purpose: Purpose
    who: ProcessInfo = ProcessInfo()
    proof: Proof = b""
    """With a secret: the MAC over the nonce and the session; empty without one."""


class Welcome(Frame, frozen=True, kw_only=True, tag="welcome", omit_defaults=True):
    """Host to member: the session, and the proof that this host hosts it."""

    session: Identifier
    nonce: Nonce
    addresses: Addresses
    """The host's true addresses: an endpoint that is not among them is a relay."""
    port: TcpPort
    proof: Proof = b""
    """With a secret: the MAC over the handshake's transcript. Empty: this host has no secret."""


class Prove(Frame, frozen=True, kw_only=True, tag="prove", omit_defaults=True):
    """Member to host: the same proof from the other side. With a secret all that follows carries MACs."""

    proof: Proof = b""


# --- joining ------------------------------------------------------------------------------------------------


class Join(Frame, frozen=True, kw_only=True, tag="join", omit_defaults=True):
    """Member to host: everything the host needs to seat it."""

    world_size: WorldSize
    rank: Rank | None = None
    node: NodeKey
    local_rank: Rank | None = None
    local_world_size: WorldSize | None = None
    node_rank: Rank | None = None
    who: ProcessInfo = ProcessInfo()
    kind: Kind = "ranks"
    versions: Annotated[dict[ShortText, ShortText], Meta(max_length=16)] = {}
    paths: Paths = ()
    addresses: Annotated[tuple[Address, ...], Meta(max_length=MAX_OWN_ADDRESSES)] = ()
    """All addresses of the member's machine, whatever interfaces it uses; none if they are not known, or too many."""
    minimum: WorldSize | None = None
    """Agents only: how many nodes there must be; ``world_size`` is how many there may be."""
    generation: Annotated[int, Meta(ge=-1, le=MAX_GENERATION)] = -1
    """Agents only: the highest generation of the sessions that the agent was in; -1 before the first."""
    clock: Annotated[int, Meta(ge=0, le=MAX_GENERATION)] = 0
    """Agents only: the time by the agent's wall clock, in seconds since 1970; 0: not known."""
    had_quorum: bool = False
    """Agents only: whether the agent was in a session that had its quorum."""
    surplus: bool = False
    """Agents only: whether the agent was refused as surplus, and has been in no session since."""
    token: Token = b""
    """The token of the member's seat in this session, if it has one: the member comes back on a new connection."""
    age: Annotated[float, Meta(ge=0, le=MAX_SECONDS)] = 0.0
    """Agents only: seconds since the agent began."""
    rounds: bool = False
    """Agents only: whether the agent takes part in the rounds that the host begins."""
    program_port: ProgramPort = 0
    """``mingle-run`` only: a TCP port that is free on the member's machine for its program."""
    mesh_port: ProgramPort = 0
    """The TCP port on which the member answers the connections of the mesh; 0: no node dials it."""
    order: Annotated[bytes, Meta(max_length=MAX_ORDER_BYTES)] = b""
    """Where the member's machine stands among those of the job: receivers compare it byte by byte and read nothing else
    from it. Empty: after all others, in the order in which they come."""

    def __post_init__(self) -> None:
        make_printable(self, "versions")


class Joined(Frame, frozen=True, kw_only=True, tag="joined", omit_defaults=True):
    """Host to member: you have a seat."""

    session: Identifier
    epoch: Epoch = 0
    token: Token = b""
    """Random, the same as long as the seat is held: it proves that a caller holds the seat. A member id can be
    overheard."""


RefusalReason: TypeAlias = Literal[
    "rank taken",
    "node rank taken",
    "rank out of range",
    "world size",
    "version",
    "full",
    "ranks mixed",
    "kind",
    "running",
    "secret",
    "session",
    "network",
    "surplus",
    "mesh",
]


class Refused(Frame, frozen=True, kw_only=True, tag="refused", omit_defaults=True):
    """Host to member: you get no seat; the reason, and the process that has it."""

    reason: RefusalReason
    detail: Text = ""
    who: ProcessInfo | None = None
    cause: Text = ""
    """The likely cause, if it is that the member and another one can't reach each other."""
    remedy: Text = ""
    """What to do about it."""

    def __post_init__(self) -> None:
        make_printable(self, "detail", "cause", "remedy")


class Running(Frame, frozen=True, kw_only=True, tag="running", omit_defaults=True):
    """Host to a caller that only asked whether the session is alive: it is."""

    state: Literal["open", "sealed", "running"]
    world_size: WorldSize
    seconds: Annotated[float, Meta(ge=0, le=MAX_SECONDS)] = 0.0
    """How long it has been in this state."""
    host: ProcessInfo
    joined: Ranks = ()
    missing: Ranks = ()
    roster: Text = ""
    """Its members, for people."""
    store_address: Address | None = None
    """Where the store listens; None: there is no store yet."""
    store_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    surplus: bool = False
    """Agents only: whether the caller would be surplus, because all members have answered lately."""

    def __post_init__(self) -> None:
        make_printable(self, "roster")
        if self.store_address is not None:
            check_address(self.store_address)


class Target(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A node to which a member has to open a connection: the process that answers there, and where."""

    member: Identifier
    address: Address
    port: TcpPort

    def __post_init__(self) -> None:
        check_address(self.address)


class Confirm(Frame, frozen=True, kw_only=True, tag="confirm", omit_defaults=True):
    """Host to member: all members are there; are you still there, and do you reach these nodes?"""

    session: Identifier
    epoch: Epoch
    network: Address | None = None
    """The host's address on the network whose mesh is proved; None: no mesh is proved."""
    targets: Annotated[tuple[Target, ...], Meta(max_length=MAX_TARGETS)] = ()
    """The member's own targets, the first to dial first; none if another process of its node has them."""
    seconds: Annotated[float, Meta(ge=0, le=60)] = 0.0
    """How long a target that does not answer is dialed."""
    suspects: Annotated[tuple[Target, ...], Meta(max_length=MAX_SUSPECTS)] = ()
    """Nodes that this one did not reach before, or that did not reach it: does this machine itself block them?"""

    def __post_init__(self) -> None:
        if self.network is not None:
            check_address(self.network)


class Failure(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A target to which a member could open no connection."""

    member: Identifier
    how: Unreached
    detail: ShortText = ""

    def __post_init__(self) -> None:
        make_printable(self, "detail")


class Blocked(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a machine has found out about itself: its firewall blocks TCP connections from, or to, another node.

    The error with it is shown on all machines. So the host writes the fix, and the rule can't look like a command.
    """

    address: Address
    """The other node."""
    outgoing: bool = False
    chain: Annotated[str, Meta(pattern=CHAIN_PATTERN)]
    """Family, table and name of the chain."""
    rule: Annotated[str, Meta(pattern=RULE_PATTERN)] = ""
    """The rule; empty: the chain's policy."""
    manager: FirewallManager = "nft"
    """The program that keeps the rules."""

    def __post_init__(self) -> None:
        check_address(self.address)


class Confirmed(Frame, frozen=True, kw_only=True, tag="confirmed", omit_defaults=True):
    """Member to host: I am, and leave only on VOID, end of file or my own deadline."""

    session: Identifier
    epoch: Epoch
    paths: Paths
    failures: Annotated[tuple[Failure, ...], Meta(max_length=MAX_TARGETS)] = ()
    """The targets that the member could not reach; it has reached all others."""
    blocked: Blocked | None = None
    """What keeps it apart from one of the nodes that it was asked about; None: nothing that it can see."""


class Greet(Frame, frozen=True, kw_only=True, tag="greet", omit_defaults=True):
    """Either side of a connection of the mesh: this member speaks, and large packets pass."""

    member: Identifier
    padding: Annotated[bytes, Meta(max_length=PADDING_BYTES)] = b""


class Sealed(Frame, frozen=True, kw_only=True, tag="sealed", omit_defaults=True):
    """Host to member: the job is complete; this is your place in it, and this is the store."""

    session: Identifier
    epoch: Epoch
    place: Place
    store_address: Address
    store_port: TcpPort
    store_token: Annotated[str, Meta(max_length=64)]
    """What the store holds under this session's key: proves that it is this store and no other."""
    roster_digest: Proof
    unproved: Text = ""
    """What the proof of the mesh does not show, for people."""

    def __post_init__(self) -> None:
        make_printable(self, "unproved")
        check_address(self.store_address)


class Ack(Frame, frozen=True, kw_only=True, tag="ack", omit_defaults=True):
    """Member to host: I opened the store and read the token there."""

    session: Identifier
    epoch: Epoch


class Go(Frame, frozen=True, kw_only=True, tag="go", omit_defaults=True):
    """Host to member: every rank has acknowledged. Decided once per session."""

    session: Identifier
    epoch: Epoch


class Void(Frame, frozen=True, kw_only=True, tag="void", omit_defaults=True):
    """Host to member: this epoch is aborted; you keep your seat, and a new epoch will come."""

    session: Identifier
    epoch: Epoch
    reason: Text

    def __post_init__(self) -> None:
        make_printable(self, "reason")


class Lead(Frame, frozen=True, kw_only=True, tag="lead", omit_defaults=True):
    """Host to the member that is the first in order, once all have confirmed: host the job in my place."""

    session: Identifier
    epoch: Epoch


class HostSeen(Frame, frozen=True, kw_only=True, tag="host-seen", omit_defaults=True):
    """Member to host, or one host to another that it has called: this job has one more host.

    A member that was sent LEAD answers with the OFFER of its own new session, and hangs up.
    """

    offer: Offer


class Unreachable(Frame, frozen=True, kw_only=True, tag="unreachable", omit_defaults=True):
    """Host to another host that has called it: I can't reach this session of yours, so close it and join mine."""

    session: Identifier


class Ready(Frame, frozen=True, kw_only=True, tag="ready", omit_defaults=True):
    """Member to host: the process group exists."""

    session: Identifier


class Leave(Frame, frozen=True, kw_only=True, tag="leave", omit_defaults=True):
    """Member to host: I end on purpose; this is not a crash."""

    session: Identifier
    reason: Text = ""
    failed: bool = False
    """Whether the others have lost it: the end of an agent that is in no round is not that of the job."""

    def __post_init__(self) -> None:
        make_printable(self, "reason")


class Closed(Frame, frozen=True, kw_only=True, tag="closed", omit_defaults=True):
    """Host to member: the session ends on purpose."""

    session: Identifier
    reason: Text = ""
    conflict: bool = False
    """Whether the host ended it because of a conflict that concerns every rank."""
    network: bool = False
    """Whether that conflict is that the ranks share no network."""
    regather: bool = False
    """Agents only: the session ends, the job does not; look for a host again."""
    offer: Offer | None = None
    """The session for which the host has closed its own; join that one."""
    unconnected: Annotated[tuple[Text, ...], Meta(max_length=MAX_REPORT_LINES)] = ()
    """Which nodes can't connect to each other, line by line, if that is the conflict."""
    cause: Text = ""
    """The likely cause of that, or why the host has given up."""
    remedy: Text = ""
    """What to do about it."""

    def __post_init__(self) -> None:
        make_printable(self, "reason", "unconnected", "cause", "remedy")


class Members(Frame, frozen=True, kw_only=True, tag="members", omit_defaults=True):
    """Host to member, before SEALED and whenever it changes: the members of this session of agents."""

    generation: Annotated[int, Meta(ge=0, le=MAX_GENERATION)]
    """Higher than that of any earlier session of its founders, and no earlier than their clocks at its start."""
    quorum: bool = False
    """Whether the session has had its quorum."""
    present: Annotated[tuple[ProcessInfo, ...], Meta(max_length=MAX_PRESENT)] = ()
    left_out: Annotated[tuple[Text, ...], Meta(max_length=MAX_LEFT_OUT)] = ()
    """Which nodes got no seat lately since they and members can't reach each other, for people."""
    ending: bool = False
    """Whether an agent has ended the job for all: no round begins any more."""

    def __post_init__(self) -> None:
        make_printable(self, "left_out")


# --- questions ----------------------------------------------------------------------------------------------


class Ask(Frame, frozen=True, kw_only=True, tag="ask", omit_defaults=True):
    """Member to host: send me the status, or the roster."""

    what: Literal["status", "roster"]


class Status(Frame, frozen=True, kw_only=True, tag="status", omit_defaults=True):
    """Host to member: the ranks that joined, those that never came, and those that left."""

    joined: Annotated[int, Meta(ge=0, le=MAX_WORLD_SIZE)]
    world_size: WorldSize
    missing: Ranks = ()
    departed: Ranks = ()
    """Ranks that joined and have left; not among the missing."""
    left: Annotated[tuple[Text, ...], Meta(max_length=32)] = ()
    refused: Annotated[tuple[Text, ...], Meta(max_length=32)] = ()
    phase: ShortText = "open"
    unconfirmed: Ranks = ()
    """Ranks that have not answered in this phase."""
    present: Annotated[tuple[Text, ...], Meta(max_length=32)] = ()
    """Agents only: the members."""
    lacks: Text = ""
    """Agents only: what the session lacks before it can be sealed."""
    hosts: Text = ""
    """The host names of those that joined, for people; empty once all have."""
    unanswered: Text = ""
    """Which nodes accept connections of the mesh and do not answer on them, for people."""
    seated: Annotated[bytes, Meta(max_length=SEATED_ID_BYTES * MAX_SEATED)] = b""
    """The first bytes of the member id of each that has joined, for people; empty if they are too many."""

    def __post_init__(self) -> None:
        make_printable(self, "left", "refused", "phase", "present", "lacks", "hosts", "unanswered")

    def seats(self, member: bytes) -> bool | None:
        """Return whether a process has joined; None if the status does not tell."""
        if not self.seated:
            return None
        ids = (self.seated[at : at + SEATED_ID_BYTES] for at in range(0, len(self.seated), SEATED_ID_BYTES))
        return member[:SEATED_ID_BYTES] in ids

    @property
    def awaited(self) -> Ranks:
        """Ranks without a seat, whether they never came or have gone."""
        return tuple(sorted((*self.missing, *self.departed)))


class Seat(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One member in the roster."""

    rank: Rank
    local_rank: Rank
    node_rank: Rank
    hostname: ShortText
    address: Address
    pid: ProcessId
    program_port: ProgramPort = 0
    """``mingle-run`` only: a TCP port that is free on the member's machine for its program."""

    def __post_init__(self) -> None:
        make_printable(self, "hostname")
        check_address(self.address)


class Roster(Frame, frozen=True, kw_only=True, tag="roster", omit_defaults=True):
    """Host to member: a part of the roster, in order of rank."""

    first: Rank
    total: WorldSize
    seats: Annotated[tuple[Seat, ...], Meta(max_length=ROSTER_CHUNK)]


class Ping(Frame, frozen=True, kw_only=True, tag="ping", omit_defaults=True):
    """Either side: a question whether the other side is alive."""

    number: Annotated[int, Meta(ge=0, lt=2**31)] = 0


class Pong(Frame, frozen=True, kw_only=True, tag="pong", omit_defaults=True):
    """Either side: the answer to PING."""

    number: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    proving: bool = False
    """Whether a member is still trying to reach the store, and no attempt has failed since SEALED."""


# --- rounds (agents only) -----------------------------------------------------------------------------------


class Next(Frame, frozen=True, kw_only=True, tag="next", omit_defaults=True):
    """Member to host: my workers are stopped, and I wait for a round.

    The first round that this agent's torchrun got decides its rank: such agents come first, and in that order.
    """

    generation: Annotated[int, Meta(ge=-1, le=MAX_GENERATION)] = -1
    """The session of that round; -1: it got none."""
    number: Annotated[int, Meta(ge=-1, lt=2**31)] = -1
    """The number of that round in its session."""


class Begin(Frame, frozen=True, kw_only=True, tag="begin", omit_defaults=True):
    """Host to member: a round begins, and you are in it."""

    number: RoundNumber
    rank: Rank
    size: WorldSize
    doubts: Text = ""
    """What is doubtful in the node ranks that its agents ask for, for people."""

    def __post_init__(self) -> None:
        make_printable(self, "doubts")


class Wanted(Frame, frozen=True, kw_only=True, tag="wanted", omit_defaults=True):
    """Host to member: another round has to follow this one: stop your workers, and say NEXT."""

    number: RoundNumber


class Done(Frame, frozen=True, kw_only=True, tag="done", omit_defaults=True):
    """Member to host: my workers are done, so that my end, or a newcomer, is no reason for another round."""


class Round(Frame, frozen=True, kw_only=True, tag="round", omit_defaults=True):
    """Member to host: a round has begun; does the session still stand?"""

    number: Annotated[int, Meta(ge=0, lt=2**31)] = 0


class RoundHeld(Frame, frozen=True, kw_only=True, tag="round-held", omit_defaults=True):
    """Host to member: it did when you asked, since enough agents have answered a PING sent after that."""

    number: Annotated[int, Meta(ge=0, lt=2**31)] = 0


_Handshake: TypeAlias = Hello | Welcome | Prove
_Joining: TypeAlias = Join | Joined | Refused | Running | Members
_Forming: TypeAlias = Confirm | Greet | Confirmed | Sealed | Ack | Go | Void
_Competing: TypeAlias = Lead | HostSeen | Unreachable
_Ending: TypeAlias = Ready | Leave | Closed
_Asking: TypeAlias = Ask | Status | Roster | Ping | Pong
_Rounds: TypeAlias = Next | Begin | Wanted | Done | Round | RoundHeld
AnyFrame: TypeAlias = _Handshake | _Joining | _Forming | _Competing | _Ending | _Asking | _Rounds
