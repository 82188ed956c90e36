"""What the helper of a bucket asks of fsspec, here a file system of the test, and how it explains failures."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.spec import AbstractFileSystem

from mingle.network import bucket_helper
from mingle.network.bucket import BucketReply, BucketRequest
from mingle.network.bucket_helper import BucketStorage, explained
from mingle.wire.datagrams import MAX_BYTES

JOB = "d" * 32
ROOT = "bucket/mingle"


class Shelf(AbstractFileSystem):  # type: ignore[misc]
    """A file system in memory, which fails as the test says."""

    protocol = "shelf"
    files: ClassVar[dict[str, bytes]] = {}
    folders: ClassVar[set[str]] = set()
    errors: ClassVar[dict[str, Exception]] = {}
    """What each operation fails with."""
    entries: ClassVar[list[dict[str, Any]]] = []
    """What a listing says, beside the files."""
    calls: ClassVar[list[str]] = []
    has_folders: ClassVar[bool] = False
    """Whether a file needs its folder, as on a file server."""

    def _do(self, operation: str) -> None:
        self.calls.append(operation)
        if operation in self.errors:
            raise self.errors[operation]

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        self._do("write")
        if self.has_folders and path.rpartition("/")[0] not in self.folders:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        self.files[path] = value

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        self._do("read")
        if path not in self.files:
            raise FileNotFoundError(path)
        return self.files[path][start:end]

    def rm_file(self, path: str) -> None:
        self._do("delete")
        if path not in self.files:
            raise FileNotFoundError(path)
        del self.files[path]

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[dict[str, Any]]:
        self._do("list")
        files = [(name, data) for name, data in self.files.items() if name.startswith(f"{path}/")]
        entries = [each for each in self.entries if each["name"].startswith(f"{path}/")]
        return [*({"name": name, "type": "file", "size": len(data)} for name, data in files), *entries]

    def mkdir(self, path: str, create_parents: bool = True, **_: Any) -> None:
        assert not create_parents, "the place of all jobs is not created"
        self.folders.add(path)  # by this process, or by another one if it is told so
        self._do("mkdir")

    def rmdir(self, path: str) -> None:
        self._do("rmdir")
        self.folders.remove(path)

    def invalidate_cache(self, path: str | None = None) -> None:
        self._do("invalidate")


@pytest.fixture
def shelf() -> type[Shelf]:
    fsspec.register_implementation("shelf", Shelf, clobber=True)
    Shelf.has_folders = False
    for each in (Shelf.files, Shelf.folders, Shelf.errors, Shelf.entries, Shelf.calls):
        each.clear()
    return Shelf


@pytest.fixture
def storage(shelf: type[Shelf]) -> BucketStorage:
    made = BucketStorage()
    assert made.serve(BucketRequest("open", f"shelf://{ROOT}/")) == BucketReply()
    return made


def serve(storage: BucketStorage, operation: str, name: str = f"{JOB}/h-1", data: bytes = b"") -> BucketReply:
    return storage.serve(BucketRequest(operation, name, data))


def names(storage: BucketStorage) -> list[str]:
    return [each.name for each in serve(storage, "list", JOB).entries]


# --- requests --------------------------------------------------------------------------------------------------------


def test_no_more_is_read_than_shows_that_an_object_is_too_long(storage: BucketStorage, shelf: type[Shelf]) -> None:
    shelf.files[f"{ROOT}/{JOB}/h-1"] = bytes(MAX_BYTES + 1000)
    assert serve(storage, "read").data == bytes(MAX_BYTES + 1)


def test_each_listing_is_a_new_one_of_entries_that_can_be_objects(
    storage: BucketStorage, shelf: type[Shelf], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_helper, "MAX_ENTRIES", 6)
    shelf.entries += [
        {"name": f"{ROOT}/{JOB}/long", "type": "file", "size": MAX_BYTES + 1},
        {"name": f"{ROOT}/{JOB}/empty", "type": "file", "size": 0},
        {"name": f"{ROOT}/{JOB}/unknown", "type": "file", "size": None},
        {"name": f"{ROOT}/{JOB}/folder/", "type": "directory", "size": 7},
        *({"name": f"{ROOT}/{JOB}/h-{number}", "type": "file", "size": MAX_BYTES} for number in range(3)),
    ]
    assert names(storage) == ["h-0", "h-1"], "a flood is cut"
    assert shelf.calls == ["invalidate", "list"]


def test_jobs_are_the_folders_beside_each_other(storage: BucketStorage, shelf: type[Shelf]) -> None:
    shelf.entries += [
        {"name": f"{ROOT}/{JOB}/", "type": "directory"},
        {"name": f"{ROOT}/another", "type": "directory"},
        {"name": f"{ROOT}/notes", "type": "file", "size": 1},
    ]
    assert serve(storage, "jobs", "").names == [JOB, "another"]


WRITTEN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)


@pytest.mark.parametrize(
    ("says", "time"),
    [
        pytest.param({"LastModified": WRITTEN}, WRITTEN.timestamp(), id="s3fs"),
        pytest.param({"updated": "2026-01-02T03:04:05Z"}, WRITTEN.timestamp(), id="gcsfs"),
        pytest.param({"modified": "2026-01-02T03:04:05+00:00"}, WRITTEN.timestamp(), id="text"),
        pytest.param({"mtime": 7}, 7.0, id="seconds"),
        pytest.param({"mtime": 7.5}, 7.5, id="parts of a second"),
        pytest.param({"last_modified": "yesterday", "updated": 8}, 8.0, id="another key"),
        pytest.param({"created": 7}, None, id="none"),
    ],
)
def test_time_of_an_object_is_told_by_each_back_end_in_its_own_way(
    storage: BucketStorage, shelf: type[Shelf], says: Mapping[str, Any], time: float | None
) -> None:
    shelf.entries.append({"name": f"{ROOT}/{JOB}/h-1", "type": "file", "size": 1, **says})
    assert serve(storage, "list", JOB).entries[0].time == time


# --- folders ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_another", [False, True])
def test_folder_of_the_job_is_created_where_there_are_folders_and_deleted_by_its_maker(
    storage: BucketStorage, shelf: type[Shelf], by_another: bool
) -> None:
    shelf.has_folders = True
    if by_another:
        shelf.errors["mkdir"] = FileExistsError("it exists")
    assert serve(storage, "write") == BucketReply()
    assert shelf.folders == {f"{ROOT}/{JOB}"}
    serve(storage, "tidy", JOB)
    assert ("rmdir" in shelf.calls) is not by_another


def test_bucket_that_is_missing_is_not_created(storage: BucketStorage, shelf: type[Shelf]) -> None:
    shelf.errors["write"] = FileNotFoundError("The specified bucket does not exist")
    shelf.errors["mkdir"] = PermissionError("AccessDenied")
    for _ in range(2):
        reply = serve(storage, "write")
        assert reply.what == "does not exist: The specified bucket does not exist"
        assert "MINGLE_PEERS" in reply.fix
    assert shelf.calls.count("mkdir") == 1, "a bucket has no folders, and that does not change"


@pytest.mark.parametrize(
    ("text", "there"),
    [("dddd", True), (f"{ROOT}/{JOB}", True), ("The specified Bucket does not exist", False), ("bucket", False)],
)
def test_folder_that_is_missing_is_empty_and_a_bucket_that_is_missing_a_failure(
    storage: BucketStorage, shelf: type[Shelf], text: str, there: bool
) -> None:
    shelf.errors["list"] = FileNotFoundError(text)
    reply = serve(storage, "list", JOB)
    assert (reply.what == "") is there
    assert reply.entries == []


# --- failures --------------------------------------------------------------------------------------------------------


def test_place_that_can_not_be_opened_is_told_at_each_request() -> None:
    storage = BucketStorage()
    assert storage.serve(BucketRequest("open", "nosuchthing://bucket")) == BucketReply()
    replies = [serve(storage, operation) for operation in ("write", "list")]
    assert replies[0] == replies[1]
    assert replies[0].what.startswith("can't be opened: ")
    assert "nosuchthing" in replies[0].fix


NoCredentialsError, EndpointConnectionError, HTTPClientError, ReadTimeoutError = (
    type(name, (Exception,), {})  # as botocore names them
    for name in ("NoCredentialsError", "EndpointConnectionError", "HTTPClientError", "ReadTimeoutError")
)


@pytest.mark.parametrize(
    ("error", "operation", "what", "fix"),
    [
        (ImportError("no s3fs"), "open", "needs a package that is not installed here: no s3fs", "pip install s3fs"),
        (ValueError("no such protocol"), "open", "can't be opened: no such protocol", "correct the URL"),
        (ValueError("odd"), "read", "can't be read: ValueError: odd", "its own tools"),
        (NoCredentialsError("none"), "list", "can't be used without credentials", "AWS_PROFILE"),
        (PermissionError("403"), "write", "can't be written, access is refused: 403", "s3:PutObject"),
        (PermissionError("403"), "jobs", "can't be listed, access is refused: 403", "s3:ListBucket"),
        (FileNotFoundError("bucket"), "list", "does not exist: bucket", "create the bucket"),
        (ReadTimeoutError("slow"), "read", "has not answered in time: slow", "AWS_ENDPOINT_URL"),
        (EndpointConnectionError("down"), "read", "can't be reached: down", "HTTPS_PROXY"),
        (HTTPClientError("broken"), "read", "can't be reached: broken", "HTTPS_PROXY"),
        (RuntimeError("odd"), "delete", "can't be deleted: RuntimeError: odd", "its own tools"),
        (RuntimeError("odd"), "tidy", "can't be used: RuntimeError: odd", "its own tools"),
        (RuntimeError(), "list", "can't be listed: RuntimeError: RuntimeError", "its own tools"),
    ],
)
def test_failure_is_explained_with_a_fix_and_other_back_ends_are_told_nothing_of_s3(
    error: Exception, operation: str, what: str, fix: str
) -> None:
    reply, another = explained(error, operation, "s3"), explained(error, operation, "gs").fix
    assert reply.what.startswith(what)
    assert fix in reply.fix
    assert another
    if not isinstance(error, NoCredentialsError):  # it is botocore's alone
        assert not any(word in another for word in ("s3", "AWS"))


@pytest.mark.parametrize("how", ["from", "while"])
def test_cause_of_an_error_is_found(how: str) -> None:
    """Back ends wrap what they have caught."""
    cause, wrapped = PermissionError("403"), OSError("wrapped")
    if how == "from":
        wrapped.__cause__ = cause
    else:
        wrapped.__context__ = cause
    cause.__context__ = wrapped  # no chain ends the search, not even one that is a circle
    assert "access is refused" in explained(wrapped, "list", "s3").what


def test_same_failure_has_the_same_words_at_each_turn() -> None:
    """A path is another one at each turn, and a cause is named when it is seen twice."""
    texts = {
        explained(RuntimeError(f'Could not\n connect to "http://10.0.0.9:9000/bucket/{turn}?x=1"'), "read", "s3").what
        for turn in range(2)
    }
    assert texts == {'can\'t be read: RuntimeError: Could not connect to "http://10.0.0.9:9000"'}
