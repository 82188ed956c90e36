"""The addresses of all machines, as text and as files."""

from __future__ import annotations

import errno
from pathlib import Path

import msgspec
import pytest

from mingle.errors import MingleError
from mingle.protocol.machine import Formation, lone_formation
from mingle.run import addresses
from mingle.wire.frames import Seat


def formation(address: str, interface: str = "eth0") -> Formation:
    return msgspec.structs.replace(lone_formation(b"", 4242), store_address=address, interface=interface)


def seat(rank: int, address: str) -> Seat:
    return Seat(
        rank=rank, local_rank=0, node_rank=rank, hostname="h", address=address, pid=1, program_port=20_001 + rank
    )


def test_a_machine_behind_nat_is_listed_by_the_address_that_reaches_it() -> None:
    places = addresses.places_of(formation("192.0.2.1"), [seat(0, "10.0.0.1"), seat(1, "192.0.2.2")])
    assert addresses.hosts(places) == "192.0.2.1,192.0.2.2"
    assert addresses.hostports(places) == "192.0.2.1:20001,192.0.2.2:20002"


def test_ipv6_addresses_have_brackets_before_a_port_and_link_local_ones_an_interface(tmp_path: Path) -> None:
    places = addresses.places_of(formation("fe80::1%eth0"), [seat(0, "fe80::1"), seat(1, "fe80::2")])
    assert addresses.hosts(places) == "fe80::1%eth0,fe80::2%eth0"
    assert addresses.hostports(places) == "[fe80::1%eth0]:20001,[fe80::2%eth0]:20002"
    assert addresses.write_hostfile(tmp_path, places).read_text() == "fe80::1%eth0\nfe80::2%eth0\n"
    with pytest.raises(MingleError, match="MLX's ring uses IPv4 only"):
        addresses.write_mlx_hostfile(tmp_path, places)


def test_a_machine_without_a_directory_for_files_is_told_of_tmpdir(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_options: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr("tempfile.TemporaryDirectory", refuse)
    with pytest.raises(MingleError, match="export TMPDIR"), addresses.private_directory():
        pass
