"""What the driver does, whatever machine it drives: shown with a machine that only notes what it is told."""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from mingle.config.settings import Network
from mingle.engine.control_port import ControlPort
from mingle.engine.driver import Driver
from mingle.errors import InterfaceError
from mingle.network import interfaces
from mingle.network.connections import CLOSED_BY_PEER
from mingle.network.directory import Directory
from mingle.protocol.effects import Dial, Hangup, Reset, Write
from mingle.protocol.events import (
    Accepted,
    AddressesChanged,
    BytesReceived,
    Connected,
    Disconnected,
    Event,
    FoldersListed,
    Heard,
    InterfacesChanged,
    TimerDue,
)
from mingle.wire.datagrams import Offer
from tests.support.alarms import alarm_is_passed_on
from tests.support.failing import refusing
from tests.support.noting_driver import SEEK, SESSION, Noting, fail, folder_driver, let_lo_have
from tests.support.ports import free_udp_port


def test_shared_folders_are_closed_where_no_interface_can_be_used() -> None:
    """A bucket has a helper process from the start."""
    closed: list[str] = []
    bucket: Any = SimpleNamespace(close=lambda: closed.append("bucket"))
    with contextlib.ExitStack() as stack, pytest.raises(InterfaceError):
        Driver(Network(interfaces=("absent0",), port=free_udp_port()), None, None, stack, storages={"bucket": bucket})
    assert closed == ["bucket"]


def test_timer_that_input_has_settled_does_not_come(driver: Noting) -> None:
    """After a pause the answer to a question lies in a socket, and its time is over."""
    driver.notes.due = time.monotonic() - 1.0
    driver.call(lambda: setattr(driver.notes, "due", None))
    driver.turn()
    assert driver.notes.told == []


@pytest.fixture
def dialed(driver: Noting) -> int:
    """A connection of the driver with itself, which stands; the number of its other end."""
    driver.connections.listen([("127.0.0.1", 0)])
    driver.notes.to_do.append(Dial(999, "127.0.0.1", driver.connections.port, "lo"))
    assert driver.turn_until(Connected) == Connected(999, "127.0.0.1", "lo")
    return driver.turn_until(Accepted).conn


def test_a_connection_from_dial_to_end(driver: Noting, dialed: int) -> None:
    driver.notes.to_do.append(Write(999, b"hello"))
    assert driver.turn_until(BytesReceived) == BytesReceived(dialed, b"hello")
    driver.notes.to_do.append(Hangup(dialed))
    assert driver.turn_until(Disconnected) == Disconnected(999, CLOSED_BY_PEER)


def test_other_end_of_a_connection_that_is_reset_is_told_so(driver: Noting, dialed: int) -> None:
    """It would take an orderly end for that of this process."""
    driver.notes.to_do.append(Reset(999))
    ended = driver.turn_until(Disconnected)
    assert (ended.conn, "ECONNRESET" in ended.reason) == (dialed, True)


@pytest.mark.usefixtures("dialed")
def test_connection_whose_address_goes_from_this_machine_ends(driver: Noting, monkeypatch: pytest.MonkeyPatch) -> None:
    let_lo_have(monkeypatch, "127.0.0.2")
    driver.interfaces.scan_due = 0.0
    assert "the address 127.0.0.1 has gone from this machine" in driver.turn_until(Disconnected).reason


def test_connection_by_an_address_newer_than_the_last_scan_counts(
    driver: Noting, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as before:
        let_lo_have(before, "127.0.0.2")
        assert driver.interfaces.rescan(time.monotonic())
    driver.connections.listen([("127.0.0.1", 0)])
    driver.notes.to_do.append(Dial(999, "127.0.0.1", driver.connections.port, ""))
    assert driver.turn_until(Connected) == Connected(999, "127.0.0.1", "lo")


def test_connections_through_interfaces_not_named_are_not_used(driver: Noting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver.interfaces, "owner", lambda local, dialed: "eth7")
    driver.connections.listen([("127.0.0.1", 0)])
    driver.notes.to_do.append(Dial(999, "127.0.0.1", driver.connections.port, "lo"))
    assert "eth7" in driver.turn_until(Disconnected).reason
    assert not any(isinstance(told, Connected) for told in driver.notes.told)


def test_interfaces_that_can_not_be_scanned_stay_as_they_were(driver: Noting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of descriptors for a while: that is no reason to give up the job."""
    before = driver.evidence.facts().interfaces
    monkeypatch.setattr(interfaces, "scan", refusing(errno.EMFILE))
    driver.interfaces.scan_due = 0.0
    driver.notes.due = time.monotonic()
    driver.turn_until(TimerDue)
    assert driver.interfaces.scan_due > 0.0
    assert driver.evidence.facts().interfaces == before != []


def test_a_host_that_keeps_its_addresses_while_it_is_sealed_is_told_when_they_are_back(
    driver: Noting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the newest ones once its session takes members again."""
    driver.control_port.listen(locally=False)
    before = driver.control_port.addresses
    for addresses in ((msgspec.structs.replace(before[0], address="127.0.0.2"),), before):
        monkeypatch.setattr(ControlPort, "addresses", addresses)
        driver.relisten(1.0, locally=False)
        assert driver.notes.told[-1] == AddressesChanged(addresses)


# --- input that could not be handled --------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [Connected, BytesReceived, Accepted, Disconnected])
def test_connection_that_can_not_be_handled_is_closed(
    driver: Noting, step: type[Event], caplog: pytest.LogCaptureFixture
) -> None:
    driver.connections.listen([("127.0.0.1", 0)])
    driver.notes.instead[step] = fail
    with socket.create_connection(("127.0.0.1", driver.connections.port)) as caller:
        caller.setblocking(False)
        caller.sendall(b"hello")
        if step is Connected:
            driver.notes.to_do.append(Dial(999, "127.0.0.1", driver.connections.port, "lo"))
        if step is Disconnected:
            driver.turn_until(BytesReceived)
            caller.close()
        driver.turn_until_dropped(1)
        if step in (Accepted, BytesReceived):
            with contextlib.suppress(ConnectionResetError):
                assert select.select([caller], [], [], 30)[0]
                assert caller.recv(1) == b""
    driver.notes.told.clear()
    driver.turn_until(TimerDue)
    faults = 2 if step is Disconnected else 1  # the machine is told of the end once more
    assert driver.evidence.facts().rejected["fault"] == faults, "the connection is gone for good"
    assert "a riddle" in caplog.text


def test_a_timer_that_can_not_be_handled_ends_the_loop(driver: Noting) -> None:
    """Nobody sent it, so there is nothing to drop: a machine without its timers would wait for ever."""
    driver.notes.instead[TimerDue] = fail
    driver.notes.due = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        driver.turn()


# --- shared folders -------------------------------------------------------------------------------------------------


OFFER = Offer(job="a job", session=SESSION, host=b"h" * 16, addresses=("127.0.0.1",), port=9, world_size=2)


def test_a_machine_hears_what_another_shows_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Directory, "leave_seconds", 60.0)
    with contextlib.ExitStack() as stack:
        host, seeker = folder_driver(stack, tmp_path), folder_driver(stack, tmp_path)
        host.notes.shows = OFFER
        seeker.notes.shows = SEEK
        host.carry_out()
        message, source = seeker.hear()
        assert message == OFFER
        assert source.folder
        assert source.address == f"dir:{tmp_path}"
        assert not seeker.turn_until(FoldersListed).lower
    assert not list(tmp_path.iterdir())


def test_an_object_that_a_machine_can_not_handle_ends_no_loop(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        host, seeker = folder_driver(stack, tmp_path), folder_driver(stack, tmp_path)
        host.notes.shows, seeker.notes.shows = OFFER, SEEK
        seeker.notes.instead[Heard] = fail
        host.carry_out()
        seeker.turn_until(FoldersListed)
        seeker.turn_until_dropped(1)


# --- calls of other threads -------------------------------------------------------------------------------------------


def test_call_of_another_thread_wakes_the_driver(driver: Noting) -> None:
    thread = threading.Thread(target=driver.call, args=(lambda: driver.tell(InterfacesChanged()),))
    thread.start()
    driver.turn_until(InterfacesChanged)
    thread.join()


def test_timeout_error_of_a_signal_handler_in_a_call_is_not_lost(
    driver: Noting, monkeypatch: pytest.MonkeyPatch
) -> None:
    with alarm_is_passed_on() as interrupted, monkeypatch.context() as patched:
        patched.setattr(socket.socket, "send", interrupted)
        driver.call(list)
