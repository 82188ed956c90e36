"""Where jobs meet: the addresses are part of the protocol, so they are pinned here."""

from __future__ import annotations

import hashlib
import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mingle.wire.groups import LOBBY, Group, job_group

JOB_IDS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=64)


def test_the_addresses_of_a_job_never_change() -> None:
    # A change of the hash would silently part old versions from new ones.
    assert job_group("resnet") == Group("239.192.180.44", "ff12::b195:745f", "ff15::b195:745f")
    assert Group("239.195.254.255", "ff12::8000:0", "ff15::8000:0") == LOBBY


@given(JOB_IDS)
def test_every_job_lies_in_the_ranges_of_the_standards(job_id: str) -> None:
    check(job_group(job_id))


def check(group: Group) -> None:
    """The ranges, and that the lobby is spared."""
    ipv4 = ipaddress.IPv4Address(group.ipv4)
    assert ipv4 in ipaddress.IPv4Network("239.192.0.0/14")
    assert ipv4 not in ipaddress.IPv4Network("239.195.255.0/24")  # RFC 2365: scope-relative
    link, site = ipaddress.IPv6Address(group.ipv6_link), ipaddress.IPv6Address(group.ipv6_site)
    assert link in ipaddress.IPv6Network("ff12::/96")
    assert site in ipaddress.IPv6Network("ff15::/96")
    assert int(link) & 0xFFFF_FFFF == int(site) & 0xFFFF_FFFF >= 0x8000_0000  # RFC 3307: dynamic
    assert group.ipv4 != LOBBY.ipv4
    assert group.ipv6_link != LOBBY.ipv6_link
    assert group.ipv6_site != LOBBY.ipv6_site


@pytest.mark.parametrize("digest", [b"\x00" * 32, b"\xff" * 32])
def test_the_ends_of_the_hash_stay_in_range(monkeypatch: pytest.MonkeyPatch, digest: bytes) -> None:
    class Fixed:
        def __init__(self, _: bytes) -> None: ...

        def digest(self) -> bytes:
            return digest

    monkeypatch.setattr(hashlib, "sha256", Fixed)
    check(job_group("resnet"))


def test_jobs_spread_over_the_range() -> None:
    # 1 000 draws from 261 887 values collide about twice; a hash that lost its high bits would far more.
    addresses = {job_group(f"job-{number}").ipv4 for number in range(1000)}
    assert len(addresses) > 985
    assert {address.split(".")[1] for address in addresses} == {"192", "193", "194", "195"}


def test_a_hop_limit_above_one_needs_the_site_scope() -> None:
    group = job_group("resnet")
    assert group.ipv6(1) == group.ipv6_link
    assert group.ipv6(2) == group.ipv6_site
