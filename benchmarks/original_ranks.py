"""One datagram, once, as the function of a rank: rank 0 multicasts its address when it starts, the others wait for it.

That is how the script worked that mingle descends from, on the same library for multicast.
"""

from __future__ import annotations

import threading
import time

import multicast_expert
from tests.lab import report

from benchmarks.hosts import Place

GROUP, PORT = "239.192.1.2", 29497


def run(place: Place) -> None:
    """Send the one datagram, or wait for it; the rank stays until it is killed."""
    if place.rank == 0:
        report("hosting")
        started, cpu = place.wait(), time.process_time()
        with multicast_expert.McastTxSocket(2, [GROUP], iface="eth0") as sender:
            sender.sendto(place.address.encode(), (GROUP, PORT))
    else:
        # A rank that began before the datagram listens before it; one that is told to begin later can't.
        if place.begin is not None:
            time.sleep(max(0.0, place.begin - time.monotonic()))
        with multicast_expert.McastRxSocket(2, [GROUP], port=PORT, iface="eth0") as receiver:
            started, cpu = time.monotonic(), time.process_time()
            report("waiting")
            receiver.settimeout(None)
            receiver.recvfrom()
    report("done", started=started, at=time.monotonic(), cpu=time.process_time() - cpu)
    threading.Event().wait()
