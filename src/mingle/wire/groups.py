"""Multicast groups: one per job, and one lobby for all. Pure arithmetic.

The group only spares bystanders: the job id inside a message decides whom it concerns, so two jobs whose ids
hash to one group disturb each other's sockets and nothing else.

IPv4 addresses come from 239.192.0.0/14, the organization-local scope (RFC 2365, section 6.2). The highest 256
addresses of a scoped range are reserved for scope-relative assignments (section 9) and are not used.

IPv6 group ids are 32 bits wide, because an Ethernet address keeps no more of them (RFC 2464, section 7), with
the top bit set, the range for groups that no authority assigned (RFC 3307, section 4.3). The address carries
the transient flag and the scope that suits the hop limit (RFC 4291, section 2.7): `ff12::` is link-local,
which no router forwards whatever a packet's hop limit says, and which the kernel binds to one interface;
`ff15::` is site-local, for a hop limit above 1, where a link-local group could never leave the link.
"""

from __future__ import annotations

import hashlib
import ipaddress
import socket

from msgspec import Struct

_IPV4_RANGE = ipaddress.IPv4Network("239.192.0.0/14")
_IPV4_FIRST = int(_IPV4_RANGE.network_address)
_IPV4_SCOPE_RELATIVE = 256
_IPV4_LOBBY = _IPV4_RANGE.num_addresses - _IPV4_SCOPE_RELATIVE - 1
_IPV6_LINK = int(ipaddress.IPv6Address("ff12::"))
_IPV6_SITE = int(ipaddress.IPv6Address("ff15::"))
_IPV6_FIRST_DYNAMIC = 0x8000_0000
_IPV6_LOBBY = 0  # offset into the dynamic group ids; a job starts at 1
_IPV6_DYNAMIC_IDS = 2**31

# Separates this hash from every other use of a job id; a change of the mapping needs another text here.
_DOMAIN = b"mingle multicast group 1\x00"


class Group(Struct, frozen=True):
    """One group in each family and scope, as address literals."""

    ipv4: str
    """In 239.192.0.0/14."""
    ipv6_link: str
    """In ff12::/96, for a hop limit of 1."""
    ipv6_site: str
    """In ff15::/96, for a hop limit above 1."""

    def ipv6(self, ttl: int) -> str:
        """The IPv6 address whose scope fits packets of hop limit `ttl`."""
        return self.ipv6_site if ttl > 1 else self.ipv6_link


def job_group(job_id: str) -> Group:
    """The group of the job `job_id`, the same on every machine and never the lobby."""
    digest = hashlib.sha256(_DOMAIN + job_id.encode("utf-8")).digest()
    return _group(
        ipv4_offset=int.from_bytes(digest[:16], "big") % _IPV4_LOBBY,
        ipv6_offset=int.from_bytes(digest[16:], "big") % (_IPV6_DYNAMIC_IDS - 1) + 1,
    )


def _group(*, ipv4_offset: int, ipv6_offset: int) -> Group:
    group_id = _IPV6_FIRST_DYNAMIC + ipv6_offset
    return Group(
        ipv4=socket.inet_ntop(socket.AF_INET, (_IPV4_FIRST + ipv4_offset).to_bytes(4, "big")),
        ipv6_link=socket.inet_ntop(socket.AF_INET6, (_IPV6_LINK + group_id).to_bytes(16, "big")),
        ipv6_site=socket.inet_ntop(socket.AF_INET6, (_IPV6_SITE + group_id).to_bytes(16, "big")),
    )


LOBBY = _group(ipv4_offset=_IPV4_LOBBY, ipv6_offset=_IPV6_LOBBY)
"""Where somebody who does not know, or doubts, a job id asks who is there. No job id hashes to it."""
