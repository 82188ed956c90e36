"""How answers look, on a terminal and in a pipe."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mingle.cli import checks, jobs, main, output
from tests.support.bystanders import command_environment, gathering
from tests.support.ports import free_udp_port


def test_rows_in_a_pipe_are_lines_with_tabs(capsys: pytest.CaptureFixture[str]) -> None:
    output.show(output.Table(("A", "B"), [("1", "x\ty"), ("2", ("[red]", "blue")), ("3", ())]))
    assert capsys.readouterr().out == "1\tx\\ty\n2\t[red], blue\n3\t-\n"


def test_with_a_header_the_names_of_the_columns_come_first(capsys: pytest.CaptureFixture[str]) -> None:
    table = output.Table(("A", "B"), [("1", "2")])
    output.show(table, header=True)
    output.show(table, output.Table(("C",), [("3",)]), header=True)
    assert capsys.readouterr().out == "A\tB\n1\t2\nC\n3\n"


@pytest.mark.parametrize(
    ("words", "heading"),
    [
        (["interfaces"], ["INTERFACE", "USED", "KIND", "STATE", "ADDRESSES"]),
        (["env"], ["SECTION", "NAME", "VALUE", "MEANING"]),
        (["list", "-t", "0.2"], list(jobs.COLUMNS)),
        (["watch", "-t", "0.2"], ["EVENT", *jobs.COLUMNS]),
        (["doctor"], ["STATUS", "CHECK", "OBSERVATION", "FIX"]),
        (["ping", "--count", "1", "--interval", "0.05"], ["EVENT", *checks.PING_COLUMNS]),
    ],
    ids=lambda value: value[0],
)
def test_every_table_has_a_header_for_pipes(words: list[str], heading: list[str]) -> None:
    environment = {"MINGLE_INTERFACE": "lo", "MINGLE_PORT": str(free_udp_port())}
    lines = CliRunner().invoke(main, [*words, "--header"], env=environment).stdout.splitlines()
    assert lines[0].split("\t") == heading
    without = CliRunner().invoke(main, words, env=environment).stdout.splitlines()
    assert heading not in [line.split("\t") for line in without]


def test_an_encoding_that_lacks_a_letter_gets_an_escape(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    output.answer("jöb")
    output.show(output.Table(("A",), [("→",)]))
    sys.stdout.flush()
    assert raw.getvalue() == b"j\\xf6b\n\\u2192\n"


def test_a_terminal_whose_encoding_lacks_a_letter_gets_an_escape(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="latin-1"))
    output.console().print(output.Table(("A → B",), [("→ jöb",)]))
    sys.stdout.flush()
    shown = raw.getvalue().decode("latin-1")
    assert "A \\u2192 B" in shown
    assert "\\u2192 jöb" in shown


def mingle(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command; options as for `subprocess.run`."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    environment = command_environment(free_udp_port())
    command = [sys.executable, "-m", "mingle", *words]
    return subprocess.run(command, env=environment, text=True, timeout=60, check=False, **streams)


@pytest.mark.parametrize("closed", [1, 2])
def test_a_closed_stream_does_not_change_the_status(closed: int) -> None:
    done = mingle("list", "-t", "0.2", preexec_fn=lambda: os.close(closed))
    assert done.returncode == 0
    assert ("no job answered" in done.stderr) is (closed == 1)
    assert "Traceback" not in done.stderr


def test_a_reader_of_messages_that_is_gone_does_not_change_the_status() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert mingle("list", "-t", "0.2", stderr=writer).returncode == 0
    finally:
        os.close(writer)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("words", [("env",), ("env", "--json"), ("interfaces", "--header")], ids=" ".join)
def test_an_answer_that_cannot_be_written_is_an_error(words: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        done = mingle(*words, stdout=full)
    assert (done.returncode, done.stderr) == (1, "Error: the answer can't be written: No space left on device\n")


def test_json_is_one_line_with_its_schemas_number(capsys: pytest.CaptureFixture[str]) -> None:
    output.answer_json("list", {"jobs": ["ä\n"]})
    line = capsys.readouterr().out
    assert line.count("\n") == 1
    assert line.isascii()
    assert json.loads(line) == {"schema": output.SCHEMA, "command": "list", "jobs": ["ä\n"]}


def test_json_is_such_that_strict_readers_take_it() -> None:
    line = output.json_line("env", {"value": "half \udc80 and \U0001f600"})
    assert json.loads(line)["value"] == "half ? and \U0001f600"
    for number in (math.inf, -math.inf, math.nan):
        with pytest.raises(ValueError, match="JSON"):
            output.json_line("list", {"seconds": number})


@contextlib.contextmanager
def terminal(*arguments: str, port: int, **variables: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Yield a command on a terminal of 120 columns, and the descriptor from which its output is read."""
    reader, end = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "mingle", *arguments],
        env=command_environment(port, **{"TERM": "xterm", "COLUMNS": "120", **variables}),
        stdin=subprocess.DEVNULL,
        stdout=end,
        stderr=subprocess.DEVNULL,
    )
    os.close(end)
    try:
        with process:
            try:
                yield process, reader
            finally:
                process.terminate()
    finally:
        os.close(reader)


def read_until(reader: int, mark: bytes | None) -> bytes:
    """Return what a terminal shows up to a mark and a little more; without the mark all that it shows."""
    shown = b""
    with contextlib.suppress(OSError):  # EIO: on Linux the end of a terminal whose other side is closed
        while (mark is None or mark not in shown) and (part := os.read(reader, 65536)):
            shown += part
    return shown


def on_a_terminal(*arguments: str, **variables: str) -> str:
    """Return all that a command shows on a terminal."""
    with terminal(*arguments, port=free_udp_port(), **variables) as (_, reader):
        return read_until(reader, None).decode()


def test_on_a_terminal_there_is_a_table_with_a_heading_and_colors_unless_they_are_unwanted() -> None:
    coloured = on_a_terminal("interfaces")
    assert re.search(r"INTERFACE.*USED.*KIND.*STATE.*ADDRESSES", coloured)
    assert "\x1b[1m" in coloured
    plain = on_a_terminal("interfaces", NO_COLOR="1")
    assert "127.0.0.1/8" in plain
    assert not re.search(r"\x1b\[3\d", plain)


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert "Traceback" not in mingle("interfaces", "--help", stdout=writer).stderr
    finally:
        os.close(writer)


def test_live_tables_on_a_terminal() -> None:
    shown = on_a_terminal("watch", "-t", "0.5")
    assert re.search(r"JOB.*STATE.*HOST.*ADDRESS.*JOINED.*MISSING.*SEEKING", shown)
    shown = on_a_terminal("ping", "--count", "2", "--interval", "0.1")
    assert re.search(r"PEER.*WAY.*SENT.*ANSWERED.*LOSS", shown)
    assert "JOB" not in on_a_terminal("list", "-t", "0.2"), "without a job there is no table"
    shown = on_a_terminal("doctor", "--all")
    assert "\x1b[32mPASS" in shown
    assert "\x1b[32m" not in on_a_terminal("doctor", "--all", NO_COLOR="1")


def test_answers_are_escaped_and_messages_line_by_line(capsys: pytest.CaptureFixture[str]) -> None:
    output.answer("job \x1b[2J")
    output.say("job \x1b[2J\n  fix: it")
    assert capsys.readouterr() == ("job \\x1b[2J\n", "job \\x1b[2J\n  fix: it\n")


def test_a_terminal_without_cursor_movements_gets_lines() -> None:
    port = free_udp_port()
    with gathering("resnet", port, (0,), world_size=1), terminal("watch", port=port, TERM="dumb") as (_, reader):
        shown = read_until(reader, b"\tresnet\trunning\t")  # later than the first line if its first probe is lost
    assert shown.startswith(b"+\tresnet\t")
    assert b"\tresnet\trunning\t" in shown


def test_a_live_table_that_is_terminated_gives_the_cursor_back() -> None:
    hidden, back = b"\x1b[?25l", b"\x1b[?25h"
    with terminal("watch", port=free_udp_port()) as (process, reader):
        shown = read_until(reader, hidden)
        process.terminate()
        shown += read_until(reader, back)
        assert process.wait(60) == 143
    assert back in shown.rpartition(hidden)[2]
