"""The addresses of all machines, for programs that need more than the address of node 0: as text and as files."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mingle.config.values import Peer
from mingle.errors import MingleError, refused
from mingle.protocol.machine import scoped

if TYPE_CHECKING:
    from mingle.protocol.machine import Formation
    from mingle.wire.frames import Seat


def places_of(formation: Formation, seats: Sequence[Seat]) -> list[Peer]:
    """Return the address of each machine and the port of its program, from the roster, in order of node rank.

    Node 0 has the address by which this machine reached it. Behind NAT that is not the one of its interface.
    """
    places = [Peer(scoped(seat.address, formation.interface), seat.program_port) for seat in seats]
    return [Peer(formation.store_address, places[0].port), *places[1:]]


def hosts(places: Sequence[Peer]) -> str:
    """Return the addresses, separated by commas."""
    return ",".join(place.host for place in places)


def hostports(places: Sequence[Peer]) -> str:
    """Return the addresses with their ports, separated by commas; an IPv6 address is in brackets."""
    return ",".join(map(str, places))


@contextlib.contextmanager
def private_directory() -> Iterator[Path]:
    """Make a directory that only this user can open, and remove it at the end.

    Raises:
        MingleError: there is no place for it.
    """
    try:
        made = tempfile.TemporaryDirectory(prefix="mingle-run-", ignore_cleanup_errors=True)
    except FileNotFoundError as error:
        raise MingleError.explain(
            f"there is no directory for temporary files, and the program's host file needs one: {error.strerror}.",
            cause="a read-only file system, or a disk that is full",
            remedy="name a directory that can be written: `export TMPDIR=/path`.",
        ) from error
    except OSError as error:
        raise refused("a directory for the program's host file can't be made", error) from error
    with made as name:
        yield Path(name)


def write_hostfile(directory: Path, places: Sequence[Peer]) -> Path:
    """Write one address a line, in order of node rank, and return the file."""
    return _write(directory / "hosts", "".join(f"{place.host}\n" for place in places))


def write_mlx_hostfile(directory: Path, places: Sequence[Peer]) -> Path:
    """Write the host file of MLX's ring, and return it: for each rank a list of its addresses, here one each.

    Raises:
        MingleError: the machines have met over IPv6, and the ring has only IPv4.
    """
    if any(":" in place.host for place in places):
        raise MingleError.explain(
            f"MLX's ring uses IPv4 only, and the machines have met over IPv6: {hosts(places)}.",
            cause="the network that all machines share has no IPv4 addresses, or --family is 6",
            remedy="give each machine an IPv4 address on one network; `mingle-run --family 4` uses no other.",
        )
    return _write(directory / "mlx.json", json.dumps([[str(place)] for place in places]))


def _write(file: Path, text: str) -> Path:
    try:
        file.touch(mode=0o600, exist_ok=False)
        file.write_text(text, encoding="ascii")
    except OSError as error:
        raise refused(f"{file} can't be written", error) from error
    return file
