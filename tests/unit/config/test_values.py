from __future__ import annotations

import copy
import fcntl
import os
import pickle
import resource
import subprocess
import threading
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

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


@pytest.mark.parametrize(("text", "number"), [("0", 0), ("+3", 3), ("007", 7), ("65535", 65535)])
def test_parse_whole(text: str, number: int) -> None:
    assert values.parse_whole(text, "N", maximum=65535) == number


@pytest.mark.parametrize("text", ["", "x", "-1", "1.0", "1e3", "1_0", " 1", "٣", "65536", "9" * 5000])
def test_parse_whole_refuses(text: str) -> None:
    with pytest.raises(ConfigurationError, match="from 0 to 65535"):
        values.parse_whole(text, "N", maximum=65535)


def test_parse_whole_raises_what_is_asked_for() -> None:
    with pytest.raises(LauncherError, match="N='x'"):
        values.parse_whole("x", "N", error=LauncherError)


def test_check_whole_takes_other_libraries_integers() -> None:
    number = values.check_whole(AnotherLibrarysInteger(), "n")
    assert (number, type(number)) == (3, int)


@pytest.mark.parametrize("value", [True, False, 1.0, "1", None, [1], -1, 11])
def test_check_whole_refuses(value: object) -> None:
    with pytest.raises(ConfigurationError, match="n="):
        values.check_whole(value, "n", maximum=10)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1.0),
        (0.5, 0.5),
        ("2.5", 2.5),
        ("1e2", 100.0),
        (Fraction(1, 4), 0.25),
        (timedelta(minutes=5), 300.0),
        (timedelta(milliseconds=1), 0.001),
    ],
)
def test_seconds(value: object, expected: float) -> None:
    assert values.seconds(value, "timeout") == expected


@pytest.mark.parametrize(
    "value",
    [
        0,
        -1,
        float("nan"),
        float("inf"),
        "inf",
        "nan",
        "5m",
        "",
        True,
        None,
        [],
        timedelta(0),
        10**400,
        Decimal(1),
    ],
)
def test_seconds_refuses(value: object) -> None:
    with pytest.raises(ConfigurationError, match="timeout="):
        values.seconds(value, "timeout")


@pytest.mark.parametrize(
    ("text", "canonical"),
    [("203.0.113.7", "203.0.113.7"), ("2001:DB8:0::1", "2001:db8::1"), ("127.0.0.1", "127.0.0.1")],
)
def test_address(text: str, canonical: str) -> None:
    assert values.address(text, "advertise") == canonical


@pytest.mark.parametrize(
    "text",
    ["host", "10.0.0.256", "10.0.0.1:80", "[::1]", "fe80::1%eth0", "0.0.0.0", "::", "239.1.2.3", "", 7],
)
def test_address_refuses(text: object) -> None:
    with pytest.raises(ConfigurationError, match="advertise="):
        values.address(text, "advertise")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a", [Peer("a")]),
        ("a:1", [Peer("a", 1)]),
        ("10.0.0.1:65535", [Peer("10.0.0.1", 65535)]),
        ("2001:db8::1", [Peer("2001:db8::1")]),
        ("::1", [Peer("::1")]),
        ("[2001:db8::1]", [Peer("2001:db8::1")]),
        ("[2001:db8::1]:80", [Peer("2001:db8::1", 80)]),
        ("fe80::1%eth0", [Peer("fe80::1%eth0")]),
        ("[fe80::1%eth0]:80", [Peer("fe80::1%eth0", 80)]),
        ("a,b", [Peer("a"), Peer("b")]),
        ("a;b", [Peer("a"), Peer("b")]),
        ("a b\tc\nd", [Peer("a"), Peer("b"), Peer("c"), Peer("d")]),
        (" a , b ;; c,", [Peer("a"), Peer("b"), Peer("c")]),
        ("a,a:1,a", [Peer("a"), Peer("a", 1)]),
        (["a", "b:2,c"], [Peer("a"), Peer("b", 2), Peer("c")]),
        ("job-0.svc.cluster.local", [Peer("job-0.svc.cluster.local")]),
        ("my_host", [Peer("my_host")]),
        ("bücher.example", [Peer("bücher.example")]),
    ],
)
def test_peers(value: str | list[str], expected: list[Peer]) -> None:
    assert values.peers(value, "peers") == tuple(expected)


@pytest.mark.parametrize(
    "value",
    [
        "",
        " , ",
        "a:",
        ":1",
        "a:0",
        "a:65536",
        "a:x",
        "a:-1",
        "a:1:2",
        "2001:db8::1:99999",
        "[::1",
        "[::1]x",
        "[::1]:",
        "[a]:1",
        "[10.0.0.1]:1",
        "user@a",
        "-a",
        "10.0.0.256",
        "10.0.0",
        "239.1.2.3",
        "ff02::1",
        "0.0.0.0",
        "::",
        ["a", ""],
        ["a", 7],
    ],
)
def test_peers_refuses(value: str | list[str]) -> None:
    with pytest.raises(ConfigurationError, match="peers"):
        values.peers(value, "peers")


@pytest.mark.parametrize("path", ["/shared/mingle", "~/mingle"])
def test_a_path_among_the_peers_is_told_how_a_directory_is_written(path: str) -> None:
    with pytest.raises(ConfigurationError, match=f"(?s)holds '{path}'.*write dir:{path} for a directory"):
        values.peers(f"node0,{path}", "MINGLE_PEERS")


def test_folders_are_mixed_with_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/shared/ann")
    text = "a, dir:/shared/mingle b:2;dir:~/.mingle,dir:/shared/mingle/"
    assert values.peers(text, "peers") == (Peer("a"), Peer("b", 2))
    assert values.folders(text, "peers") == ("dir:/shared/mingle", "dir:/shared/ann/.mingle")
    assert values.folders(["a", "dir:/x"], "peers") == ("dir:/x",)


@pytest.mark.parametrize("value", ["dir:", "dir:shared", "dir:./x", "dir:7000", "dir:~no-such-user/x", "dir:/a\0b"])
def test_a_folder_has_an_absolute_path(value: str) -> None:
    with pytest.raises(ConfigurationError, match="absolute"):
        values.folders(value, "peers")


def test_buckets_are_mixed_with_peers() -> None:
    text = "a,s3://bucket/mingle/,sftp://ann@store:2222/mingle;gs://bucket"
    assert values.peers(text, "peers") == (Peer("a"),)
    assert values.folders(text, "peers") == ("s3://bucket/mingle", "sftp://ann@store:2222/mingle", "gs://bucket")


@pytest.mark.parametrize(
    "value",
    [
        "http://a",
        "https://a/b",
        "tcp://a:1",
        "mingle://job",
        "://a",
        "s3://",
        "s3:///key",
        "s3://a?b",
        "s3://a/\x07",
        "S3://a",
    ],
)
def test_a_url_names_a_bucket(value: str) -> None:
    with pytest.raises(ConfigurationError, match="names no shared folder"):
        values.folders(value, "peers")


def test_a_url_of_one_machines_files_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="write dir: and the absolute path"):
        values.folders("file:///shared/mingle", "peers")


@pytest.mark.parametrize(
    "url",
    [
        "sftp://ann:hunter2@store/mingle",
        "sftp://ann:hunter2@store/mingle?x",
        "sftp://ann:hunter2#@store/mingle",
        "https://ann:hunter2@store/mingle",
        "file://ann:hunter2@store/mingle",
    ],
)
def test_a_url_with_a_password_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(ConfigurationError, match="with a password") as caught:
        values.folders(url, "peers")
    assert "hunter2" not in str(caught.value)


def test_a_peers_port_that_is_none_shows_the_whole_value() -> None:
    with pytest.raises(ConfigurationError) as caught:
        values.peers("node0, node1:abc", "MINGLE_PEERS")
    assert caught.value.observation == "MINGLE_PEERS='node0, node1:abc': the port of 'node1:abc' is not a whole number"
    with pytest.raises(ConfigurationError, match="the port of 'node1:70000' is too large"):
        values.peers(["node1:70000"], "peers")


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
        (b"k\n", b"k"),
        (b"k\r\n", b"k"),
        (b"k\n\n", b"k\n"),
        (b" k ", b" k "),
        (b"a\nb\n", b"a\nb"),
        (b"\x00\xff\n", b"\x00\xff"),
        (b"k" * 65536, b"k" * 65536),
    ],
)
def test_read_secret_file(tmp_path: Path, content: bytes, secret: bytes) -> None:
    path = tmp_path / "secret"
    path.write_bytes(content)
    assert values.read_secret_file(str(path), "F") == secret


def test_a_secret_pipe_whose_writer_comes_late_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "PIPE_SECONDS", 60.0)
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Timer(0.1, path.write_bytes, [b"late\n"])
    writer.start()
    assert values.read_secret_file(str(path), "F") == b"late"
    writer.join()


def test_a_secret_pipe_that_nobody_writes_to_does_not_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "PIPE_SECONDS", 0.1)
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(ConfigurationError, match=r"is a pipe that has not ended within 0\.1 s"):
        values.read_secret_file(str(path), "F")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("written", [b"", b"whole secret\n"])
def test_a_secret_pipe_whose_writer_stays_does_not_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: bytes
) -> None:
    monkeypatch.setattr(values, "PIPE_SECONDS", 0.1)
    path = tmp_path / "pipe"
    os.mkfifo(path)
    # Opened for both directions, a FIFO does not wait for a reader.
    writer = os.open(path, os.O_RDWR)
    os.write(writer, written)
    try:
        with pytest.raises(ConfigurationError, match="its writer does not close it") as error:
            values.read_secret_file(str(path), "F")
    finally:
        os.close(writer)
    assert "whole secret" not in str(error.value)


def test_a_secret_pipe_is_read_where_the_process_has_many_files_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(values, "PIPE_SECONDS", 50.0)
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = os.open(path, os.O_RDWR)
    os.write(writer, b"a secret of some length")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], min(4096, limits[1])), limits[1]))
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    high = fcntl.fcntl(reader, fcntl.F_DUPFD, 1100)
    os.close(writer)
    try:
        assert values._read_pipe(high) == b"a secret of some length"
    finally:
        os.close(high)
        os.close(reader)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.timeout(60)
def test_a_secret_pipe_that_is_written_without_end_does_not_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(values, "PIPE_SECONDS", 50.0)
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with subprocess.Popen(["dd", "if=/dev/zero", f"of={path}", "bs=4096"], stderr=subprocess.DEVNULL) as writer:
        with pytest.raises(ConfigurationError, match="holds more than 65536 bytes"):
            values.read_secret_file(str(path), "F")
        writer.wait()


def test_a_secret_can_come_from_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in bash's ``--secret-file <(COMMAND)``: the command writes later than this process opens the pipe."""
    monkeypatch.setattr(values, "PIPE_SECONDS", 60.0)
    reader, writer = os.pipe()
    command = threading.Timer(0.1, lambda: (os.write(writer, b"out of a pipe\n"), os.close(writer)))
    command.start()
    try:
        assert values.read_secret_file(f"/dev/fd/{reader}", "F") == b"out of a pipe"
    finally:
        command.join()
        os.close(reader)


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


@pytest.mark.parametrize("content", [b"", b"\n", b"\r\n", b"k" * 65537])
def test_read_secret_file_refuses_content(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "secret"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match="F="):
        values.read_secret_file(str(path), "F")


@pytest.mark.parametrize("path", ["missing", ".", "a\x00b", ""])
def test_read_secret_file_that_is_unreadable(tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match="can't be read"):
        values.read_secret_file(path, "F")
