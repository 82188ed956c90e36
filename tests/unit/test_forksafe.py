"""A real fork: what the child still holds."""

from __future__ import annotations

import os
import re
import socket
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mingle import forksafe
from tests.support.children import held_by_another_thread, in_child

# pytest-xdist runs tests beside a thread of its own; the children only look at their descriptors.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


def link(fd: int) -> str:
    """What the descriptor stands for, or why it stands for nothing."""
    try:
        return str(Path(f"/proc/self/fd/{fd}").readlink())
    except FileNotFoundError:
        return "closed"


def test_a_registered_socket_is_closed_in_the_child_and_open_in_the_parent() -> None:
    with forksafe.register(socket.socket()) as kept, socket.socket() as other:
        fd, other_fd = kept.fileno(), other.fileno()
        assert in_child(lambda: f"{link(fd)} {kept.fileno()} {link(other_fd)}") == f"closed -1 {link(other_fd)}"
        assert link(fd).startswith("socket:")


def test_a_foreign_descriptor_becomes_dev_null_and_keeps_its_number() -> None:
    with socket.socket() as foreign:
        fd = foreign.fileno()
        forksafe.register_fd(fd)
        assert in_child(lambda: f"{link(fd)} {os.get_inheritable(fd)}") == "/dev/null False"
        assert link(fd).startswith("socket:")


def test_a_number_that_stands_for_another_file_or_none_by_now_is_left_alone() -> None:
    closed = [socket.socket() for _ in range(3)]  # the pipe of the child takes two of their numbers
    with socket.socket() as replaced, socket.socket() as kept, socket.socket() as newcomer:
        fds = [replaced.fileno(), kept.fileno()]
        for fd in (*(each.fileno() for each in closed), *fds):
            forksafe.register_fd(fd)
        for each in closed:
            each.close()
        os.dup2(newcomer.fileno(), fds[0])
        assert in_child(lambda: " ".join(map(link, fds))) == f"{link(newcomer.fileno())} /dev/null"


def test_a_foreign_descriptor_is_forgotten_once_its_owner_has_closed_it() -> None:
    with socket.socket() as foreign:
        closed = foreign.fileno()
        forksafe.register_fd(closed)
    with socket.socket() as first, socket.socket() as second:
        forksafe.register_fd(max(first.fileno(), second.fileno()))
        assert closed not in forksafe._foreign


def test_registering_a_closed_descriptor_is_an_error() -> None:
    with socket.socket() as closed:
        fd = closed.fileno()
    with pytest.raises(OSError, match="Bad file descriptor"):
        forksafe.register_fd(fd)


def test_two_threads_can_register_descriptors_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """fstat(2) lets another thread run, which registers a descriptor of its own."""
    with socket.socket() as first, socket.socket() as second, socket.socket() as third:
        fds = [each.fileno() for each in (first, second, third)]
        forksafe.register_fd(fds[0])

        def meanwhile(_fd: int, _identity: tuple[int, int]) -> bool:
            monkeypatch.undo()
            forksafe.register_fd(fds[2])
            return True

        monkeypatch.setattr(forksafe, "_is_open_as", meanwhile)
        forksafe.register_fd(fds[1])
        assert in_child(lambda: " ".join(map(link, fds))) == "/dev/null /dev/null /dev/null"


class Closable:
    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("register", "make"),
    [(forksafe.register, Closable), (forksafe.register_lock, threading.Lock)],
    ids=["closable", "lock"],
)
def test_what_is_registered_is_kept_alive_by_its_owner_only(
    register: Callable[[Any], Any], make: Callable[[], Any]
) -> None:
    reference = weakref.ref(register(make()))
    assert reference() is None


# --- locks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [threading.Lock, threading.RLock, threading.Condition])
def test_a_lock_that_another_thread_held_at_the_fork_is_free_in_the_child(make: Callable[[], Any]) -> None:
    lock = forksafe.register_lock(make())
    with held_by_another_thread(lock):
        assert in_child(lambda: str(lock.acquire(timeout=1))) == "True"
        assert not lock.acquire(blocking=False), "still held in the parent"
    assert lock.acquire(blocking=False)
    lock.release()


def test_every_lock_of_the_package_is_registered() -> None:
    made = [
        line
        for path in Path(forksafe.__file__).parent.rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(r"threading\.(R?Lock|Condition|(Bounded)?Semaphore)\(", line)
    ]
    assert made
    assert [line for line in made if "forksafe.register_lock(" not in line] == []
