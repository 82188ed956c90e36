"""The stores of a round: one place in the agents' store for each round, and a store for its workers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from mingle.elastic import worker_store
from mingle.elastic.worker_store import Stores, meet, open_for_workers
from mingle.engine.store import StoreServer, open_server
from mingle.protocol.machine import Formation
from mingle.wire import frames


@pytest.fixture(autouse=True)
def _no_store_of_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the handler sets it."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")


@pytest.fixture
def server() -> Iterator[StoreServer]:
    """The agents' store."""
    made = open_server("127.0.0.1", None, b"S" * 16)
    yield made
    made.abort()


def formation(server: StoreServer, address: str = "127.0.0.1", interface: str = "lo") -> Formation:
    return Formation(
        session=server.session,
        place=frames.Place(rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0, num_nodes=1),
        store_address="127.0.0.1",
        store_port=server.port,
        interface=interface,
        address=address,
        roster_digest=b"",
    )


def meet_all(
    agents: list[Formation], number: int = 0, *, local_addr: str | None = None, seconds: float = 30.0
) -> list[Stores]:
    """Let these agents be in a round together, in the order of their ranks."""

    def meet_as(rank: int) -> Stores:
        begun = frames.Begin(number=number, rank=rank, size=len(agents))
        return meet(agents[rank], begun, local_addr=local_addr, read_seconds=seconds)

    with ThreadPoolExecutor(len(agents)) as pool:
        return list(pool.map(meet_as, range(len(agents))))


def told(stores: Stores) -> tuple[str, int]:
    """Return where the workers of an agent find their store."""
    return stores.workers.master_addr, stores.workers.master_port


def test_all_agents_are_told_the_store_that_agent_0_has_opened(server: StoreServer) -> None:
    first, second = meet_all([formation(server)] * 2)
    assert first.server is not None
    assert second.server is None
    assert told(first) == told(second) == ("127.0.0.1", first.server.port)


def test_rounds_share_neither_store_nor_keys(server: StoreServer) -> None:
    (first,), (second,) = (meet_all([formation(server)], number) for number in (0, 1))
    assert told(first) != told(second)
    first.agents.set("key", "of the first round")
    assert not second.agents.check(["key"])


def test_a_call_that_waits_in_the_store_of_a_round_blocks_no_later_round(server: StoreServer) -> None:
    (first,) = meet_all([formation(server)])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.agents.get, "set by the second round")
        (second,) = meet_all([formation(server)], 1)
        second.agents.set("own", "key")
        assert not waiting.done()
        server.abort()
        assert isinstance(waiting.exception(30), RuntimeError)


def test_the_agents_are_told_the_address_that_the_user_gave(server: StoreServer) -> None:
    first, second = meet_all([formation(server)] * 2, local_addr="localhost")
    assert told(first) == told(second)
    assert told(first)[0] == "localhost"


def test_a_link_local_address_of_the_workers_store_has_the_zone_of_each_agents_interface(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two machines joined by one cable: a zone is a name on one machine, and torch can't connect without one."""
    opened: list[str] = []

    def open_here(address: str, _local_addr: str | None) -> StoreServer:
        opened.append(address)
        return open_server("127.0.0.1", None, b"S" * 16)

    monkeypatch.setattr(worker_store, "open_for_workers", open_here)
    agents = [formation(server, f"fe80::{number}", interface) for number, interface in enumerate(("eth0", "lan0"))]
    assert [told(each)[0] for each in meet_all(agents)] == ["fe80::0%eth0", "fe80::0%lan0"]
    assert opened == ["fe80::0%eth0"]


def test_an_agents_store_that_cannot_be_reached_is_a_lost_connection(server: StoreServer) -> None:
    server.abort()
    with pytest.raises(RendezvousConnectionError, match="the agents' store can't be reached"):
        meet_all([formation(server)])


def test_a_workers_store_that_agent_0_never_opens_is_not_waited_for_without_end(server: StoreServer) -> None:
    begun = frames.Begin(number=0, rank=1, size=2)
    with pytest.raises(RuntimeError):
        meet(formation(server), begun, local_addr=None, read_seconds=0.2)


@pytest.mark.parametrize(
    ("local_addr", "listens_on"),
    [(None, "127.0.0.1"), ("127.0.0.9", "127.0.0.9"), ("203.0.113.7", "0.0.0.0"), ("no such name", "0.0.0.0")],
)
def test_the_workers_store_listens_where_they_are_sent(local_addr: str | None, listens_on: str) -> None:
    server = open_for_workers("127.0.0.1", local_addr)
    assert server.address == listens_on
    server.release()
