"""The states of a session on the host's side, from Open to Committed, and their transitions. Pure data.

Only the registrar moves a session from one to the next (:mod:`mingle.protocol.session.registrar`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, TypeAlias

from msgspec import Struct, field

from mingle.protocol.session.mesh_proof import Proof
from mingle.protocol.session.seats import Stage
from mingle.protocol.states import Transitions
from mingle.wire import frames


class Unsealed(Struct):
    """A state in which members come and go, and none has a place in the job."""

    sealed: ClassVar[bool] = False
    barrier: ClassVar[Stage] = Stage.SEATED
    """The stage to which all members have to come before the next state."""
    places: ClassVar[Mapping[bytes, frames.Place]] = MappingProxyType({})
    phase: ClassVar[str] = "confirming"
    """The name of the state in STATUS."""
    epoch: int


class Open(Unsealed):
    """Seats are free, or a member can still be lost before anyone was asked."""

    phase: ClassVar[str] = "open"
    epoch: int = 0
    """The last epoch, which was voided; 0 before the first."""


class Confirming(Unsealed):
    """Every member was sent CONFIRM."""

    barrier: ClassVar[Stage] = Stage.CONFIRMED
    ends: float
    """By when they must have confirmed."""
    proof: Proof | None = None
    """What is known of the mesh on the network that was chosen beforehand; None: no mesh is proved."""


class Apart(Unsealed):
    """All have confirmed, and share no address of the host; they are asked again in a moment."""

    again_at: float


class HandingOver(Unsealed):
    """All have confirmed, and the first in order was asked to lead: the session closes once that one has its own."""

    leader: bytes
    """The member id of the first."""
    ends: float
    """By when the session must have closed."""
    calls: int = 1
    """How often the first was called in its own session."""


class NoNetwork(Unsealed):
    """The members share no network on which all nodes reach each other, so the host fails, or gives way."""


class Placed(Struct):
    """A state in which the members have their places in the job, and none is added but by its own GO."""

    sealed: ClassVar[bool] = True
    barrier: ClassVar[Stage] = Stage.SEATED
    phase: ClassVar[str]
    epoch: int
    places: dict[bytes, frames.Place]
    store_address: str
    """The address of the host on the network that all members share."""
    since: float
    """When it was chosen."""


class Sealing(Placed):
    """The host opens the store."""

    phase: ClassVar[str] = "sealing"


class Stored(Placed):
    """A state in which the store listens."""

    store_port: int
    store_token: str

    def frame(self, session: bytes, where: frames.Place, digest: bytes, unproved: str = "") -> frames.Sealed:
        """Return the SEALED frame for the member with this place."""
        return frames.Sealed(
            session=session,
            epoch=self.epoch,
            place=where,
            store_address=self.store_address,
            store_port=self.store_port,
            store_token=self.store_token,
            roster_digest=digest,
            unproved=unproved,
        )


class Acknowledging(Stored):
    """Every member was sent SEALED."""

    barrier: ClassVar[Stage] = Stage.ACKNOWLEDGED
    phase: ClassVar[str] = "sealed"
    ends: float
    """When the first of those that are awaited can be overdue."""
    ask_at: float
    """When those that are awaited are asked whether they are."""


class Committed(Stored):
    """GO was decided. Latecomers can become members; a member that is lost after GO can come back."""

    phase: ClassVar[str] = "running"
    lost: dict[bytes, tuple[float, str]] = field(default_factory=dict)
    """When and how members were lost that may come back."""


State: TypeAlias = Open | Confirming | Apart | HandingOver | NoNetwork | Sealing | Acknowledging | Committed

DOES_NOT_LEAD = "the first does not lead"
HELD = "another session may hold the job for too long"
_VOIDED: Mapping[str, type] = {"a member is lost": Open, "a member has come back": Open}
TRANSITIONS: Transitions = {
    Open: {"the members are complete": Confirming},
    Confirming: {
        "all have confirmed": Sealing,
        "all have confirmed, and another member is the first: LEAD": HandingOver,
        "no network is common to all": Apart,
        HELD: Open,
        "the mesh is to be proved again": Confirming,
        "no network is left": NoNetwork,
        "nodes that reach not all others are left out": Open,
        **_VOIDED,
    },
    Apart: {"the pause is over": Confirming, **_VOIDED},
    HandingOver: {DOES_NOT_LEAD: Open, **_VOIDED},
    Sealing: {"the store is open": Acknowledging, **_VOIDED},
    Acknowledging: {
        "all have acknowledged": Committed,
        "not all have acknowledged in time": Open,
        HELD: Open,
        **_VOIDED,
    },
    Committed: {},
    NoNetwork: {},
}
"""While another session may hold the job, this one stays in Open, Confirming and Acknowledging."""
