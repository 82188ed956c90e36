"""The shared folders of one process. A thread of its own takes the turns in each.

An operation can block for as long as a server is silent, and nothing in Python ends it. So the threads hold nothing
that others wait for, and can be left behind.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial

from msgspec import Struct, structs

from mingle import detached
from mingle.network.folder import Folder, FolderProblem, FolderStorage, Found, Report, Sign, Survey
from mingle.wire import datagrams
from mingle.wire.datagrams import Datagram, Offer, Seek

EXAMINED_JOB = "mingle-discover doctor"
"""The job whose place in a folder `examine` uses; a job of this id would not be disturbed."""
EXAMINE_SECONDS = 0.02
"""How often `examine` looks for the result."""
BETWEEN_SECONDS = 2.0
"""The time between the first turns: a listing can come too late for the first one."""


class Folders:
    """What this process shows in its folders, and what it finds there.

    Args:
        storages: the folders, by the names that the user has given them; closed with this object.
        node: the key of this node.
        call: runs a function in the thread that owns this object.
        found: called in that thread with a folder and what a turn there has shown.
    """

    def __init__(
        self,
        storages: Mapping[str, FolderStorage],
        *,
        node: str,
        call: Callable[[Callable[[], None]], None],
        found: Callable[[str, Report], None],
    ) -> None:
        self._storages = storages
        self.open = bool(storages)
        """Whether there are folders, and this process has not left them."""
        self._node = digest(node)[:16]
        self._call = call
        self._found = found
        self.watching = False
        """Whether this process is an observer, which shows nothing."""
        self._visits: list[_Visit] = []
        self._shown: Datagram | None = None
        self._reports: dict[str, Report] = {}
        self._met: set[str] = set()
        """The folders in which another process was seen."""

    def show(self, message: Seek | Offer | None, encode: Callable[[Datagram], bytes]) -> None:
        """Have others find this message in the folders from now on; None: nothing."""
        if not self.open or self.watching or message == self._shown:
            return
        if message is None or self._shown is None or type(message) is not type(self._shown):
            self._reports.clear()  # they do not say whether the next sign is listed
        self._shown = message
        if message is not None and not self._visits:
            for url, storage in self._storages.items():
                folder = Folder(self._node, random.Random(), bucket=storage.bucket)
                self._visits.append(_Visit(url, folder, storage, partial(self._report, url)))
        for visit in self._visits:
            visit.show(None if message is None else sign_of(message, encode(message)))

    def watch(self, job: str | None) -> None:
        """Read what is shown in the folders, and show nothing, as observers do.

        Args:
            job: whose folder to read; None: those of all jobs.
        """
        self.watching = True
        for url, storage in self._storages.items():
            survey = Survey(None if job is None else digest(job)[:32], bucket=storage.bucket)
            self._visits.append(_Visit(url, survey, storage, partial(self._report, url)))
            self._visits[-1].show(Sign("s", b"", b""))

    def examine(self) -> None:
        """Show a sign that belongs to no job, and read all that lies in the folders, as `examined` does."""
        self.watching = True
        sign = Seek(job=EXAMINED_JOB, member=os.urandom(16), world_size=1, kind="observer")
        for url, storage in self._storages.items():
            examiner = _Examiner(self._node, bucket=storage.bucket)
            self._visits.append(_Visit(url, examiner, storage, partial(self._report, url)))
            self._visits[-1].show(sign_of(sign, datagrams.encode(sign)))

    def is_ours(self, found: Found) -> bool:
        """Return whether a process of this node has written an object."""
        return found.node == self._node

    def _report(self, url: str, report: Report) -> None:
        def take() -> None:
            if self.open:  # else this process has left the folders meanwhile
                self._reports[url] = report
                if report.listed and not report.alone:
                    self._met.add(url)
                self._found(url, report)

        self._call(take)

    @property
    def patience(self) -> float:
        """How many seconds the slowest folder can take for a turn."""
        return max((each.patience for each in self._storages.values()), default=0.0)

    @property
    def first_look_seconds(self) -> float:
        """The longest time until the folders show this process's own sign; 0: there are none."""
        return self.patience + BETWEEN_SECONDS if self._storages else 0.0

    @property
    def looked(self) -> bool:
        """Whether each folder has shown this process's sign, or has failed, so that it is no use to wait for it."""
        reports = self._reports.values()
        return len(reports) == len(self._storages) and all(each.listed or each.problem is not None for each in reports)

    @property
    def lower(self) -> bool:
        """Whether a process with a lower member id looks for a host in one of the folders as well."""
        return any(each.lower for each in self._reports.values())

    @property
    def works(self) -> bool:
        """Whether this process's sign is in one of the folders, so that no datagram is needed."""
        return not self.watching and any(each.listed for each in self._reports.values())

    @property
    def empty(self) -> list[str]:
        """The folders in which no other process was seen."""
        return [url for url, each in self._reports.items() if each.alone and url not in self._met]

    @property
    def seekers(self) -> dict[str, Collection[bytes]]:
        """The member ids of the processes that look for a host, by folder."""
        return {url: each.seekers for url, each in self._reports.items() if each.seekers}

    @property
    def problems(self) -> dict[str, FolderProblem]:
        """The folders that can't be used at present, each with the reason."""
        return {visit.url: problem for visit in self._visits if (problem := visit.problem) is not None}

    def leave(self) -> None:
        """Have the threads delete this process's objects and end; nothing is shown and found any more."""
        if not self.open:
            return
        self.open = False
        for visit in self._visits:
            visit.end()
        if not self._visits:
            close(self._storages)

    def close(self) -> None:
        """Leave, and wait a moment for that; a thread that is blocked is left behind."""
        now = time.monotonic()
        # A call that is blocked for as long already will not end in time for what is to be deleted.
        deadlines = [
            (now if visit.busy_since is None else visit.busy_since) + visit.storage.leave_seconds
            for visit in self._visits
        ]
        self.leave()
        for visit, deadline in zip(self._visits, deadlines, strict=True):
            visit.thread.join(max(0.0, deadline - time.monotonic()))
            if visit.thread.is_alive():
                visit.abort()


class Examined(Struct, frozen=True):
    """What a look into a folder has shown."""

    problem: FolderProblem | None
    """What is wrong with it; None: this process has written there, and has seen that."""
    others: int = 0
    """How many other nodes have left an object there that could be read."""
    age: float | None = None
    """The age of the newest of them in seconds; None: there is none, or the storage does not tell."""


def examine(urls: Sequence[str], node: str) -> dict[str, Examined]:
    """Look into folders as a process of a job does, and read what lies there.

    It takes as long as the slowest of them, a little more than its `patience` at most.
    """
    reports: dict[str, Report] = {}
    with examined(urls, node, reports.__setitem__) as folders:
        deadline = time.monotonic() + folders.patience + 1
        while not folders.looked and len(folders.problems) < len(urls) and time.monotonic() < deadline:
            time.sleep(EXAMINE_SECONDS)
        return {
            url: _judged(reports.get(url), folders.problems.get(url), ours=folders.is_ours)
            for url in dict.fromkeys(urls)
        }


@contextlib.contextmanager
def examined(
    urls: Sequence[str], node: str, found: Callable[[str, Report], None] = lambda *_: None
) -> Iterator[Folders]:
    """Show this process in folders, for other hosts to see, as `mingle-discover doctor` does."""
    folders = Folders(storages(urls, EXAMINED_JOB), node=node, call=lambda take: take(), found=found)
    try:
        folders.examine()
        yield folders
    finally:
        folders.close()


def _judged(report: Report | None, problem: FolderProblem | None, ours: Callable[[Found], bool]) -> Examined:
    others = [] if report is None else [each for each in report.found if not ours(each)]
    if problem is None and report is not None and report.unread:
        problem = FolderProblem(
            f"holds {report.unread[0]}, which this host can't read",
            "look at its permissions (umask): the user of the job must be able to read what every machine writes",
        )
    ages = [each.age for each in others if each.age is not None]
    return Examined(problem, len({each.node for each in others}), max(0.0, min(ages)) if ages else None)


class _Examiner:
    """Takes the turns of a process that looks for a host, and reads all that lies in the folder after each."""

    def __init__(self, node: str, *, bucket: bool) -> None:
        self._folder = Folder(node, random.Random(), bucket=bucket)
        self._survey = Survey(None, bucket=bucket)
        self.show, self.next_turn = self._folder.show, self._folder.next_turn

    def turn(self, storage: FolderStorage, now: float) -> Report:
        report = self._folder.turn(storage, now)
        if report.problem is not None or not report.listed:
            return report
        seen = self._survey.turn(storage, now)
        return structs.replace(seen, listed=True)


class _Visit:
    """A folder and the thread that takes the turns there."""

    def __init__(
        self, url: str, folder: Folder | Survey | _Examiner, storage: FolderStorage, report: Callable[[Report], None]
    ) -> None:
        self.url = url
        self._folder = folder
        self.storage = storage
        self._report = report
        self._problem: FolderProblem | None = None
        self.busy_since: float | None = None
        """When the turn began that has not ended; None: there is none."""
        self._signs: queue.SimpleQueue[Sign | _End | None] = queue.SimpleQueue()
        self.thread = detached.thread("folder", self._run)
        detached.start_explained(self.thread)

    def show(self, sign: Sign | None) -> None:
        self._signs.put(sign)

    def end(self) -> None:
        self._signs.put(_End())

    @property
    def problem(self) -> FolderProblem | None:
        busy_since, patience = self.busy_since, self.storage.patience
        if busy_since is not None and time.monotonic() - busy_since >= patience:
            return FolderProblem(
                # The same words at each look: the progress line names a cause that two looks have found.
                f"has not answered for more than {patience:g} s",
                "look whether its server is up and reachable from this machine"
                + (" (AWS_ENDPOINT_URL, HTTPS_PROXY)" if self.storage.bucket else ", for example with `ls`"),
            )
        return self._problem

    def abort(self) -> None:
        self.storage.abort()

    def _run(self) -> None:
        try:
            self._take_turns()
        finally:
            self.storage.close()
            self.storage.reap()

    def _take_turns(self) -> None:
        while True:
            due = self._folder.next_turn()
            try:
                sign = self._signs.get(timeout=None if due is None else max(0.0, due - time.monotonic()))
            except queue.Empty:
                self._turn()
                continue
            if isinstance(sign, _End):
                break
            self._folder.show(sign, time.monotonic())
        self._folder.show(None, time.monotonic())
        if self._folder.next_turn() is not None:
            self._turn()

    def _turn(self) -> None:
        self.busy_since = now = time.monotonic()
        try:
            report = self._folder.turn(self.storage, now)
        except Exception as error:
            problem = FolderProblem(f"can't be used ({type(error).__name__}: {error})", "report this as a defect")
            report = Report(problem=problem)
        self.busy_since, self._problem = None, report.problem
        self._report(report)


class _End:
    """Ends a thread, after its objects are deleted."""


def storages(urls: Iterable[str], job: str) -> dict[str, FolderStorage]:
    """Return where the objects of a job are in each folder. This can start processes, so no loop's thread calls it."""
    return {url: _storage(url, digest(job)[:32]) for url in urls}


def _storage(url: str, job: str) -> FolderStorage:
    # Most jobs have no folder, so its module is loaded here, which no loop's thread calls.
    if url.startswith("dir:"):
        from mingle.network.directory import Directory

        return Directory(url.removeprefix("dir:"), job)
    from mingle.network.bucket import Bucket, Helper

    return Bucket(Helper(url), job)


def close(storages: Mapping[str, FolderStorage]) -> None:
    """End what storages need that nothing uses any more; a second call does nothing."""
    for each in storages.values():
        each.close()


def digest(text: str) -> str:
    """Return the digest of a text, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def sign_of(message: Seek | Offer, data: bytes) -> Sign:
    """Return the sign that shows a message."""
    if isinstance(message, Seek):
        return Sign("s", message.member, data)
    open_to = (message.session, message.addresses, message.port, message.state, message.takes_members, message.quorum)
    return Sign("h", message.host, data, urgent=open_to, lasting=not message.takes_members)
