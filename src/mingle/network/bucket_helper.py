"""The helper process of a bucket: it carries out one request after another with fsspec, until its connection ends.

Its standard input is the connection. It shows people nothing: each failure goes back in the reply to a request.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

import msgspec

from mingle.network.bucket import BucketReply, BucketRequest
from mingle.network.folder import MAX_ENTRIES, Entry
from mingle.wire.datagrams import MAX_BYTES

CONNECT_SECONDS = 3.0
ANSWER_SECONDS = 5.0
"""How long S3 has to accept a connection and to answer; the next turn tries again."""
END_SECONDS = 5.0
"""How long the helper goes on with what it was asked once its connection has ended."""
_TIMES = ("LastModified", "last_modified", "mtime", "updated", "modified", "timeModified")
"""Where the back ends say when an object was written."""
_S3 = ("s3", "s3a")
_LOOK = "look at the storage with its own tools on this machine"


def main() -> None:
    """Serve the connection that is standard input."""
    connection = socket.socket(fileno=os.dup(0))
    requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, requests), daemon=True).start()
    storage = BucketStorage()
    while (line := requests.get()) is not None:
        request = msgspec.json.decode(line, type=BucketRequest)
        reply = storage.serve(request)
        if request.operation != "open":
            try:
                connection.sendall(msgspec.json.encode(reply) + b"\n")
            except OSError:  # its process has ended, or does not wait any more
                continue
    os._exit(0)  # without the ends of event loops and thread pools, which can block


def _receive(connection: socket.socket, requests: queue.SimpleQueue[bytes | None]) -> None:
    """Put the lines of the connection into a queue; see to it that the process ends soon after the connection."""
    received = bytearray()
    try:
        while more := connection.recv(1 << 16):
            received += more
            *lines, rest = bytes(received).split(b"\n")
            received = bytearray(rest)
            for line in lines:
                requests.put(line)
    except OSError:
        pass
    requests.put(None)
    time.sleep(END_SECONDS)
    os._exit(1)


class BucketStorage:
    """The folder that the first request names, in fsspec's words."""

    def __init__(self) -> None:
        self._protocol = self._root = ""
        self._filesystem: Any = None
        self._failure: BucketReply | None = None
        """Why there is no file system."""
        self._made = False
        """Whether the job's folder was created."""
        self._has_folders = True
        """Whether a folder can be what is missing, as far as is known."""

    def serve(self, request: BucketRequest) -> BucketReply:
        """Carry out a request; a failure is told in the reply."""
        if request.operation == "open":
            return self._open(request.name)
        if self._failure is not None:
            return self._failure
        try:
            return self._carry_out(request, f"{self._root}/{request.name}" if request.name else self._root)
        except Exception as error:
            return explained(error, request.operation, self._protocol)

    def _open(self, url: str) -> BucketReply:
        self._protocol = url.partition("://")[0]
        try:
            from fsspec.core import url_to_fs

            options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
            if self._protocol in _S3:
                # Its defaults are up to five tries of up to 60 s each.
                options["config_kwargs"] = {
                    "connect_timeout": CONNECT_SECONDS,
                    "read_timeout": ANSWER_SECONDS,
                    "retries": {"max_attempts": 0},
                }
            self._filesystem, root = url_to_fs(url, **options)
            if self._protocol in _S3:
                self._filesystem.retries = 1
            self._root = str(root).rstrip("/")
        except Exception as error:
            self._failure = explained(error, "open", self._protocol)
        return BucketReply()

    def _carry_out(self, request: BucketRequest, path: str) -> BucketReply:
        filesystem = self._filesystem
        match request.operation:
            case "write":
                self._write(path, request.data)
            case "list":
                return BucketReply(entries=list(self._objects(path)))
            case "jobs":
                return BucketReply(names=[_name(each) for each in self._list(path) if each.get("type") == "directory"])
            case "read":
                with contextlib.suppress(FileNotFoundError):
                    return BucketReply(data=bytes(filesystem.cat_file(path, start=0, end=MAX_BYTES + 1)))
            case "delete":
                with contextlib.suppress(FileNotFoundError):
                    filesystem.rm_file(path)
            case "tidy":
                self._tidy(path)
        return BucketReply()

    def _write(self, path: str, data: bytes) -> None:
        try:
            self._filesystem.pipe_file(path, data)
        except FileNotFoundError as error:
            # A file server has folders, which must exist. A bucket that is missing is not created here.
            if not self._has_folders or not self._make_folder(path.rpartition("/")[0]):
                raise error
            self._filesystem.pipe_file(path, data)

    def _make_folder(self, path: str) -> bool:
        try:
            self._filesystem.mkdir(path, create_parents=False)
        except FileExistsError:  # another process was quicker
            return True
        except Exception:
            self._has_folders = False
            return False
        self._made = True
        return True

    def _list(self, path: str) -> list[Mapping[str, Any]]:
        self._filesystem.invalidate_cache()
        try:
            return list(self._filesystem.ls(path, detail=True))[:MAX_ENTRIES]
        except FileNotFoundError as error:
            if not self._is_there(error, path):
                raise
            return []  # no object lies there, and a bucket has no folders of its own

    def _is_there(self, error: FileNotFoundError, path: str) -> bool:
        """Return whether only the job's folder is missing, and not the place of all jobs."""
        text = str(error)
        return text.strip("/") == path or "bucket" not in text.lower()  # s3fs gives the path for an empty place

    def _objects(self, path: str) -> Iterator[Entry]:
        for each in self._list(path):
            if each.get("type") == "file" and 0 < (each.get("size") or 0) <= MAX_BYTES:
                yield Entry(_name(each), _time(each))

    def _tidy(self, path: str) -> None:
        if self._made:
            with contextlib.suppress(Exception):  # others use it
                self._filesystem.rmdir(path)


def _name(entry: Mapping[str, Any]) -> str:
    return str(entry["name"]).rstrip("/").rpartition("/")[2]


def _time(entry: Mapping[str, Any]) -> float | None:
    """Return when an object was written; None: the storage does not tell."""
    for key in _TIMES:
        match entry.get(key):
            case datetime() as time_:
                return time_.timestamp()
            case str(text):
                try:
                    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
                except ValueError:
                    continue
            case int(number) | float(number):
                return float(number)
    return None


def explained(error: Exception, operation: str, protocol: str) -> BucketReply:
    """Return what a failure means, and what to do."""
    # Without the path, which is another one at each turn: a cause is named when it is seen twice.
    text = re.sub(r"(https?://[^/\s\"]+)[^\s\"]*", r"\1", " ".join(str(error).split())) or type(error).__name__
    kinds = {kind.__name__ for each in _causes(error) for kind in type(each).__mro__}
    s3 = protocol in _S3
    if "ImportError" in kinds:
        extra = "pip install s3fs" if s3 else f"install what fsspec needs for {protocol}://"
        return BucketReply(what=f"needs a package that is not installed here: {text}", fix=extra)
    if operation == "open" and "ValueError" in kinds:
        fix = f"correct the URL; `python -c 'import fsspec; fsspec.filesystem(\"{protocol}\")'` says what is missing"
        return BucketReply(what=f"can't be opened: {text}", fix=fix)
    if kinds & {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound"}:
        return BucketReply(
            what=f"can't be used without credentials, and this machine has none: {text}",
            fix="give them as the back end expects them: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or "
            "a role of the instance",
        )
    verb = {"write": "written", "list": "listed", "jobs": "listed", "read": "read", "delete": "deleted"}.get(
        operation, "used"
    )
    if "PermissionError" in kinds:
        rights = "s3:ListBucket, s3:GetObject, s3:PutObject and s3:DeleteObject" if s3 else "listing, reading, writing"
        return BucketReply(
            what=f"can't be {verb}, access is refused: {text}",
            fix=f"look at the credentials of this machine; they must allow {rights} there",
        )
    if "FileNotFoundError" in kinds:
        return BucketReply(what=f"does not exist: {text}", fix="create the bucket, or correct its name in MINGLE_PEERS")
    if any("Timeout" in kind for kind in kinds):
        return BucketReply(what=f"has not answered in time: {text}", fix=_reach(s3=s3))
    if any("Connect" in kind or "HTTPClientError" in kind for kind in kinds):
        return BucketReply(what=f"can't be reached: {text}", fix=_reach(s3=s3))
    return BucketReply(what=f"can't be {verb}: {type(error).__name__}: {text}", fix=_LOOK)


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__ or each.__context__


def _reach(*, s3: bool) -> str:
    where = "AWS_ENDPOINT_URL and AWS_REGION, " if s3 else ""
    return f"look at {where}the proxy (HTTPS_PROXY) and this machine's way to the storage"
