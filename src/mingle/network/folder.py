"""A shared folder: what one process writes, reads and deletes in it, and when. No file operation and no clock.

A folder is a directory that all machines mount, or a prefix in a bucket. The processes of a job that have no other way
to hear of each other leave objects there: a host its OFFER, a process without a host its SEEK. An OFFER leads to the
host's control port, so no datagram has to pass.

Shared storage shows changes late, in any order, and with other content than before: an NFS client caches directories
and files for up to a minute (nfs(5), "Data and metadata coherence"), and a bucket bills each request. So an object is
immutable, its name is never used twice, and no process reads a name again that it could decode.
"""

from __future__ import annotations

import contextlib
import math
import random
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Literal, Protocol, TypeAlias

from msgspec import Struct, structs

from mingle.wire import datagrams

FIRST_INTERVAL_SECONDS = 0.1
"""The time between the first two turns in a directory; it grows to `INTERVAL_SECONDS`."""
GROWTH = 1.6
INTERVAL_SECONDS = 1.0
BUCKET_INTERVAL_SECONDS = 2.0
"""The time between two turns in a bucket, whose requests cost money."""
PATIENT_AFTER_SECONDS = 60.0
PATIENT_INTERVAL_SECONDS = 5.0
"""The time between two turns of a process that has waited for `PATIENT_AFTER_SECONDS`."""
SEALED_INTERVAL_SECONDS = 30.0
"""The time between two turns of a host that takes no members."""
REWRITE_SECONDS = 15.0
"""The longest time for which an object of a process that looks for others keeps its name.

An NFS client reads a directory anew when it has changed the directory itself, and otherwise within a minute. So each
new name also makes the next listing a true one, and the first few names change sooner.
"""
LIVE_SECONDS = 20.0
"""A younger sign is the sign of a process that still looks for a host."""
BELIEVED_SECONDS = 120.0
"""An older object is the object of a process that was killed."""
LITTER_SECONDS = 600.0
"""An older object is deleted by each process that sees it."""
MAX_ENTRIES = 50_000
"""How many entries of a listing are looked at; strangers can create more."""
READS_PER_TURN = 500
"""How many objects are read in a turn: strangers can write more objects than a turn has time for."""
BUCKET_READS_PER_TURN = 20
READS_AGAIN_PER_TURN = 4
"""How many of the objects that could not be decoded are read again: their content may have been incomplete."""
SWEPT_PER_TURN = 100
BUCKET_SWEPT_PER_TURN = 4
"""How many objects of others are deleted in a turn: each can take as long as a request."""
SURVEYED_JOBS = 200
"""How many jobs an observer looks at."""
REMEMBERED_NAMES = 16
"""How many of its own names a process remembers: more than it uses in the time by which a listing can be late."""
_TRIED = 0
"""In the place of a listing's number: the object was read and could not be decoded."""

# The fields: what it is ("t" until its content is complete), the writer's node, its member id, and its number.
_NAME = re.compile(r"([hst])-([0-9a-f]{16})-([0-9a-f]{32})-([0-9]{1,12})")

_JOB = re.compile(r"[0-9a-f]{32}")

Kind: TypeAlias = Literal["h", "s"]
"""A host's OFFER, or the sign of a process that looks for a host."""


class Sign(Struct, frozen=True):
    """What a process wants others to find in the folder."""

    kind: Kind
    member: bytes
    data: bytes
    """The datagram."""
    urgent: object = None
    """When this changes, the object is written anew at once, otherwise with the next name."""
    lasting: bool = False
    """Whether the sign is of a host that takes no members, and so is not in a hurry."""


class Entry(Struct, frozen=True):
    """One object in a listing."""

    name: str
    time: float | None = None
    """When it was written, by the clock of the storage; None: the storage does not tell."""


class Found(Struct, frozen=True):
    """The content of a host's object."""

    data: bytes
    node: str
    """The key of the node that has written it."""
    age: float | None = None
    """How many seconds ago it was written, by the clock of the storage, as far as an observer can tell."""


class Report(Struct, frozen=True, kw_only=True):
    """What a turn has shown."""

    found: Sequence[Found] = ()
    listed: bool = False
    """Whether the listing contains this process's own sign, so that a sign that is not in it is later than ours."""
    lower: bool = False
    """Whether a process with a lower member id looks for a host as well."""
    seekers: Collection[bytes] = ()
    """The member ids of the other processes that look for a host."""
    alone: bool = False
    """Whether this process's own sign is the only one in the listing."""
    problem: FolderProblem | None = None
    """The first operation that failed."""
    unread: Sequence[str] = ()
    """For an observer: the objects that it is not allowed to read."""


class FolderProblem(Exception):
    """A folder can't be used: what was observed, and what to do.

    Args:
        what: the observation, without the folder's name.
        fix: what to do.
    """

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(what)
        self.what = what
        self.fix = fix


class OpenFolder(Protocol):
    """The operations in a folder, for one turn. Each raises `FolderProblem` when it fails."""

    def write(self, name: str, data: bytes) -> None:
        """Create an object of this name. Readers see all of it or nothing."""

    def list(self) -> list[Entry]:
        """Return the objects that can be one of ours: regular, and no longer than a datagram."""

    def read(self, name: str) -> bytes | None:
        """Return the content of an object, at most `MAX_BYTES`; None: it is gone, or no such object."""

    def delete(self, name: str) -> None:
        """Delete an object, if it is still there."""

    def tidy(self) -> None:
        """Delete what this process has created beside objects, if no other process uses it."""


class FolderStorage(Protocol):
    """Where the objects of one job are."""

    bucket: bool
    """Whether each operation is a request that is paid for."""
    patience: float
    """How many seconds a turn can take until the folder counts as one that does not answer."""
    leave_seconds: float
    """For how long the end of a process waits until its objects are deleted."""

    def jobs(self) -> list[str]:
        """Return the names of the folders of all jobs. It raises `FolderProblem` when it fails."""

    def of(self, job: str) -> FolderStorage:
        """Return the folder of another job, by its name."""

    def close(self) -> None:
        """Begin the end of what the storage needs beside this process; a blocked operation fails."""

    def reap(self) -> None:
        """Wait for the end that `close` has begun."""

    def abort(self) -> None:
        """End it at once, whatever it does."""

    def open(self, *, create: bool) -> AbstractContextManager[OpenFolder]:
        """Open the folder for a turn.

        Args:
            create: whether this process will write there.

        Raises:
            FolderProblem: it can't be opened.
        """


class _Own(Struct):
    """The object that this process has in the folder."""

    sign: Sign
    name: str
    rewrite_at: float


class Folder:
    """One process's part in one folder. The caller takes a turn whenever one is due.

    Args:
        node: the key of this node, 16 hexadecimal digits: loopback addresses are believed only from the same node.
        rng: makes the order of reading unpredictable for strangers.
        bucket: whether each operation is a request that is paid for.
    """

    def __init__(self, node: str, rng: random.Random, *, bucket: bool = False) -> None:
        self._node = node
        self._rng = rng
        self._bucket = bucket
        self._sign: Sign | None = None
        self._own: _Own | None = None
        self._earlier: list[str] = []
        """Earlier objects of this process, to be deleted once its present one is listed."""
        self._leftover: list[str] = []
        """Objects of this process that are to be deleted now."""
        self._written_at: dict[str, float] = {}
        """When this process wrote its last objects: a late listing contains the earlier ones."""
        self._number = 0
        self._began = 0.0
        self._interval = FIRST_INTERVAL_SECONDS
        self._rewrite_interval = INTERVAL_SECONDS
        self._due: float | None = None
        self._read: set[str] = set()
        """The names that were read and are not to be read again."""
        self._listings: dict[str, int] = {}
        """The names of hosts' objects that are listed now, each with the number of the listing in which it came."""
        self._listing = 0
        self._listed_at = -math.inf
        self._appeared: dict[str, float] = {}
        """Since when at the earliest each listed object is there: since the last listing without it."""
        self._backlog = False

    # --- when ------------------------------------------------------------------------------------------------------

    def show(self, sign: Sign | None, now: float) -> None:
        """Have others find this sign from now on; None: this process needs the folder no longer."""
        before, self._sign = self._sign, sign
        if sign is None:
            self._due = now if before is not None or self._own is not None else None
        elif before is None or before.kind != sign.kind or before.member != sign.member:
            # It begins to look for others, for the first time or because it has lost its session.
            self._began, self._interval = now, self._shortest
            # A bucket shows at once what was written, so new names have no listing to make true.
            self._rewrite_interval = REWRITE_SECONDS if self._bucket else INTERVAL_SECONDS
            self._due = now
        elif before.urgent != sign.urgent:
            self._due = now

    def next_turn(self) -> float | None:
        """Return when to take a turn; None: not before another sign is shown."""
        return self._due

    @property
    def _shortest(self) -> float:
        return BUCKET_INTERVAL_SECONDS if self._bucket else FIRST_INTERVAL_SECONDS

    def _schedule(self, now: float) -> None:
        if self._sign is None:
            # What could not be deleted is tried again with the next sign, or by others when it is litter.
            self._due = None
        elif self._backlog:
            self._due = now + self._shortest
        elif self._sign.lasting:
            self._due = now + SEALED_INTERVAL_SECONDS
        elif now >= self._began + PATIENT_AFTER_SECONDS:
            self._due = now + PATIENT_INTERVAL_SECONDS * self._rng.uniform(0.75, 1.25)
        else:
            self._due = now + self._interval * self._rng.uniform(0.75, 1.25)
            longest = BUCKET_INTERVAL_SECONDS if self._bucket else INTERVAL_SECONDS
            self._interval = min(self._interval * GROWTH, longest)

    # --- a turn ----------------------------------------------------------------------------------------------------

    def turn(self, storage: FolderStorage, now: float) -> Report:
        """Write, list, read what is new, and delete what is old, in this order."""
        self._schedule(now)
        try:
            with storage.open(create=self._sign is not None) as folder:
                if self._sign is None:
                    return self._leave(folder)
                return self._look(folder, self._sign, now)
        except FolderProblem as problem:
            return Report(problem=problem)

    def _leave(self, folder: OpenFolder) -> Report:
        self._retire()
        self._earlier, self._leftover = [], self._leftover + self._earlier
        self._delete_leftover(folder)
        folder.tidy()
        self._read.clear()
        self._listings.clear()
        return Report()

    def _look(self, folder: OpenFolder, sign: Sign, now: float) -> Report:
        problem = None
        try:
            self._write(folder, sign, now)
        except FolderProblem as failure:
            problem = failure  # a process that can only read still finds a host
        entries = folder.list()
        came, self._listed_at = self._listed_at, now
        self._appeared = {each.name: self._appeared.get(each.name, came) for each in entries}
        self._give_up_earlier({each.name for each in entries})
        try:
            self._delete_leftover(folder)
        except FolderProblem as failure:
            problem = problem or failure
        present = self._present(entries, now)
        # Some file systems stamp an object by the clock of the machine that writes it, and that can be hours behind.
        ages = {each.name: min(_age(each, present), now - self._appeared[each.name]) for each in entries}
        found = self._read_new(folder, sign, ages)
        self._sweep(folder, ages)
        listed = any(each.name.startswith(self._name_of(sign)) for each in entries)
        living = [each for name, age in ages.items() for each in _living(name, age) if each[1] != sign.member]
        seekers = {member for kind, member in living if kind == "s"}
        return Report(
            found=found,
            listed=listed,
            lower=any(member < sign.member for member in seekers),
            seekers=seekers,
            alone=listed and not living,
            problem=problem,
        )

    def _write(self, folder: OpenFolder, sign: Sign, now: float) -> None:
        own = self._own
        unchanged = own is not None and own.sign.kind == sign.kind and own.sign.urgent == sign.urgent
        if own is not None and unchanged and own.sign.member == sign.member and now < own.rewrite_at:
            return
        self._number += 1
        name = f"{self._name_of(sign)}{self._number}"
        folder.write(name, sign.data)
        self._retire()
        longest = SEALED_INTERVAL_SECONDS if sign.lasting else REWRITE_SECONDS
        self._written_at[name] = now
        if len(self._written_at) > REMEMBERED_NAMES:
            del self._written_at[next(iter(self._written_at))]
        self._own = _Own(sign, name, now + min(self._rewrite_interval, longest))
        self._rewrite_interval = min(2 * self._rewrite_interval, REWRITE_SECONDS)

    def _give_up_earlier(self, listed: Collection[str]) -> None:
        """Have the objects deleted that are older than one that is listed: where listings are late, others need it."""
        own = [*self._earlier, *([] if self._own is None else [self._own.name])]
        newest = max((position for position, name in enumerate(own) if name in listed), default=0)
        self._leftover += self._earlier[:newest]
        del self._earlier[:newest]

    def _name_of(self, sign: Sign) -> str:
        """Return the names of a sign's objects without their numbers."""
        return f"{sign.kind}-{self._node}-{sign.member.hex()}-"

    def _retire(self) -> None:
        if self._own is not None:
            self._earlier.append(self._own.name)
            self._own = None

    def _delete_leftover(self, folder: OpenFolder) -> None:
        while self._leftover:
            folder.delete(self._leftover[0])
            del self._leftover[0]

    # --- what others have written ----------------------------------------------------------------------------------

    def _present(self, entries: Sequence[Entry], now: float) -> float | None:
        """Return the present time by the clock of the storage; None: the storage does not tell, or not yet."""
        for each in entries:
            if each.time is not None and each.name in self._written_at:
                return each.time + (now - self._written_at[each.name])
        return None

    def _read_new(self, folder: OpenFolder, sign: Sign, ages: Mapping[str, float]) -> list[Found]:
        names = {}
        for name, age in ages.items():
            parsed = _NAME.fullmatch(name)
            if parsed and parsed[1] == "h" and parsed[3] != sign.member.hex() and age < BELIEVED_SECONDS:
                names[name] = parsed[2]
        self._listing += 1
        self._listings = {name: self._listings.get(name, self._listing) for name in names}
        self._read &= names.keys()
        # A host changes its name again and again, so its object is among the newest names: a stranger who fills the
        # folder delays it by no more than that.
        new = [name for name in names if name not in self._read and self._listings[name] != _TRIED]
        new.sort(key=lambda name: (-self._listings[name], self._rng.random()))
        most = BUCKET_READS_PER_TURN if self._bucket else READS_PER_TURN
        self._backlog = len(new) > most
        tried = [name for name in names if name not in self._read and self._listings[name] == _TRIED]
        again = self._rng.sample(tried, min(len(tried), READS_AGAIN_PER_TURN))
        found = []
        for name in new[:most] + again:
            data = folder.read(name)
            if data is not None and _decodes(data):
                self._read.add(name)
                found.append(Found(data, names[name]))
            else:
                self._listings[name] = _TRIED
        return found

    def _sweep(self, folder: OpenFolder, ages: Mapping[str, float]) -> None:
        """Delete the objects of processes that were killed long ago, if this process can."""
        litter = [name for name, age in ages.items() if _NAME.fullmatch(name) and age > LITTER_SECONDS]
        most = BUCKET_SWEPT_PER_TURN if self._bucket else SWEPT_PER_TURN
        # By chance, so that processes which see the same objects share the work.
        for name in self._rng.sample(litter, min(len(litter), most)):
            with contextlib.suppress(FolderProblem):
                folder.delete(name)


class Survey:
    """What an observer reads in the folders of all jobs, or of one. It writes and deletes nothing.

    Args:
        job: the name of the job's folder; None: those of all jobs.
        bucket: whether each operation is a request that is paid for.
    """

    def __init__(self, job: str | None, *, bucket: bool = False) -> None:
        self._job = job
        self._interval = BUCKET_INTERVAL_SECONDS if bucket else INTERVAL_SECONDS
        self._due: float | None = None
        self._found: dict[tuple[str, str], Found | None] = {}
        """What the objects say that are there now, by job and name; None: it could not be decoded."""
        self._newest: tuple[float, float] | None = None
        """The time of the newest object by the clock of the storage, and the time at which it was listed."""

    def show(self, sign: Sign | None, now: float) -> None:
        """Begin, or end for None: an observer shows nothing."""
        self._due = None if sign is None else now

    def next_turn(self) -> float | None:
        """Return when to take a turn; None: not any more."""
        return self._due

    def turn(self, storage: FolderStorage, now: float) -> Report:
        """List the objects, and read those that are new. Each turn reports all that are there."""
        self._due = now + self._interval
        found: dict[tuple[str, str], Found | None] = {}
        times: dict[tuple[str, str], float | None] = {}
        unread: list[str] = []
        try:
            jobs = storage.jobs() if self._job is None else [self._job]
        except FolderProblem as problem:
            return Report(problem=problem)
        surveyed = [each for each in jobs if _JOB.fullmatch(each)][:SURVEYED_JOBS]
        failures: list[FolderProblem] = []
        for job in surveyed:
            try:
                with storage.of(job).open(create=False) as folder:
                    entries = folder.list()
                    self._note_times(entries, now)
                    for each in entries:
                        if self._counts(each, now) and len(found) < READS_PER_TURN:
                            key = job, each.name
                            times[key] = each.time
                            data = folder.read(each.name) if (known := self._found.get(key)) is None else known.data
                            unread += [each.name] if data is None else []
                            whole = data is not None and _decodes(data)
                            found[key] = Found(data, each.name.split("-")[1]) if data is not None and whole else None
            except FolderProblem as problem:
                failures.append(problem)  # another user's job can be closed to this one
        if failures and len(failures) == len(surveyed):
            return Report(problem=failures[0])
        self._found = found
        aged = [
            structs.replace(each, age=None if (time := times[key]) is None else self._present(now) - time)
            for key, each in found.items()
            if each is not None
        ]
        return Report(found=aged, listed=True, unread=unread)

    def _note_times(self, entries: Sequence[Entry], now: float) -> None:
        for each in entries:
            if each.time is not None and (self._newest is None or each.time > self._newest[0]):
                self._newest = each.time, now

    def _counts(self, entry: Entry, now: float) -> bool:
        """Return whether an object is that of a process that lives, as far as the times of others tell."""
        parsed = _NAME.fullmatch(entry.name)
        if parsed is None or parsed[1] == "t":
            return False
        return _age(entry, self._present(now)) < (BELIEVED_SECONDS if parsed[1] == "h" else LIVE_SECONDS)

    def _present(self, now: float) -> float:
        """Return the present time of the storage, which an observer learns only from the newest object."""
        return 0.0 if self._newest is None else self._newest[0] + now - self._newest[1]


def _living(name: str, age: float) -> list[tuple[str, bytes]]:
    """Return the kind of an object and its writer's member id, if it can be the sign of a process that lives."""
    parsed = _NAME.fullmatch(name)
    if parsed is None or age >= {"h": BELIEVED_SECONDS, "s": LIVE_SECONDS}.get(parsed[1], 0.0):
        return []
    return [(parsed[1], bytes.fromhex(parsed[3]))]


def _age(entry: Entry, present: float | None) -> float:
    """Return the age of an object in seconds; one of unknown age is new."""
    return 0.0 if entry.time is None or present is None else present - entry.time


def _decodes(untrusted: bytes) -> bool:
    """Return whether the content of an object is complete; what it says is judged elsewhere."""
    try:
        datagrams.decode(untrusted)
    except datagrams.Rejected:
        return False
    return True
