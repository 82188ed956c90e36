"""An agent's loop with real sockets on `lo`: it runs in a thread of its own and leaves nothing behind."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
from msgspec import structs

from mingle.elastic import loop as loops
from mingle.elastic.loop import AgentLoop
from mingle.elastic.quorum import Nodes, Policy
from mingle.engine import discovery, store
from mingle.engine.discovery import process_identity
from mingle.errors import MingleError
from tests.bystanders import free_udp_port
from tests.in_process import settings_of
from tests.loopback import answers, job_name, until

NODES = Nodes(minimum=1, maximum=1)


def loop_of(changed: Any = lambda: None, nodes: Nodes = NODES, **more: Any) -> AgentLoop:
    settings = structs.replace(settings_of(job_name("agent"), 0, nodes.maximum, free_udp_port(), **more), rank=None)
    policy = Policy(nodes=nodes, last_call=0.2)
    return AgentLoop(settings, process_identity(settings, minimum=nodes.minimum), policy, changed=changed)


def test_an_agent_alone_opens_its_store_and_closes_it() -> None:
    turns = threading.Event()
    loop = loop_of(turns.set)
    assert turns.wait(10)
    until(lambda: loop.agent.outcome)
    server = loop.stores.server
    assert server is not None
    assert server.handle is not None
    assert answers(server.port)
    port = loop.agent.endpoints.port
    assert answers(port)
    loop.stop("the test is over")
    assert not loop.alive
    assert not answers(port)
    assert server.handle is None


def test_every_agent_makes_room_since_each_may_come_to_host(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, bool]] = []
    monkeypatch.setattr(loops, "make_room", lambda *count, what, quiet: asked.append((*count, quiet)))
    loop_of(nodes=Nodes(minimum=1, maximum=700), progress="off").stop("the test is over")
    assert asked == [(700, discovery.FILES_PER_NODE, True)]


def test_a_store_that_cannot_be_opened_ends_the_gathering(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> store.StoreServer:
        raise MingleError.explain("no store today", cause="a test", remedy="none")

    monkeypatch.setattr(store, "open_server", fail)
    loop = loop_of()
    until(lambda: loop.agent.failure)
    assert "no store today" in str(loop.agent.failure)
    loop.stop("the test is over")


def test_a_fault_in_the_thread_is_logged_and_ends_the_session(caplog: pytest.LogCaptureFixture) -> None:
    told = threading.Event()
    loop = loop_of()
    until(lambda: loop.stores.server)
    server = loop.stores.server
    assert server is not None

    loop._changed = lambda: told.set() if loop.driver.failure is not None else None

    def fail() -> None:
        raise ZeroDivisionError("a fault")

    with caplog.at_level(logging.ERROR, logger="mingle"):
        loop.driver.call(fail)
        until(lambda: not loop.alive)
    assert "its loop was ended by an unforeseen ZeroDivisionError: a fault" in caplog.text
    assert isinstance(loop.driver.failure, MingleError)
    assert told.is_set()
    assert not answers(loop.agent.endpoints.port)
    assert not answers(server.port), "a store without its host would hold the others in a lost session"
