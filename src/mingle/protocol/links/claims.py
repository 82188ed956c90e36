"""Limits for unverified claims: the addresses of an OFFER that count, and the connections that it can cause. Pure.

Without a secret any process on the network can send an OFFER with any address and port in it. Each rank that hears it
connects there, so a forged OFFER directs connections of every rank at a target that the sender chooses. How long a rank
waits for what is only claimed is limited by :mod:`mingle.protocol.sightings`.
"""

from __future__ import annotations

import functools
import ipaddress

import msgspec
from msgspec import Struct, field

from mingle.token_bucket import TokenBucket
from mingle.wire.datagrams import Offer

SENDER_DIALS_PER_SECOND = 4.0
"""Sustained rate of connections to endpoints named by the datagrams of one address."""
SENDER_DIALS_AT_ONCE = 16.0
"""The burst of the same; a session has up to twelve addresses."""
TARGET_DIALS_PER_SECOND = 8.0
"""Sustained rate of connections to one address, at all ports: more than one sender can cause."""
TARGET_DIALS_AT_ONCE = 32.0
"""The burst of the same."""
DIALS_PER_SECOND = 32.0
"""Sustained rate of all connections to unproved endpoints."""
DIALS_AT_ONCE = 64.0
"""The burst of the same."""
# The number of senders and of targets to remember; the least recently charged is forgotten.
REMEMBERED = 1024
_SHORTEST_WAIT = 0.01


def without_traps(offer: Offer, *, on_loopback: bool) -> Offer | None:
    """Return an OFFER without the addresses that no other machine can have; None if no address is left.

    Args:
        offer: the message.
        on_loopback: whether the OFFER came in on a loopback interface, and so from this machine.
    """
    kept = tuple(each for each in offer.addresses if _can_be_a_host(each, on_loopback=on_loopback))
    if len(kept) == len(offer.addresses):
        return offer
    return msgspec.structs.replace(offer, addresses=kept) if kept else None


@functools.lru_cache(maxsize=REMEMBERED)  # a flood of OFFERs names the same ones again and again
def _can_be_a_host(address: str, *, on_loopback: bool) -> bool:
    parsed: ipaddress.IPv4Address | ipaddress.IPv6Address
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:  # some system's inet_pton(3) accepts it, the ipaddress module does not
        return False
    if isinstance(parsed, ipaddress.IPv6Address):
        # ::ffff:127.0.0.1 is 127.0.0.1 to connect(2), and ::127.0.0.1 is deprecated (RFC 4291, section 2.5.5).
        if parsed.ipv4_mapped is not None:
            parsed = parsed.ipv4_mapped
        elif int(parsed) >> 32 == 0 and int(parsed) > 1:
            return False
    if parsed.is_loopback:
        return on_loopback
    # Linux connects 0.0.0.0 to the host itself; 240.0.0.0/4 holds the broadcast address.
    this_network = parsed.version == 4 and int(parsed) >> 24 == 0
    return not (parsed.is_unspecified or parsed.is_multicast or this_network or _is_class_e(parsed))


def _is_class_e(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    return address.version == 4 and int(address) >> 28 == 0xF


class DialBudget(Struct):
    """The budget of a process for connections to unproved endpoints: by sender, by target, and in total.

    An endpoint whose address sent the datagram that names it spends the sender's budget alone, so no claim of others
    delays it. A connection on which the session proves itself is refunded. A connection without budget waits and is not
    dropped, so that a stranger who exhausts a budget only delays the true host.
    """

    _all: TokenBucket = field(default_factory=lambda: TokenBucket.full(DIALS_PER_SECOND, DIALS_AT_ONCE, 0.0))
    _senders: dict[str, TokenBucket] = field(default_factory=dict)
    _targets: dict[str, TokenBucket] = field(default_factory=dict)

    def take(self, target: str, sender: str, now: float) -> float:
        """Charge a connection to the budget. Return 0, or the seconds after which to ask again.

        Args:
            target: the address to connect to.
            sender: the address whose datagram named the target; empty if a proved connection named it.
            now: the time.
        """
        target = _canonical(target)
        kept = []
        if sender != target:
            kept.append((self._targets, target, TARGET_DIALS_PER_SECOND, TARGET_DIALS_AT_ONCE))
        if sender:
            kept.append((self._senders, sender, SENDER_DIALS_PER_SECOND, SENDER_DIALS_AT_ONCE))
        named = [memory.get(name) or TokenBucket.full(rate, burst, now) for memory, name, rate, burst in kept]
        buckets = named if sender == target else [*named, self._all]
        wait = max(each.wait(now) for each in buckets)
        if wait > 0:
            return max(wait, _SHORTEST_WAIT)
        for each in buckets:
            each.tokens -= 1
        for (memory, name, *_), bucket in zip(kept, named, strict=True):
            _keep(memory, name, bucket)
        return 0.0

    def give_back(self, target: str, sender: str) -> None:
        """Refund a connection on which the session has proved itself."""
        target = _canonical(target)
        shared = [] if sender == target else [self._all, self._targets.get(target)]
        for bucket in *shared, self._senders.get(sender):
            if bucket is not None:
                bucket.tokens += 1


def _keep(buckets: dict[str, TokenBucket], name: str, bucket: TokenBucket) -> None:
    """Remember a bucket that was charged; one that was only asked for is full and can be made anew."""
    buckets.pop(name, None)
    if len(buckets) >= REMEMBERED:
        del buckets[next(iter(buckets))]
    buckets[name] = bucket  # at the end: it was charged last


@functools.lru_cache(maxsize=REMEMBERED)
def _canonical(address: str) -> str:
    """Return the one spelling of an address: a forger who writes it in several ways must not get a budget for each."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    return str(getattr(parsed, "ipv4_mapped", None) or parsed)
