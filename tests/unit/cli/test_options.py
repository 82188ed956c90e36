"""The shared options: what they turn into, and what becomes of errors and log lines."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from mingle.cli import main
from mingle.cli.options import Shared, shared_options
from mingle.config.settings import Network
from mingle.errors import ConfigurationError, InterfaceError


def probing(does: Callable[[Shared], object], *arguments: str, **environ: str | None) -> Result:
    """Invoke a command that has the shared options."""

    @click.command("probe")
    @shared_options(timeout="")
    def probe(shared: Shared) -> None:
        does(shared)

    return CliRunner().invoke(probe, arguments, env=environ)


def run(*arguments: str, timeout: float | None = 3.0, **environ: str) -> Network:
    """What the options of a command turn into."""
    seen: list[Network] = []
    given = {"MINGLE_INTERFACE": None, **environ}
    result = probing(lambda shared: seen.append(shared.network(timeout)), *arguments, **given)
    assert result.exit_code == 0, result.output
    return seen[0]


def test_options_come_before_variables_and_those_before_defaults(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("from the file\n")
    network = run(
        *("-i", "eth0,eth1", "-i", "eth2", "-p", "1234", "-t", "7", "--peers", "a", "--peers", "b:5", "--family", "6"),
        *("--ttl", "4", "--secret-file", str(tmp_path / "secret")),
        MINGLE_PORT="9",
        MINGLE_SECRET="from the variable",
    )
    assert (network.interfaces, network.interfaces_from) == (("eth0", "eth1", "eth2"), "--interface")
    assert network.interface_was_named
    assert (network.port, network.discovery_timeout, network.family, network.ttl) == (1234, 7.0, "6", 4)
    assert [str(peer) for peer in network.peers] == ["a", "b:5"]
    assert network.secret == b"from the file"
    network = run(MINGLE_PORT="9", MINGLE_INTERFACE="eth7", MINGLE_SECRET="s", MINGLE_PEERS="c", MINGLE_TTL="2")
    assert (network.port, network.interfaces, network.secret, network.ttl) == (9, ("eth7",), b"s", 2)
    assert [str(peer) for peer in network.peers] == ["c"]
    network = run()
    assert network.interfaces_from == ""
    assert (network.port, network.interfaces, network.secret, network.ttl) == (29499, (), None, 1)


def test_the_time_is_the_option_else_the_commands_else_the_variable() -> None:
    assert run("-t", "1", MINGLE_TIMEOUT="9").discovery_timeout == 1
    assert run(MINGLE_TIMEOUT="9").discovery_timeout == 3
    assert run(timeout=None, MINGLE_TIMEOUT="9").discovery_timeout == 9


def fail(error: Exception, *arguments: str) -> Result:
    def does(_: Shared) -> None:
        raise error

    return probing(does, *arguments)


@pytest.mark.parametrize(("kind", "status"), [(InterfaceError, 1), (ConfigurationError, 2)])
def test_an_error_goes_to_stderr_and_with_json_to_stdout_as_well(
    kind: type[InterfaceError | ConfigurationError], status: int
) -> None:
    error = kind.explain("seen", cause="why", remedy="do")
    plain = fail(error)
    assert (plain.exit_code, plain.stdout) == (status, "")
    assert plain.stderr == "mingle-discover probe: seen\n  likely cause: why\n  fix: do\n"
    as_json = fail(error, "--json")
    assert (as_json.exit_code, as_json.stderr) == (status, plain.stderr)
    assert json.loads(as_json.stdout) == {
        "schema": 1,
        "command": "probe",
        "error": {"type": kind.__name__, "observation": "seen", "cause": "why", "remedy": "do"},
    }


def test_a_defect_is_not_dressed_up() -> None:
    assert isinstance(fail(ZeroDivisionError()).exception, ZeroDivisionError)


@pytest.mark.parametrize(
    ("flags", "shown"), [((), ["warning"]), (("-v",), ["warning", "info"]), (("-vv",), ["warning", "info", "debug"])]
)
def test_log_lines_go_to_stderr_as_loud_as_asked(flags: tuple[str, ...], shown: list[str]) -> None:
    logger = logging.getLogger("mingle")

    def does(_: Shared) -> None:
        logger.warning("w \x1b[2J")
        logger.info("i")
        logger.debug("d")

    before = logger.level, list(logger.handlers)
    result = probing(does, *flags)
    assert [line.partition(":")[0] for line in result.stderr.splitlines()] == shown
    assert "\x1b" not in result.stderr
    assert (logger.level, logger.handlers) == before


def test_a_traceback_that_is_logged_is_shown() -> None:
    def does(_: Shared) -> None:
        try:
            raise ZeroDivisionError("a riddle \x1b[2J")
        except ZeroDivisionError as error:
            logging.getLogger("mingle").error("dropped", exc_info=error)

    lines = probing(does).stderr.splitlines()
    assert lines[:2] == ["error: dropped", "Traceback (most recent call last):"]
    assert lines[-1] == r"ZeroDivisionError: a riddle \x1b[2J"


@pytest.mark.parametrize(
    ("arguments", "hinted"), [(["find", "-resnet"], True), (["find", "--resnet"], False), (["list", "-x"], False)]
)
def test_an_option_that_was_meant_as_a_job_id_is_explained(arguments: list[str], hinted: bool) -> None:
    told = CliRunner().invoke(main, arguments)
    assert told.exit_code == 2
    assert "No such option" in told.stderr
    assert ("a variable is probably unset" in told.stderr) is hinted
