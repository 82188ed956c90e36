"""Observers under fuzz: what `list`, `watch`, `find` and `ping` print as JSON of hostile bytes, read strictly."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
from typing import Any

from mingle.cli import checks, jobs, output
from mingle.diagnostics.diagnosis import Facts
from mingle.observe import path_checks
from mingle.observe.finder import Finder
from mingle.observe.lookup import not_formed, not_found, several_hosts
from mingle.observe.ping import EchoHeard, PingMachine
from mingle.protocol.effects import Dial
from mingle.protocol.events import Accepted, BytesReceived, Connected, Disconnected, Heard, Source, TimerDue
from mingle.protocol.explain.observations import NetworkFacts
from mingle.text import printable
from mingle.wire import datagrams, echo
from mingle.wire.datagrams import Rejected
from mingle.wire.frames import ProcessInfo
from tests.golden.examples import DATAGRAMS, JOB, PORT

_NOW = 1000.0
_SOURCE = Source(interface="eth0", address="192.0.2.66")
_OWN = b"F" * 16
_FACTS = Facts(port=29499, used_names=["eth0"], hostname="node")
_OFFER = DATAGRAMS["offer"][1]


def strictly(line: str) -> Any:
    """Read a line of JSON as a strict reader does: no NaN, no infinity, no half of a character.

    Raises:
        AssertionError: a strict reader refuses it.
    """

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    assert line.isascii()
    assert "\n" not in line
    read = json.loads(line, parse_constant=refuse)
    json.dumps(read, ensure_ascii=False).encode()
    return read


def _check(command: str, **fields: object) -> None:
    read = strictly(output.json_line(command, fields))
    assert (read["schema"], read["command"]) == (output.SCHEMA, command)


def _finder(job: str | None) -> Finder:
    return Finder(
        job,
        member=_OWN,
        who=ProcessInfo(hostname="node", pid=1),
        secret=None,
        new_id=itertools.count(1).__next__,
        rng=random.Random(0),
        now=_NOW,
        refresh=1.0,
    )


def _shown(finder: Finder) -> None:
    """All that the commands can say of what was seen."""
    records = jobs.records(finder.sessions, finder.seekers.values())
    _check("list", jobs=records)
    for job in records:
        _check("watch", event="new", job=job)
        assert all(printable(cell).isprintable() for cell in jobs.row(job))
    for session in finder.alive:
        _check("find", **jobs.record(session))
        _check("find", error=output.error_record(not_formed(JOB, session, 5.0)))
        _check("find", error=output.error_record(several_hosts(JOB, finder.alive)))
    _check("find", error=output.error_record(not_found(JOB, finder, NetworkFacts(), 5.0)))


def seen(untrusted: bytes) -> None:
    """A datagram reaches who looks round and who looks for a job; all that they print is JSON."""
    try:
        message = datagrams.decode(untrusted)
    except Rejected:
        return
    for job in (None, JOB):
        finder = _finder(job)
        finder.handle(Heard(message, _SOURCE), _NOW)
        _shown(finder)


def told(untrusted: bytes) -> None:
    """A host that was dialed answers with anything; what is printed of it is JSON."""
    finder = _finder(JOB)
    finder.handle(Heard(_OFFER, _SOURCE), _NOW)
    dialed = next(effect for effect in finder.effects() if isinstance(effect, Dial))
    assert dialed.port == PORT
    finder.handle(Connected(dialed.conn, "192.0.2.13", "eth0"), _NOW)
    finder.handle(BytesReceived(dialed.conn, untrusted), _NOW)
    if dialed.conn in finder.links:
        finder.handle(Disconnected(dialed.conn, "reset"), _NOW)
    _shown(finder)


def pinged(untrusted: bytes) -> None:
    """An echo reaches who pings, by UDP and over TCP; what is printed of its sender is JSON."""
    pings = PingMachine(
        "",
        pinger=_OWN,
        who=ProcessInfo(hostname="node", pid=1),
        port=4000,
        shared_port=29499,
        interval=1.0,
        count=None,
        new_id=itertools.count(1).__next__,
        now=_NOW,
    )
    with contextlib.suppress(Rejected):
        message = echo.decode(untrusted)
        for trusted in (True, False):
            heard = EchoHeard(
                message=message,
                address="192.0.2.66",
                interface="eth0",
                trusted=trusted,
                size=len(untrusted),
                handle=None,
            )
            pings.handle(heard, _NOW)
    pings.handle(TimerDue(), _NOW + 1)
    pings.handle(Accepted(99, "192.0.2.67"), _NOW)
    pings.handle(BytesReceived(99, echo.framed(untrusted[: datagrams.MAX_BYTES])), _NOW)
    for effect in pings.effects():
        if isinstance(effect, Dial):
            pings.handle(Connected(effect.conn, "192.0.2.13", "eth0"), _NOW)
            pings.handle(BytesReceived(effect.conn, echo.framed(untrusted[: datagrams.MAX_BYTES])), _NOW + 1.1)
    pings.handle(TimerDue(), _NOW + 9)
    peers = list(pings.peers.values())
    findings = [checks.finding_record(finding) for finding in path_checks.judge(pings, _FACTS)]
    _check("ping", job=None, rounds=1, peers=[checks.peer_record(peer) for peer in peers], findings=findings)
    assert all(printable(cell).isprintable() for peer in peers for row in checks.ping_rows(peer) for cell in row)
