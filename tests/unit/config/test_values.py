from __future__ import annotations

import copy
import fcntl
import functools
import os
import pickle
import resource
import subprocess
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.pretty import pretty_repr

from mingle.config import values
from mingle.config.values import Peer
from mingle.errors import ConfigurationError, LauncherError


class AnotherLibrarysInteger:
    def __index__(self) -> int:
        return 3


READERS: dict[str, Callable[[Any, str], object]] = {
    "parse_whole": functools.partial(values.parse_whole, maximum=65535),
    "check_whole": functools.partial(values.check_whole, maximum=10),
    "seconds": values.seconds,
    "address": values.address,
    "peers": values.peers,
    "folders": values.folders,
}
TAKEN: dict[str, list[tuple[object, object]]] = {
    "parse_whole": [("0", 0), ("+3", 3), ("007", 7), ("65535", 65535)],
    "check_whole": [(AnotherLibrarysInteger(), 3), (10, 10)],
    "seconds": [(1, 1.0), ("1e2", 100.0), (Fraction(1, 4), 0.25), (timedelta(milliseconds=1), 0.001)],
    "address": [("203.0.113.7", "203.0.113.7"), ("2001:DB8:0::1", "2001:db8::1")],
    "peers": [
        ("10.0.0.1:65535", (Peer("10.0.0.1", 65535),)),
        ("2001:db8::1", (Peer("2001:db8::1"),)),
        ("[2001:db8::1]", (Peer("2001:db8::1"),)),
        ("[fe80::1%eth0]:80", (Peer("fe80::1%eth0", 80),)),
        (" a , b ;; c\td\ne,", tuple(map(Peer, "abcde"))),
        ("a,a:1,a", (Peer("a"), Peer("a", 1))),
        (["a", "b:2,c"], (Peer("a"), Peer("b", 2), Peer("c"))),
        ("my_host bücher.example", (Peer("my_host"), Peer("bücher.example"))),
        ("a, dir:/x s3://bucket/mingle;b:2", (Peer("a"), Peer("b", 2))),
    ],
    "folders": [
        ("a, dir:/shared/x b:2;dir:~/x,dir:/shared/x/", ("dir:/shared/x", "dir:/shared/ann/x")),
        (["a", "dir:/x"], ("dir:/x",)),
        ("a,s3://bucket/x/,sftp://ann@store:2222/x", ("s3://bucket/x", "sftp://ann@store:2222/x")),
    ],
}
REFUSED: dict[str, tuple[object, ...]] = {
    "parse_whole": ("", "x", "-1", "1.0", "1e3", "1_0", " 1", "٣", "65536", "9" * 5000),
    "check_whole": (True, False, 1.0, "1", None, [1], -1, 11),
    "seconds": (0, -1, float("nan"), "inf", "5m", "", True, None, [], timedelta(0), 10**400, Decimal(1)),
    "address": ("host", "10.0.0.256", "10.0.0.1:80", "[::1]", "fe80::1%eth0", "0.0.0.0", "::", "239.1.2.3", "", 7),
    "peers": (
        *("", " , ", "a:", ":1", "a:0", "a:65536", "a:x", "a:-1", "a:1:2", "2001:db8::1:99999", ["a", ""], ["a", 7]),
        *("[::1", "[::1]x", "[::1]:", "[a]:1", "[10.0.0.1]:1", "user@a", "-a", "10.0.0.256", "10.0.0"),
        *("239.1.2.3", "ff02::1", "0.0.0.0", "::"),
    ),
    "folders": (
        *("dir:", "dir:shared", "dir:./x", "dir:7000", "dir:~no-such-user/x", "dir:/a\0b"),
        *("http://a", "https://a/b", "tcp://a:1", "mingle://job", "file:///shared", "://a", "S3://a"),
        *("s3://", "s3:///key", "s3://a?b", "s3://a/\x07"),
    ),
}


@pytest.mark.parametrize(("kind", "value", "expected"), [(kind, *row) for kind, rows in TAKEN.items() for row in rows])
def test_a_value_is_read(kind: str, value: object, expected: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/shared/ann")
    read = READERS[kind](value, "n")
    assert (read, type(read)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("kind", "value"),
    [(kind, value) for kind, refused in REFUSED.items() for value in refused],
    ids=lambda value: ascii(value)[:20],
)
def test_a_value_of_another_kind_is_refused_by_its_name(kind: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=r"\bn(=| holds)"):
        READERS[kind](value, "n")


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        ("parse_whole", "x", "from 0 to 65535"),
        ("peers", "node0,/shared/mingle", "(?s)holds '/shared/mingle'.*write dir:/shared/mingle for a directory"),
        ("peers", "node0,~/mingle", "(?s)holds '~/mingle'.*write dir:~/mingle for a directory"),
        ("peers", "node0, node1:abc", r"n='node0, node1:abc': the port of 'node1:abc' is not a whole number"),
        ("peers", ["node1:70000"], "the port of 'node1:70000' is too large"),
        ("folders", "dir:shared", "absolute"),
        ("folders", "s3://", "names no shared folder"),
        ("folders", "file:///shared/mingle", "write dir: and the absolute path"),
    ],
)
def test_an_error_says_how_a_value_is_written(kind: str, value: object, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        READERS[kind](value, "n")


def test_parse_whole_raises_what_is_asked_for() -> None:
    with pytest.raises(LauncherError, match="N='x'"):
        values.parse_whole("x", "N", error=LauncherError)


@pytest.mark.parametrize("scheme", ["sftp", "https", "file"])
@pytest.mark.parametrize("rest", ["hunter2@store/mingle", "hunter2@store/mingle?x", "hunter2#@store/mingle"])
def test_a_url_with_a_password_is_refused_and_not_shown(scheme: str, rest: str) -> None:
    with pytest.raises(ConfigurationError, match="with a password") as caught:
        values.folders(f"{scheme}://ann:{rest}", "peers")
    assert "hunter2" not in str(caught.value)


@hypothesis.settings(derandomize=True, database=None, deadline=None)
@given(
    host=st.one_of(
        st.from_regex(r"\A[a-z][a-z0-9-]{0,20}(\.[a-z][a-z0-9]{0,5}){0,2}\Z"),
        st.ip_addresses(v=6, network="2001:db8::/32").map(str),
        st.ip_addresses(v=4, network="10.0.0.0/8").map(str),
    ),
    port=st.none() | st.integers(1, 65535),
)
def test_a_peer_reads_back_from_its_text(host: str, port: int | None) -> None:
    peer = Peer(host, port)
    assert values.peers(str(peer), "peers") == (peer,)


def checked(value: object) -> values.Secret:
    return values.checked_secret(values.Secret(value), "MINGLE_SECRET")


def test_a_secret_shows_nothing_of_itself() -> None:
    secret = values.Secret(b"tell nobody")
    shown = [
        repr(secret),
        str(secret),
        f"{secret}",
        f"{secret!r}",
        pretty_repr(secret),
        pretty_repr({"secret": secret}),
    ]
    assert "tell" not in " ".join(shown)
    assert repr(secret) == "Secret(...)"
    with pytest.raises(TypeError):
        vars(secret)


def test_a_secret_is_what_it_was_made_of() -> None:
    secret = values.Secret(b"s3cret")
    assert (bytes(secret), len(secret)) == (b"s3cret", 6)
    assert secret == values.Secret(b"s3cret") == b"s3cret"
    assert hash(secret) == hash(values.Secret(b"s3cret"))
    assert secret != values.Secret(b"s3cret ")
    assert secret != "s3cret"
    assert pickle.loads(pickle.dumps(secret)) == copy.deepcopy(secret) == secret
    assert (values.Secret.of(None), values.Secret.of(secret)) == (None, secret)


def test_a_secret_that_is_no_utf8_comes_back_as_it_was() -> None:
    assert checked(b"\xff\xfe".decode("utf-8", "surrogateescape")) == b"\xff\xfe"
    assert checked("schlüssel") == "schlüssel".encode()


@pytest.mark.parametrize("value", ["", b"", 7, "tell nobody \ud800"])
def test_a_secret_that_is_none(value: object) -> None:
    with pytest.raises(ConfigurationError) as raised:
        checked(value)
    assert "MINGLE_SECRET" in str(raised.value)
    assert "tell nobody" not in str(raised.value)
    # A traceback shows the chain of exceptions, and a UnicodeEncodeError shows its text.
    assert raised.value.__cause__ is None
    assert raised.value.__suppress_context__ or raised.value.__context__ is None


@pytest.mark.parametrize(
    ("content", "secret"),
    [
        (b"k", b"k"),
        (b"k\r\n", b"k"),
        (b" k\n\n", b" k\n"),
        (b"a\nb\n", b"a\nb"),
        (b"\x00\xff\n", b"\x00\xff"),
        (b"k" * 65536, b"k" * 65536),
        *((refused, None) for refused in (b"", b"\n", b"\r\n", b"k" * 65537)),
    ],
)
def test_the_content_of_a_secret_file(tmp_path: Path, content: bytes, secret: bytes | None) -> None:
    path = tmp_path / "secret"
    path.write_bytes(content)
    if secret is not None:
        assert values.read_secret_file(str(path), "F") == secret
        return
    with pytest.raises(ConfigurationError, match="F="):
        values.read_secret_file(str(path), "F")


@pytest.mark.parametrize("path", ["missing", ".", "a\x00b", ""])
def test_a_secret_file_that_is_unreadable(tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match="can't be read"):
        values.read_secret_file(path, "F")


@pytest.fixture
def pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A named pipe, which a busy machine has time to read."""
    monkeypatch.setattr(values, "PIPE_SECONDS", 50.0)
    os.mkfifo(path := tmp_path / "pipe")
    return path


@pytest.fixture
def written(pipe: Path) -> Iterator[int]:
    """The descriptor of a writer; opened for both directions, a pipe does not wait for a reader."""
    writer = os.open(pipe, os.O_RDWR)
    yield writer
    os.close(writer)


def test_a_secret_pipe_whose_writer_comes_late_is_waited_for(pipe: Path) -> None:
    writer = threading.Timer(0.1, pipe.write_bytes, [b"late\n"])
    writer.start()
    assert values.read_secret_file(str(pipe), "F") == b"late"
    writer.join()


def test_a_secret_can_come_from_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in bash's ``--secret-file <(COMMAND)``: the command writes later than this process opens the pipe."""
    monkeypatch.setattr(values, "PIPE_SECONDS", 50.0)
    reader, writer = os.pipe()
    command = threading.Timer(0.1, lambda: (os.write(writer, b"out of a pipe\n"), os.close(writer)))
    command.start()
    try:
        assert values.read_secret_file(f"/dev/fd/{reader}", "F") == b"out of a pipe"
    finally:
        command.join()
        os.close(reader)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("content", [None, b"", b"whole secret\n"])
def test_a_secret_pipe_that_does_not_end_does_not_block(
    pipe: Path, content: bytes | None, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(values, "PIPE_SECONDS", 0.1)
    if content is not None:
        os.write(request.getfixturevalue("written"), content)
    with pytest.raises(ConfigurationError, match=r"is a pipe that has not ended within 0\.1 s") as error:
        values.read_secret_file(str(pipe), "F")
    assert "whole secret" not in str(error.value)


def test_a_secret_pipe_is_read_where_the_process_has_many_files_open(pipe: Path) -> None:
    writer = os.open(pipe, os.O_RDWR)
    os.write(writer, b"a secret of some length")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], min(4096, limits[1])), limits[1]))
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    high = fcntl.fcntl(reader, fcntl.F_DUPFD, 1100)
    os.close(writer)
    try:
        assert values._read_pipe(high) == b"a secret of some length"
    finally:
        os.close(high)
        os.close(reader)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.timeout(60)
def test_a_secret_pipe_that_is_written_without_end_does_not_block(pipe: Path) -> None:
    with subprocess.Popen(["dd", "if=/dev/zero", f"of={pipe}", "bs=4096"], stderr=subprocess.DEVNULL) as writer:
        with pytest.raises(ConfigurationError, match="holds more than 65536 bytes"):
            values.read_secret_file(str(pipe), "F")
        writer.wait()


LONG = b"correct horse battery staple"


@pytest.fixture
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has not looked at a secret yet."""
    monkeypatch.setattr(values, "_remarks", {})


@pytest.mark.usefixtures("nothing_said")
@pytest.mark.parametrize(
    ("secret", "weak"),
    [(None, False), (LONG, False), (b"x" * 16, False), (b"x" * 15, True), ("ж".encode() * 15, True), (b"", True)],
)
def test_a_short_secret_is_remarked_on_once(secret: bytes | None, weak: bool) -> None:
    assert [bool(values.remarks(secret)) for _ in range(2)] == [weak, False]


@pytest.mark.usefixtures("nothing_said")
@pytest.mark.parametrize(
    ("mode", "weak"), [(0o600, False), (0o400, False), (0o440, False), (0o644, True), (0o604, True)]
)
def test_a_secret_file_that_others_can_read_is_remarked_on_once(tmp_path: Path, mode: int, weak: bool) -> None:
    path = tmp_path / "secret"
    path.write_bytes(LONG)
    path.chmod(mode)
    for _ in range(2):
        values.read_secret_file(str(path), "F")
    remarks = values.remarks(LONG)
    assert len(remarks) == weak
    for remark in remarks:
        assert str(path) in remark
        assert f"{mode:04o}" in remark
        assert "chmod 600" in remark
        assert LONG.decode() not in remark
    assert values.remarks(LONG) == []
