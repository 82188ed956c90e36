"""python-zeroconf, as the function of a rank: rank 0 registers a service, the others find and resolve it."""

from __future__ import annotations

import socket
import threading
import time

import zeroconf
from tests.lab import report

from benchmarks.hosts import Place

TYPE = "_mingle-bench._tcp.local."
PORT = 29400
RESOLVE_MILLISECONDS = 30_000
PROBING, BY_NAME = "probing", "by name"


def find(place: Place) -> None:
    """Register, or browse and resolve; the rank stays until it is killed."""
    with _find(place):
        threading.Event().wait()


def find_and_connect(place: Place) -> None:
    """As `find` by name, with a store: rank 0 opens it and registers its port, the others connect to what they found.

    It does what mingle does for a worker, as far as a few lines can: no rank knows whether all others have come.
    """
    from torch.distributed import TCPStore

    _rehearse()
    started, cpu = place.wait(), time.process_time()
    with zeroconf.Zeroconf() as responder:
        if place.rank == 0:
            store = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False, multi_tenant=True)
            responder.register_service(_service(place, store.port), cooperating_responders=True)
            report("hosting")
        else:
            found = _resolved(responder.get_service_info(TYPE, _name(place), timeout=RESOLVE_MILLISECONDS))
            store = TCPStore(found.parsed_addresses()[0], found.port or 0, is_master=False, wait_for_workers=False)
        report("done", started=started, at=time.monotonic(), cpu=time.process_time() - cpu)
        threading.Event().wait()
        del store


def _rehearse() -> None:
    """Do the same once on loopback, as mingle's ranks do: a forked process copies each page at its first write."""
    with zeroconf.Zeroconf(interfaces=["127.0.0.1"]) as responder:
        name = f"rehearsal-{time.monotonic_ns()}.{TYPE}"
        service = zeroconf.ServiceInfo(TYPE, name, port=PORT, addresses=[socket.inet_aton("127.0.0.1")])
        responder.register_service(service, cooperating_responders=True)
        _browse(responder, name)


def _name(place: Place) -> str:
    return f"{place.job.replace(' ', '-')}.{TYPE}"


def _service(place: Place, port: int) -> zeroconf.ServiceInfo:
    addresses = [socket.inet_aton(place.address)]
    return zeroconf.ServiceInfo(TYPE, _name(place), port=port, addresses=addresses, server="rank0.local.")


def _find(place: Place) -> zeroconf.Zeroconf:
    _rehearse()
    started, cpu = place.wait(), time.process_time()
    responder = zeroconf.Zeroconf()
    if place.rank == 0:
        # It returns after two repeats of the announcement, for which no worker waits.
        responder.register_service(_service(place, PORT), cooperating_responders=place.option != PROBING)
        report("hosting")
    elif place.option == BY_NAME:
        _resolved(responder.get_service_info(TYPE, _name(place), timeout=RESOLVE_MILLISECONDS))
    else:
        _browse(responder, _name(place))
    report("done", started=started, at=time.monotonic(), cpu=time.process_time() - cpu)
    return responder


def _browse(responder: zeroconf.Zeroconf, name: str) -> None:
    seen = threading.Event()

    def changed(**change: object) -> None:
        if change["name"] == name:
            seen.set()

    zeroconf.ServiceBrowser(responder, TYPE, handlers=[changed])
    seen.wait()
    _resolved(responder.get_service_info(TYPE, name, timeout=RESOLVE_MILLISECONDS))


def _resolved(info: zeroconf.ServiceInfo | None) -> zeroconf.ServiceInfo:
    if info is None or not info.addresses:
        raise RuntimeError("zeroconf did not resolve the service")
    return info
