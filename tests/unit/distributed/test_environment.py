"""What mingle writes into the environment, and what is there again after it."""

from __future__ import annotations

import itertools
import signal
import sys
import threading
import time
from collections import UserDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from mingle import detached
from mingle.distributed.environment import SOCKET_INTERFACES, Environment, variables
from mingle.protocol.machine import Formation
from mingle.wire.frames import Place
from tests.support.children import in_child
from tests.support.loopback import until

PAIR = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
JOB = {
    "RANK": "9",
    "WORLD_SIZE": "12",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "NODE_RANK": "2",
    "GROUP_RANK": "2",
    **PAIR,
    "GLOO_SOCKET_IFNAME": "eth1",
    "TP_SOCKET_IFNAME": "eth1",
}
OF_NCCL = {"NCCL_SOCKET_IFNAME": "=eth1"}


@pytest.mark.parametrize(("named", "told"), [(False, JOB), (True, JOB | OF_NCCL)])
def test_nccl_gets_an_exact_name_only_when_the_user_named_it(named: bool, told: dict[str, str]) -> None:
    formation = Formation(
        session=b"S" * 16,
        place=Place(rank=9, world_size=12, local_rank=1, local_world_size=4, node_rank=2, num_nodes=3),
        store_address="10.0.0.1",
        store_port=29500,
        interface="eth1",
        address="10.0.0.5",
        roster_digest=b"",
    )
    assert variables(formation, named=named) == told


@pytest.mark.parametrize("before", [{"HOME": "/root"}, {"RANK": "9", "MASTER_ADDR": "old"}])
def test_export_writes_and_restore_puts_back_what_is_visible_meanwhile(before: dict[str, str]) -> None:
    target = dict(before)
    environment = Environment(target)
    assert len(environment.export(JOB)) == ("MASTER_ADDR" in before)
    assert target == {**before, **JOB}
    assert environment.visible() == before
    for _ in range(2):
        environment.restore()
        assert target == before


def test_value_changed_after_the_export_is_the_users() -> None:
    target = {"MASTER_ADDR": "old"}
    environment = Environment(target)
    environment.export({**PAIR, "RANK": "1"})
    target.update(MASTER_ADDR="new", RANK="3")
    del target["MASTER_PORT"]
    users = dict(target)
    assert environment.visible() == users
    (note,) = environment.export({"RANK": "2"})
    assert "RANK=3" in note
    assert "RANK=2" in note
    assert target == {**users, "RANK": "2"}
    environment.restore()
    assert target == users


def test_restore_after_restore_leaves_the_users_equal_value_alone() -> None:
    target: dict[str, str] = {}
    environment = Environment(target)
    environment.export(PAIR)
    environment.restore()
    target.update(PAIR)
    environment.restore()
    assert target == PAIR


def test_second_export_replaces_the_first_which_was_never_the_users() -> None:
    target = {"RANK": "7"}
    environment = Environment(target)
    environment.export({"RANK": "0", **PAIR, **OF_NCCL})
    second = {"RANK": "1", "MASTER_ADDR": "10.0.0.2", "MASTER_PORT": "29501"}
    (note,) = environment.export(second)
    assert "RANK=7" in note
    assert target == second
    environment.restore()
    assert target == {"RANK": "7"}


@pytest.mark.parametrize("users", ["ib0", ""])
@pytest.mark.parametrize("name", sorted(SOCKET_INTERFACES))
def test_interface_that_the_user_set_stays_and_an_empty_one_is_none(name: str, users: str) -> None:
    target = {name: users}
    environment = Environment(target)
    exported = JOB | OF_NCCL
    assert environment.export(exported) == []
    assert target == {**exported, name: users or exported[name]}
    environment.restore()
    assert target == {name: users}


@pytest.mark.parametrize(
    ("before", "noted"),
    [
        ({}, ""),
        (PAIR, ""),
        ({"MASTER_PORT": "29500"}, ""),
        ({"MASTER_ADDR": "10.0.0.1"}, ""),
        ({"MASTER_ADDR": "", "MASTER_PORT": ""}, ""),
        ({"MASTER_PORT": "1234"}, "MASTER_PORT=1234"),
        ({"MASTER_ADDR": "localhost"}, "MASTER_ADDR=localhost"),
        ({"MASTER_ADDR": "10.9.9.9", "MASTER_PORT": "29500"}, "MASTER_ADDR=10.9.9.9 MASTER_PORT=29500"),
        ({"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}, "MASTER_ADDR=10.0.0.1 MASTER_PORT=1234"),
    ],
)
def test_foreign_address_and_port_are_one_pair(before: dict[str, str], noted: str) -> None:
    target = dict(before)
    notes = Environment(target).export(PAIR)
    assert target == PAIR
    assert len(notes) == bool(noted)
    assert all(noted in note and "MASTER_ADDR=10.0.0.1 MASTER_PORT=29500" in note for note in notes)


def test_exports_of_many_threads_leave_one_of_them_and_restore_all() -> None:
    target = {"RANK": "original"}
    environment = Environment(target)
    start = threading.Barrier(8)

    def work(number: int) -> None:
        start.wait(30)
        for _ in range(50):
            environment.export({"RANK": str(number), f"ONLY_{number}": "1"})
            environment.visible()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert target == {"RANK": target["RANK"], f"ONLY_{target['RANK']}": "1"}
    environment.restore()
    assert target == {"RANK": "original"}


# --- signals and forks at any moment of a call ------------------------------------------------------------------------


class Interrupted(UserDict[str, str]):
    """Variables at one of whose accesses a handler of a signal runs, before or after it."""

    left = -1
    handler: Callable[[], object] = str

    def _moment(self) -> None:
        self.left -= 1
        if self.left == -1:
            self.handler()

    def __getitem__(self, name: str) -> str:
        self._moment()
        try:
            return self.data[name]
        finally:
            self._moment()

    def __setitem__(self, name: str, value: str) -> None:
        self._moment()
        self.data[name] = value
        self._moment()

    def __delitem__(self, name: str) -> None:
        self._moment()
        del self.data[name]
        self._moment()


USERS = {"HOME": "/root", "WORLD_SIZE": "7"}


def written() -> tuple[Interrupted, Environment]:
    """Return the user's variables with what mingle wrote over them."""
    target = Interrupted(USERS)
    environment = Environment(target)
    environment.export({"RANK": "0", "WORLD_SIZE": "2"})
    return target, environment


@pytest.mark.parametrize(
    ("ask", "told"),
    [
        (Environment.visible, USERS),
        (lambda environment: environment.export({"RANK": "1"}), []),
        (Environment.restore, None),
    ],
    ids=["visible", "export", "restore"],
)
def test_handler_of_a_signal_restores_at_any_moment(ask: Callable[[Environment], object], told: object) -> None:
    """A handler of SIGTERM can close a job while the program makes the next one."""
    deadline = time.monotonic() + 60
    for moment in itertools.count():
        target, environment = written()
        target.left, target.handler = moment, environment.restore
        # In a thread that can be left behind: a call that waits for itself never ends.
        answer = detached.run(partial(ask, environment), "call", lambda: time.monotonic() > deadline)
        if target.left >= 0:
            break  # there was no such moment
        assert answer == told
        assert target.data == USERS
    assert moment > 4


def test_signal_that_comes_as_a_call_gets_the_lock_of_another_thread_restores() -> None:
    """Its handler runs before the next line of the call."""
    target, environment = written()
    held, main = threading.Event(), threading.main_thread().ident
    assert main is not None

    def wait_for_main() -> None:
        held.set()
        until(lambda: sys._current_frames()[main].f_globals["__name__"] == Environment.__module__)

    def hold() -> None:
        environment.visible()
        signal.pthread_kill(main, signal.SIGUSR1)

    target.left, target.handler = 0, wait_for_main
    before = signal.signal(signal.SIGUSR1, lambda _number, _frame: environment.restore())
    holder = threading.Thread(target=hold)
    try:
        holder.start()
        assert held.wait(10)
        assert environment.visible() == USERS
        holder.join(10)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert target.data == USERS


def test_restore_that_an_interrupt_ends_is_finished_by_the_next_call() -> None:
    def is_interrupted_at(moment: int) -> bool:
        target, environment = written()

        def interrupt() -> None:
            raise KeyboardInterrupt

        def close() -> None:
            environment.restore()
            target.left, target.handler = moment, interrupt

        target.left, target.handler = 0, close
        try:
            environment.visible()
        except KeyboardInterrupt:
            assert environment.visible() == USERS
            assert target.data == USERS
            return True
        return False

    assert next(moment for moment in itertools.count() if not is_interrupted_at(moment)) > 8


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_child_that_is_forked_inside_a_call_restores() -> None:
    target, environment = written()
    told: list[str] = []

    def child() -> str:
        environment.restore()
        return str(target.data == USERS)

    target.left, target.handler = 0, lambda: told.append(in_child(child))
    assert environment.visible() == USERS
    assert told == ["True"]
