"""Tells c10d's rendezvous at once which nodes the gathering has lost, instead of letting their heartbeats run out.

Torch takes a node for alive for 15 s after its last heartbeat, and lets no new round begin before. The host of the
gathering knows better: its connection to a dead node's agent has closed, or has been silent for too long. So it marks
such a node's last heartbeat as long past; whoever reads the state next removes it, as torch itself would later.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

from torch.distributed import PrefixStore, Store
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    _BackendRendezvousStateHolder,
)

logger = logging.getLogger("mingle")

LOOK_SECONDS = 1.0
LOOKS = 2
"""Looks in a row that must miss a node before it is reported; a node that lost its connection can return at once."""
LONG_PAST = datetime(1970, 1, 1, tzinfo=timezone.utc)


def sign(store: Store, inner: DynamicRendezvousHandler, member: bytes) -> None:
    """Writes down which member of the gathering a node of the rendezvous is. Every agent does, before it joins."""
    _names(store).set(repr(inner._this_node), member.hex())


def _names(store: Store) -> PrefixStore:
    return PrefixStore("mingle/nodes", store)


class Absentees:
    """Looks every second who is missing, in a thread of its own. Only the host of the gathering has one.

    Args:
        store: a client of the agents' store that nobody else uses.
        backend: the rendezvous's, on that client.
        inner: the rendezvous.
        present: gives the members of the gathering that are there now; None: not known at the moment.
    """

    def __init__(
        self,
        store: Store,
        backend: RendezvousBackend,
        inner: DynamicRendezvousHandler,
        present: Callable[[], frozenset[bytes] | None],
    ) -> None:
        self._names = _names(store)
        self._holder = _BackendRendezvousStateHolder(backend, inner.settings, cache_duration=0)
        self._present = present
        self._members: dict[Any, bytes] = {}
        self._missed: Counter[Any] = Counter()
        self._stopped = threading.Event()
        # By its name it may be left behind: it can be inside a call that does not end.
        threading.Thread(target=self._run, name="mingle-abandoned-absentees", daemon=True).start()

    def stop(self) -> None:
        """Ends it, at the latest when the call returns in which it may be."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(LOOK_SECONDS):
            try:
                self._look()
            except (RendezvousError, RuntimeError) as error:
                # The store is gone, which others notice as well: there is nothing to tell any more.
                logger.debug("who is absent is not looked for any more: %s", error)
                return
            except Exception as error:
                logger.error("who is absent is not looked for any more; a lost node costs 15 s now", exc_info=error)
                return

    def _look(self) -> None:
        self._holder.sync()
        # Asked after the state was read: whoever is in it had joined the gathering by then.
        present = self._present()
        nodes = self._holder.state.last_heartbeats
        missing = {node for node in nodes if present is not None and self._is_missing(node, present)}
        self._missed = Counter({node: self._missed[node] + 1 for node in missing})
        lost = [node for node, looks in self._missed.items() if looks >= LOOKS]
        if lost:
            logger.info("the rendezvous need not wait for %s: lost", ", ".join(map(repr, lost)))
            for node in lost:
                nodes[node] = LONG_PAST
            self._holder.mark_dirty()
            # Somebody else may have written in between: then it is tried again at the next look.
            self._holder.sync()

    def _is_missing(self, node: Any, present: frozenset[bytes]) -> bool:
        if node not in self._members:
            if not self._names.check([repr(node)]):
                return False
            self._members[node] = bytes.fromhex(self._names.get(repr(node)).decode())
        return self._members[node] not in present
