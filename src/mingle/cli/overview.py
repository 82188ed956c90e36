"""The jobs that were seen, as records of JSON and as rows of a table: what ``list``, ``watch`` and ``find`` share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from mingle.cli.output import Sheet

if TYPE_CHECKING:
    from mingle.observe.sighting import Seeking, Sighting, Target

COLUMNS = ("JOB", "STATE", "HOST", "ADDRESS", "JOINED", "MISSING", "SEEKING", "SECRET")


def records(sessions: Iterable[Sighting], seekers: Iterable[Seeking]) -> list[dict[str, Any]]:
    """Returns one record per session, by job; one without a host where there are only seekers."""
    seeking: dict[str, list[Seeking]] = {}
    for each in seekers:
        seeking.setdefault(each.seek.job, []).append(each)
    sightings: dict[str, list[Sighting]] = {job: [] for job in seeking}
    for sighting in sessions:
        sightings.setdefault(sighting.offer.job, []).append(sighting)
    return [each for job in sorted(sightings) for each in _of_job(sightings[job], seeking.get(job, ()), job)]


def _of_job(sightings: Sequence[Sighting], seekers: Sequence[Seeking], job: str) -> list[dict[str, Any]]:
    """Returns one record per session of a job; one without a host where there are only seekers."""
    from mingle.observe.sighting import ranks_seeking

    seeking = [
        {
            "rank": each.seek.rank,
            "hostname": each.seek.hostname,
            "pid": each.seek.pid,
            "address": each.address,
        }
        for each in ranks_seeking(seekers, sightings)
    ]
    if not sightings:
        sizes = {each.seek.world_size for each in seekers}
        return [
            {
                "job": job,
                "kind": "ranks",
                "state": "seeking",
                "session": None,
                "host": None,
                "address": None,
                "port": None,
                "endpoint": None,
                "world_size": sizes.pop() if len(sizes) == 1 else None,
                "joined": 0,
                "missing": [],
                "seeking": seeking,
                "secret": any(each.signed for each in seekers),
                "proved": False,
                "problem": None,
                "seconds": None,
            }
        ]
    return [{**record(sighting), "seeking": seeking} for sighting in sightings]


def record(sighting: Sighting, target: Target | None = None) -> dict[str, Any]:
    """Return a session's JSON record; its address is the target's, else the one at which the session is reached."""
    running, offer, host = sighting.running, sighting.offer, sighting.host()
    target = target or (sighting.target() if sighting.alive else None)
    announced = offer.kind == "announcement"
    world_size = offer.world_size if running is None else running.world_size
    return {
        "job": offer.job,
        "kind": offer.kind,
        "state": offer.state if running is None else running.state,
        "session": offer.session.hex(),
        "host": {"hostname": host.hostname, "pid": host.pid, "address": host.address, "rank": host.rank},
        "address": offer.addresses[0] if target is None else target.address,
        "port": offer.port if target is None else target.port,
        "endpoint": "control" if target is None else target.kind,
        # An announcement need not say how many ranks there are, and knows nothing of who has joined.
        "world_size": None if announced and world_size == 1 else world_size,
        "joined": None if announced else sighting.joined,
        "missing": [] if running is None else list(running.missing),
        "secret": sighting.signed,
        "proved": sighting.alive,
        "problem": sighting.problem or None,
        "seconds": None if running is None else round(running.seconds, 3),
    }


def row(record: dict[str, Any]) -> tuple[str, ...]:
    """Returns a record as it stands in a table."""
    from mingle.observe.sighting import endpoint_text
    from mingle.protocol.reports import ranks_text

    state = "announced" if record["kind"] == "announcement" else record["state"]
    if not record["proved"] and record["host"] is not None:
        state += ", not proved"
    size = "?" if record["world_size"] is None else record["world_size"]
    return (
        record["job"],
        state,
        "-" if record["host"] is None else f"{record['host']['hostname'] or 'unknown'} pid {record['host']['pid']}",
        "-" if record["address"] is None else endpoint_text(record["address"], record["port"]),
        "-" if record["joined"] is None else f"{record['joined']}/{size}",
        ranks_text(record["missing"]) if record["missing"] else "-",
        "; ".join(map(_seeking_text, record["seeking"])) or "-",
        "secret" if record["secret"] else "-",
    )


def jobs_sheet(records: Iterable[dict[str, Any]], *, wide: bool) -> Sheet:
    """Return the table for a terminal."""
    return Sheet(COLUMNS, [row(each) for each in records], prose="SEEKING", wide=wide)


def _seeking_text(seeker: dict[str, Any]) -> str:
    who = "a process" if seeker["rank"] is None else f"rank {seeker['rank']}"
    return f"{who} on {seeker['hostname'] or 'unknown'} pid {seeker['pid']}"
