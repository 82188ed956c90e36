"""What a directory and a bucket have in common: fsspec's file system for local files stands for a bucket."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mingle.network import folders
from mingle.network.folder import Folder, FolderProblem, FolderStorage, Sign
from mingle.wire import datagrams
from mingle.wire.datagrams import MAX_BYTES, Offer

JOB = folders.digest("job")[:32]
SCHEMES = {"directory": "dir:", "bucket": "file://"}
OFFER = Offer(job="job", session=bytes(16), host=bytes(15) + b"\2", addresses=("10.0.0.1",), port=5000, world_size=2)


@pytest.fixture(params=SCHEMES.values(), ids=SCHEMES)
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def place(scheme: str, tmp_path: Path) -> Iterator[FolderStorage]:
    made = folders.storages([f"{scheme}{tmp_path}"], "job")
    (storage,) = made.values()
    yield storage
    folders.close(made)
    storage.reap()


def test_an_object_is_written_listed_read_and_deleted(place: FolderStorage, tmp_path: Path) -> None:
    with place.open(create=True) as opened:
        opened.write("h-1", b"content \xff")
        assert [each.name for each in tmp_path.iterdir()] == [JOB]
        (entry,) = opened.list()
        assert entry.name == "h-1"
        assert entry.time == pytest.approx(time.time(), abs=60)
        assert opened.read("h-1") == b"content \xff"
        opened.delete("h-1")
        opened.delete("h-1")
        assert opened.list() == []
        assert opened.read("h-1") is None
        opened.tidy()
    assert not list(tmp_path.iterdir())


def test_a_reader_creates_nothing(place: FolderStorage, tmp_path: Path) -> None:
    with place.open(create=False) as opened:
        assert opened.list() == []
        assert opened.read("h-1") is None
        opened.delete("h-1")
        opened.tidy()
    assert not list(tmp_path.iterdir())


def test_objects_of_others_stay_and_are_neither_too_long_nor_folders(place: FolderStorage, tmp_path: Path) -> None:
    with place.open(create=True) as opened:
        opened.write("h-1", b"content")
        (tmp_path / JOB / "h-2").write_bytes(bytes(MAX_BYTES + 1))
        (tmp_path / JOB / "h-3").mkdir()
        assert [each.name for each in opened.list()] == ["h-1"]
        assert opened.read("h-2") is None
        opened.delete("h-1")
        opened.tidy()
    assert {each.name for each in (tmp_path / JOB).iterdir()} == {"h-2", "h-3"}


def test_a_place_that_is_missing_is_named_and_not_created(scheme: str, tmp_path: Path) -> None:
    made = folders.storages([f"{scheme}/proc/nothing/here"], "job")
    (storage,) = made.values()
    with pytest.raises(FolderProblem, match="does not exist") as caught, storage.open(create=True) as opened:
        opened.write("h-1", b"content")
    assert "create" in caught.value.fix
    folders.close(made)
    storage.reap()


def test_a_host_is_found_there(place: FolderStorage) -> None:
    with place.open(create=True) as opened:
        opened.write(f"h-{'b' * 16}-{OFFER.host.hex()}-1", datagrams.encode(OFFER))
    folder = Folder("a" * 16, random.Random(0), bucket=place.bucket)
    folder.show(Sign("s", bytes(16), b"sign"), 0.0)
    report = folder.turn(place, 0.0)
    assert [(datagrams.decode(each.data), each.node) for each in report.found] == [(OFFER, "b" * 16)]
    assert report.listed
