from __future__ import annotations

import copy
import errno
import os
import pickle
import subprocess
import sys

import pytest

from mingle.errors import (
    AuthenticationError,
    ConfigurationError,
    ConflictError,
    ConnectivityError,
    DiscoveryTimeoutError,
    InterfaceError,
    LauncherError,
    MingleError,
    counted,
    opening,
)

ALL = [
    MingleError,
    DiscoveryTimeoutError,
    ConflictError,
    ConnectivityError,
    AuthenticationError,
    InterfaceError,
    LauncherError,
    ConfigurationError,
]


@pytest.mark.parametrize(
    ("error_type", "builtin"), [(DiscoveryTimeoutError, TimeoutError), (ConfigurationError, ValueError)]
)
def test_builtin_bases(error_type: type[MingleError], builtin: type[Exception]) -> None:
    assert issubclass(error_type, builtin)


def test_explain_puts_the_three_parts_below_each_other() -> None:
    error = ConflictError.explain("rank 2 is held twice", cause="two nodes, one rank", remedy="unset RANK\nor end it")
    assert type(error) is ConflictError
    assert str(error) == ("rank 2 is held twice\n  likely cause: two nodes, one rank\n  fix: unset RANK\n    or end it")
    parts = ("rank 2 is held twice", "two nodes, one rank", "unset RANK\nor end it")
    assert (error.observation, error.cause, error.remedy) == parts


def test_plain_message() -> None:
    error = DiscoveryTimeoutError("nobody came")
    assert (str(error), error.observation, error.cause, error.remedy) == ("nobody came", "nobody came", None, None)


@pytest.mark.parametrize("error_type", ALL)
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_parts_survive_pickling_and_copying(error_type: type[MingleError], duplicate) -> None:
    error = error_type.explain("seen", cause="why", remedy="how")
    twin = duplicate(error)
    assert type(twin) is error_type
    assert isinstance(twin, MingleError)
    assert str(twin) == str(error)
    assert (twin.observation, twin.cause, twin.remedy) == ("seen", "why", "how")


FIRST_CALL_WITHOUT_DESCRIPTORS = """
import os, resource, mingle
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []
try:
    while True:
        held.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    pass
try:
    mingle.discover("a job", rank=0, world_size=2)
except mingle.MingleError as error:
    print(error)
"""


def test_a_first_call_that_finds_no_descriptor_for_its_modules_says_so() -> None:
    code = FIRST_CALL_WITHOUT_DESCRIPTORS
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.startswith(f"the modules of mingle can't be opened: {os.strerror(errno.EMFILE)}\n"), done.stderr
    assert "likely cause: this process, or the whole system, has no file descriptor left" in done.stdout
    assert "fix: look at `ulimit -n`" in done.stdout


def test_another_failure_to_load_a_module_stays_what_it_is() -> None:
    with pytest.raises(OSError, match="no such library"), opening("torch"):
        raise OSError("no such library")
    with pytest.raises(MingleError, match="torch can't be opened"), opening("torch"):
        raise OSError(errno.ENFILE, "Too many open files in system")


@pytest.mark.parametrize(("count", "text"), [(0, "0 machines"), (1, "1 machine"), (2, "2 machines")])
def test_a_number_agrees_with_its_noun(count: int, text: str) -> None:
    assert counted(count, "machine") == text
