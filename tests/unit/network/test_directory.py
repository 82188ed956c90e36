"""A shared folder that is a directory: what is in the way there, and what other users may have put into it."""

from __future__ import annotations

import errno
import os
import random
import socket
from pathlib import Path

import pytest

from mingle.network import directory
from mingle.network.directory import Directory
from mingle.network.folder import Folder, Report, Sign
from mingle.wire import datagrams
from mingle.wire.datagrams import Offer
from tests.support.failing import refusing

NODE, OTHER_NODE = "a" * 16, "b" * 16
MEMBER, OTHER = bytes(15) + b"\1", bytes(15) + b"\2"
SIGN = Sign("s", MEMBER, b"sign")


def offer(host: bytes = OTHER) -> Offer:
    return Offer(job="job", session=bytes(16), host=host, addresses=("10.0.0.1",), port=5000, world_size=2)


def name_of(kind: str, member: bytes = OTHER, number: int = 1) -> str:
    return f"{kind}-{OTHER_NODE}-{member.hex()}-{number}"


@pytest.fixture
def place(tmp_path: Path) -> Directory:
    return Directory(str(tmp_path), "digest")


def look(place: Directory, sign: Sign | None = SIGN) -> Report:
    """Take the first turn of a process that looks for a host."""
    folder = Folder(NODE, random.Random(0))
    folder.show(sign, 0.0)
    return folder.turn(place, 0.0)


def test_directory_that_another_process_has_deleted_is_created_again(place: Directory, tmp_path: Path) -> None:
    with place.open(create=True) as opened:
        (tmp_path / "digest").rmdir()
        opened.write(name_of("h"), b"content")
        assert len(opened.list()) == 1


def test_foreign_entries_are_neither_opened_nor_deleted(place: Directory, tmp_path: Path) -> None:
    job = tmp_path / "digest"
    job.mkdir()
    secret = tmp_path / "secret"
    secret.write_bytes(datagrams.encode(offer()))
    (job / name_of("h", number=1)).symlink_to(secret)
    os.mkfifo(job / name_of("h", number=2))
    (job / name_of("h", number=3)).write_bytes(b"x" * 1_000_000)
    (job / name_of("h", number=4)).mkdir()
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(job / "h-socket"))
    (job / "notes.txt").write_text("mine")
    report = look(place)
    assert report.found == []
    assert report.problem is None
    assert report.listed
    assert len(list(job.iterdir())) == 7
    with place.open(create=False) as opened:
        assert [each.name[0] for each in opened.list()] == ["s"]  # this process's own
        # A name can also become another thing after the listing.
        assert [opened.read(name_of("h", number=number)) for number in range(1, 5)] == [None] * 4


# --- what is in the way ----------------------------------------------------------------------------------------------


def test_a_file_or_a_symbolic_link_in_the_place_of_the_directory_is_refused(place: Directory, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "digest").symlink_to(elsewhere)
    assert look(place).problem is not None
    assert not list(elsewhere.iterdir())
    (tmp_path / "file").touch()
    problem = look(Directory(str(tmp_path / "file"), "digest")).problem
    assert problem is not None
    assert "Not a directory" in problem.what


@pytest.mark.parametrize("code", [None, *sorted(directory.FIXES)])
def test_each_failure_of_writing_is_named_with_its_fix_and_leaves_no_incomplete_object(
    place: Directory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int | None
) -> None:
    monkeypatch.setattr(os, "write", (lambda *_: 3) if code is None else refusing(code))
    problem = look(place).problem
    assert problem is not None
    assert os.strerror(code or errno.ENOSPC) in problem.what
    assert problem.fix
    assert not list((tmp_path / "digest").iterdir())


def test_a_read_only_directory_is_still_read(place: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    with place.open(create=True) as opened:
        opened.write(name_of("h"), datagrams.encode(offer()))
    monkeypatch.setattr(os, "write", refusing(errno.EACCES))
    report = look(place)
    assert report.problem is not None
    assert [(datagrams.decode(each.data), each.node) for each in report.found] == [(offer(), OTHER_NODE)]


def test_a_stale_handle_is_opened_anew_in_the_next_turn(place: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(NODE, random.Random(0))
    folder.show(SIGN, 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", refusing(errno.ESTALE))
        problem = folder.turn(place, 0.0).problem
        assert problem is not None
        assert "Stale file handle" in problem.what
    assert folder.turn(place, 1.0).problem is None


def test_jobs_in_which_something_was_written_last_come_first(tmp_path: Path) -> None:
    for age, name in enumerate(("new", "old", "older")):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (1_000 - age, 1_000 - age))
    (tmp_path / "file").touch()
    assert Directory(str(tmp_path), "digest").jobs() == ["new", "old", "older"]
