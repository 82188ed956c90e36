"""Filter datagrams: each is decoded, verified and admitted before a machine hears it.

Any process can send datagrams here. With a secret, a process of a job checks the signature first. Only those addresses
of an OFFER that can be a host's are kept. An OFFER by unicast from outside our networks counts only from a peer, or
with our signature.
"""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections import Counter
from collections.abc import Callable

from mingle.config.values import Secret
from mingle.errors import MingleError
from mingle.network.connections import bare_address
from mingle.network.interface_monitor import InterfaceMonitor
from mingle.network.peers import Peers
from mingle.network.transport import Received
from mingle.protocol.events import Heard, HeardUnverified, Source
from mingle.protocol.links import claims
from mingle.wire import datagrams
from mingle.wire.authentication import JobKey
from mingle.wire.datagrams import Datagram, List, Offer, Seek

LOOKED_AT_UNVERIFIED = 256
"""The number of wrongly signed datagrams that the report takes note of; bounded against a flood of them."""
LOGGED_FAULTS = 16
"""The number of places in the code whose failures on input are logged, once each."""


class Reception:
    """Decides which datagrams a machine hears.

    Args:
        key: of the job; None: there is none, or the process looks for all jobs.
        secret: signs the OFFERs of any job that it belongs to.
        peers: the hosts that are asked by unicast.
        interfaces: this machine's.
        rejected: counts the datagrams that are dropped, by reason.
        routed: whether routers may pass multicasts on.
    """

    def __init__(
        self,
        key: JobKey | None,
        secret: Secret | None,
        peers: Peers,
        interfaces: InterfaceMonitor,
        rejected: Counter[str],
        *,
        routed: bool,
    ) -> None:
        self.verifies = False
        """Whether a datagram must have our signature, if there is a secret; else the machine hears all of them."""
        self._key = key
        self._secret = secret
        self._peers = peers
        self._interfaces = interfaces
        self._rejected = rejected
        self._routed = routed

    def admit(self, received: Received) -> Heard | HeardUnverified | None:
        """Return what the machine is told of a datagram; None: nothing."""
        if datagrams.is_echo(received.data):  # a ping is for another process of this machine
            return None
        message = self._decode(received.data)
        if isinstance(message, HeardUnverified):
            return message
        verified = isinstance(message, Offer) and self._verified(received.data, message)
        address = bare_address(received.source[0])
        if isinstance(message, Offer):
            message = self._admitted(message, received, address, verified=verified)
        if message is None:
            return None
        source = Source(
            interface=received.interface,
            multicast=received.multicast,
            signed=datagrams.is_signed(received.data),
            verified=verified,
            address=address,
            off_link=self._is_off_link(received, address),
            reply_to=received,
        )
        return Heard(message, source)

    def _is_off_link(self, received: Received, address: str) -> bool:
        on_our_network = received.multicast and received.family == "4" and not self._routed
        return on_our_network and not self._interfaces.is_on_link(address)

    def admit_found(
        self, data: bytes, folder: str, *, same_node: bool, seeks: bool = False
    ) -> Heard | HeardUnverified | None:
        """Return what the machine is told of a host's object in a shared folder; None: nothing.

        Args:
            data: the content.
            folder: the folder, as the user has named it, who trusts it like a named peer.
            same_node: whether a process of this node has written it, so that its loopback addresses are ours.
            seeks: whether the machine is an observer, which also hears of those who look for a host.
        """
        message = self._decode(data)
        if isinstance(message, HeardUnverified):
            return message
        signed = datagrams.is_signed(data)
        if seeks and isinstance(message, Seek):
            source = Source(interface="", multicast=False, signed=signed, address=folder, folder=True)
            return Heard(message, source)
        if not isinstance(message, Offer):
            return None
        verified = self._verified(data, message)
        offer = self._without_traps(message, on_loopback=same_node)
        if offer is None:
            return None
        source = Source(interface="", multicast=False, signed=signed, verified=verified, address=folder, folder=True)
        return Heard(offer, source)

    def _decode(self, untrusted: bytes) -> Datagram | HeardUnverified | None:
        """Return the message in a datagram, or what is left of one that was rejected and counted."""
        try:
            return datagrams.decode(untrusted, self._key if self.verifies else None)
        except datagrams.Rejected as rejected:
            reason = rejected.reason
        message = None
        if self.verifies:
            with contextlib.suppress(datagrams.Rejected):
                message = datagrams.decode(untrusted)
        if isinstance(message, List):
            return message  # any process can ask, and every host hears what an answer to the browse group contains
        self._rejected[reason] += 1
        looked_at = self._rejected["unsigned"] + self._rejected["signature"]
        if message is None or looked_at > LOOKED_AT_UNVERIFIED:
            return None
        return HeardUnverified(message)

    def _verified(self, untrusted: bytes, offer: Offer) -> bool:
        """Return whether our secret signed an OFFER that was decoded."""
        if self.verifies:
            return self._key is not None
        if self._secret is None:
            return False
        try:
            datagrams.decode(untrusted, JobKey(self._secret, offer.job))
        except datagrams.Rejected:
            return False
        return True

    def _admitted(self, offer: Offer, received: Received, address: str, *, verified: bool) -> Offer | None:
        """Return the usable part of an OFFER; count it and return None if nothing is usable."""
        # A host answers by unicast only if it was asked as a peer, or is on one of our networks.
        expected = received.multicast or received.local or verified or self._peers.knows(address)
        if not expected and not self._interfaces.is_on_link(address):
            self._rejected["unsolicited"] += 1
            return None
        on_loopback = any(each.name == received.interface and each.loopback for each in self._interfaces.found)
        return self._without_traps(offer, on_loopback=on_loopback)

    def _without_traps(self, offer: Offer, *, on_loopback: bool) -> Offer | None:
        admitted = claims.without_traps(offer, on_loopback=on_loopback)
        if admitted is None:
            self._rejected["addresses"] += 1
        return admitted


class Rejections:
    """Counts what is dropped. No input from outside ends a loop.

    Args:
        say: shows a failure to people.
    """

    def __init__(self, say: Callable[[int, str, BaseException | None], None]) -> None:
        self.counts: Counter[str] = Counter()
        """How much was dropped, by reason."""
        self._say = say
        self._places: set[tuple[str, int]] = set()

    def fault(self, error: Exception, what: str) -> None:
        """Count input that was dropped because its handler raised; log it once for each place in the code."""
        self.counts["fault"] += 1
        frame, line = list(traceback.walk_tb(error.__traceback__))[-1]
        place = (frame.f_code.co_filename, line)
        if place in self._places or len(self._places) >= LOGGED_FAULTS:
            return
        self._places.add(place)
        explained = MingleError.explain(
            f"{what} could not be handled and was dropped ({type(error).__name__}: {error}); "
            "the discovery goes on, and further failures at the same place are only counted",
            cause="a defect in mingle, which a process on the network or on this machine can have provoked",
            remedy="report the traceback.",
        )
        self._say(logging.ERROR, str(explained), error)
