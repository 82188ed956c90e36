from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import pytest
from msgspec import structs

from mingle.distributed.environment import Environment, process_environment, variables
from mingle.protocol.machine import Formation
from mingle.wire.frames import Place
from tests.support.loopback import until

PAIR = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def job(*, named: bool = False, **changes: Any) -> dict[str, str]:
    formation = Formation(
        session=b"S" * 16,
        place=Place(rank=5, world_size=8, local_rank=1, local_world_size=4, node_rank=1, num_nodes=2),
        store_address="10.0.0.1",
        store_port=29500,
        interface="eth1",
        address="10.0.0.5",
        roster_digest=b"",
    )
    return variables(structs.replace(formation, **changes), named=named)


def test_variables_of_a_job() -> None:
    assert job() == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "NODE_RANK": "1",
        "GROUP_RANK": "1",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": "eth1",
        "TP_SOCKET_IFNAME": "eth1",
    }


def test_nccl_gets_an_exact_name_only_when_the_user_named_it() -> None:
    assert job(named=True)["NCCL_SOCKET_IFNAME"] == "=eth1"
    assert "NCCL_SOCKET_IFNAME" not in job()


@pytest.mark.parametrize("before", [{"HOME": "/root"}, {"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "old"}])
def test_export_writes_and_restore_puts_back_what_is_visible_meanwhile(before: dict[str, str]) -> None:
    target = dict(before)
    environment = Environment(target)
    assert len(environment.export(job())) == ("MASTER_ADDR" in before)
    assert target == {**before, **job()}
    assert environment.visible() == before
    for _ in range(2):
        environment.restore()
        assert target == before


def test_value_changed_after_the_export_stays() -> None:
    target = {"MASTER_ADDR": "old"}
    environment = Environment(target)
    environment.export(job())
    target["MASTER_ADDR"] = "new"
    del target["RANK"]
    assert environment.visible() == {"MASTER_ADDR": "new"}
    environment.restore()
    assert target == {"MASTER_ADDR": "new"}


def test_restore_after_restore_leaves_the_users_equal_value_alone() -> None:
    target: dict[str, str] = {}
    environment = Environment(target)
    environment.export(PAIR)
    environment.restore()
    target.update(PAIR)
    environment.restore()
    assert target == PAIR


def test_a_second_export_replaces_the_first_and_remembers_the_original() -> None:
    target = {"MASTER_ADDR": "old"}
    environment = Environment(target)
    environment.export(job(named=True))
    place = Place(rank=6, world_size=8, local_rank=2, local_world_size=4, node_rank=1, num_nodes=2)
    second = job(place=place, store_address="10.0.0.2", interface="eth2")
    environment.export(second)
    assert target == second
    environment.restore()
    assert target == {"MASTER_ADDR": "old"}


def test_a_second_export_takes_the_users_change_for_the_users() -> None:
    target: dict[str, str] = {}
    environment = Environment(target)
    environment.export({"RANK": "1"})
    target["RANK"] = "3"
    (note,) = environment.export({"RANK": "2"})
    assert "RANK=3" in note
    assert "RANK=2" in note
    environment.restore()
    assert target == {"RANK": "3"}


@pytest.mark.parametrize("name", ["GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
def test_an_interface_that_the_user_set_stays(name: str) -> None:
    target = {name: "ib0"}
    environment = Environment(target)
    assert environment.export(job(named=True)) == []
    assert target[name] == "ib0"
    environment.restore()
    assert target == {name: "ib0"}


def test_an_empty_interface_is_none_and_comes_back() -> None:
    target = {"GLOO_SOCKET_IFNAME": ""}
    environment = Environment(target)
    environment.export(job())
    assert target["GLOO_SOCKET_IFNAME"] == "eth1"
    environment.restore()
    assert target == {"GLOO_SOCKET_IFNAME": ""}


@pytest.mark.parametrize(
    ("before", "noted"),
    [
        ({}, []),
        (PAIR, []),
        ({"MASTER_PORT": "29500"}, []),
        ({"MASTER_ADDR": "10.0.0.1"}, []),
        ({"MASTER_ADDR": "", "MASTER_PORT": ""}, []),
        ({"MASTER_PORT": "1234"}, ["MASTER_PORT=1234"]),
        ({"MASTER_ADDR": "localhost"}, ["MASTER_ADDR=localhost"]),
        ({"MASTER_ADDR": "10.9.9.9", "MASTER_PORT": "29500"}, ["MASTER_ADDR=10.9.9.9", "MASTER_PORT=29500"]),
        ({"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}, ["MASTER_ADDR=10.0.0.1", "MASTER_PORT=1234"]),
    ],
)
def test_a_foreign_address_and_port_are_one_pair(before: dict[str, str], noted: list[str]) -> None:
    target = dict(before)
    notes = Environment(target).export(PAIR)
    assert target == PAIR
    assert len(notes) == bool(noted)
    assert all(text in notes[0] for text in [*noted, "MASTER_ADDR=10.0.0.1 MASTER_PORT=29500"] if noted)


def test_mingles_own_pair_is_never_foreign() -> None:
    environment = Environment({})
    environment.export(PAIR)
    assert environment.export({"MASTER_ADDR": "10.0.0.2", "MASTER_PORT": "29501"}) == []


def test_exports_of_many_threads_leave_one_of_them_and_restore_all() -> None:
    target = {"RANK": "original"}
    environment = Environment(target)
    start = threading.Barrier(8)

    def work(number: int) -> None:
        start.wait(30)
        for _ in range(50):
            environment.export({"RANK": str(number), f"ONLY_{number}": "1"})
            environment.visible()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert target == {"RANK": target["RANK"], f"ONLY_{target['RANK']}": "1"}
    environment.restore()
    assert target == {"RANK": "original"}


class Interrupted(MutableMapping[str, str]):
    """Variables at one of whose accesses a handler of a signal runs, before or after it."""

    def __init__(self, values: dict[str, str]) -> None:
        self.values_now = values
        self.left = -1
        self.handler: Callable[[], object] = str

    def _moment(self) -> None:
        self.left -= 1
        if self.left == -1:
            self.handler()

    def __getitem__(self, name: str) -> str:
        self._moment()
        try:
            return self.values_now[name]
        finally:
            self._moment()

    def __setitem__(self, name: str, value: str) -> None:
        self._moment()
        self.values_now[name] = value
        self._moment()

    def __delitem__(self, name: str) -> None:
        self._moment()
        del self.values_now[name]
        self._moment()

    def __iter__(self) -> Iterator[str]:
        return iter(list(self.values_now))

    def __len__(self) -> int:
        return len(self.values_now)


USERS = {"HOME": "/root", "WORLD_SIZE": "7"}


@pytest.mark.parametrize("asked", ["visible", "export", "restore"])
def test_handler_of_a_signal_restores_at_any_moment(asked: str) -> None:
    """A handler of SIGTERM can close a job while the program makes the next one."""
    for moment in itertools.count():
        target = Interrupted(dict(USERS))
        environment = Environment(target)
        environment.export({"RANK": "0", "WORLD_SIZE": "2"})
        target.left, target.handler = moment, environment.restore
        told: list[object] = []

        def call(environment: Environment = environment, told: list[object] = told) -> None:
            asked_for = {"visible": environment.visible, "restore": environment.restore}
            told.append(asked_for[asked]() if asked in asked_for else environment.export({"RANK": "1"}))

        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        thread.join(10)
        assert not thread.is_alive(), "it waits for itself"
        if target.left >= 0:
            break  # there was no such moment
        assert told == [{"visible": USERS, "export": [], "restore": None}[asked]]
        assert target.values_now == USERS
    assert moment > 4


def test_signal_that_comes_as_a_call_gets_the_lock_of_another_thread_restores() -> None:
    """Its handler runs before the next line of the call."""
    target = Interrupted(dict(USERS))
    environment = Environment(target)
    environment.export({"RANK": "0"})
    held, main = threading.Event(), threading.main_thread().ident
    assert main is not None

    def wait_for_main() -> None:
        held.set()
        until(lambda: sys._current_frames()[main].f_code.co_name == "_at_once")

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
    assert target.values_now == USERS


def test_restore_that_an_interrupt_ends_is_finished_by_the_next_call() -> None:
    for moment in itertools.count():
        target = Interrupted(dict(USERS))
        environment = Environment(target)
        environment.export({"RANK": "0", "WORLD_SIZE": "2"})

        def interrupt() -> None:
            raise KeyboardInterrupt

        def close(
            moment: int = moment,
            target: Interrupted = target,
            environment: Environment = environment,
            interrupt: Callable[[], None] = interrupt,
        ) -> None:
            environment.restore()
            target.left, target.handler = moment, interrupt

        target.left, target.handler = 0, close
        try:
            environment.visible()
        except KeyboardInterrupt:
            assert environment.visible() == USERS
            assert target.values_now == USERS
        else:
            break
    assert moment > 8


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_child_that_is_forked_inside_a_call_restores() -> None:
    target = Interrupted(dict(USERS))
    environment = Environment(target)
    environment.export({"RANK": "0"})
    statuses: list[int] = []

    def fork() -> None:
        pid = os.fork()
        if not pid:
            restored = False
            try:
                environment.restore()
                restored = target.values_now == USERS
            finally:
                os._exit(not restored)
        statuses.append(os.waitpid(pid, 0)[1])

    target.left, target.handler = 0, fork
    assert environment.visible() == USERS
    assert statuses == [0]


def test_the_process_environment_is_bound_to_os_environ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MINGLE_TEST_EXPORT", raising=False)
    process_environment.export({"MINGLE_TEST_EXPORT": "1"})
    try:
        assert os.environ["MINGLE_TEST_EXPORT"] == "1"
        assert "MINGLE_TEST_EXPORT" not in process_environment.visible()
    finally:
        process_environment.restore()
    assert "MINGLE_TEST_EXPORT" not in os.environ
