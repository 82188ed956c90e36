"""What a process writes, reads and deletes in a shared folder, and when: on storage and a clock of the test's own."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from operator import sub

import pytest
from msgspec import structs

from mingle.network.folder import (
    BELIEVED_SECONDS,
    BUCKET_INTERVAL_SECONDS,
    BUCKET_SWEPT_PER_TURN,
    INTERVAL_SECONDS,
    LITTER_SECONDS,
    LIVE_SECONDS,
    PATIENT_INTERVAL_SECONDS,
    READS_PER_TURN,
    SURVEYED_JOBS,
    SWEPT_PER_TURN,
    Entry,
    Folder,
    FolderProblem,
    Report,
    Sign,
    Survey,
)
from mingle.wire import datagrams
from mingle.wire.datagrams import Offer

NODE = "a" * 16


def member_id(number: int) -> bytes:
    return number.to_bytes(16, "big")


def offer_of(member: bytes, state: str = "open") -> bytes:
    """Return the OFFER of a host."""
    offer = Offer(job="job", session=bytes(16), host=member, addresses=("10.0.0.1",), port=5000, world_size=4, joined=1)
    return datagrams.encode(structs.replace(offer, state=state))


def object_name(kind: str, number: int) -> str:
    """Return the name of an object of a process."""
    return f"{kind}-{NODE}-{member_id(number).hex()}-1"


class Shared:
    """The storage itself: each object with the time at which it was written."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.objects: dict[str, tuple[bytes, float]] = {}
        self.deleted: dict[str, tuple[float, float]] = {}
        """When each deleted object was written and deleted."""
        self.names_used: set[str] = set()

    def put(self, name: str, data: bytes = b"", *, age: float = 0.0) -> None:
        self.objects[name] = data, self.now - age

    def put_of(self, kind: str, number: int, *, age: float = 0.0) -> str:
        """Put the object of a process; return its name."""
        name = object_name(kind, number)
        self.put(name, offer_of(member_id(number)), age=age)
        return name


@pytest.fixture
def shared() -> Shared:
    return Shared()


class Client:
    """One machine's view of the storage.

    Args:
        shared: the storage.
        lag: for how long a change by others is not seen, unless this machine has changed the folder itself since.
        own_lag: the age of what this machine sees, its own changes included.
        empty_first: whether an object that was written less than a second ago has no content yet.
        behind: by how much the clock of this machine is behind, which stamps what it writes.
    """

    def __init__(
        self,
        shared: Shared,
        *,
        lag: float = 0.0,
        own_lag: float = 0.0,
        empty_first: bool = False,
        times: bool = True,
        behind: float = 0.0,
    ) -> None:
        self.shared = shared
        self.behind = behind
        self.lag, self.own_lag, self.empty_first, self.times = lag, own_lag, empty_first, times
        self.failing = ""
        self.hidden: set[str] = set()
        self.left_at_tidying = -1
        self.requests: Counter[str] = Counter()
        self.reads: Counter[str] = Counter()
        self.rng = random.Random(1)
        self._cached: list[Entry] = []
        self._cached_at = float("-inf")

    @contextlib.contextmanager
    def open(self, *, create: bool) -> Iterator[Client]:
        self._do("open")
        yield self

    def _do(self, operation: str) -> None:
        self.requests[operation] += 1
        if operation in self.failing.split():
            raise FolderProblem(f"{operation} failed", "fix it")

    def write(self, name: str, data: bytes) -> None:
        self._do("write")
        assert name not in self.shared.names_used
        self.shared.names_used.add(name)
        self.shared.put(name, data, age=self.behind)
        self._cached_at = float("-inf")

    def list(self) -> list[Entry]:
        self._do("list")
        if self.shared.now >= self._cached_at + self.lag:
            self._cached_at = self.shared.now
            self._cached = [
                Entry(name, time if self.times else None)
                for name, (_, time) in self.shared.objects.items()
                if time <= self.shared.now - self.own_lag
            ] + [
                Entry(name, time)
                for name, (time, end) in self.shared.deleted.items()
                if time <= self.shared.now - self.own_lag < end
            ]
        self.rng.shuffle(self._cached)
        return list(self._cached)

    def read(self, name: str) -> bytes | None:
        self._do("read")
        self.reads[name] += 1
        data, time = self.shared.objects.get(name, (None, 0.0))
        data = None if name in self.hidden else data
        return b"" if self.empty_first and data and self.shared.now < time + 1 else data

    def delete(self, name: str) -> None:
        self._do("delete")
        if name in self.shared.objects:
            self.shared.deleted[name] = self.shared.objects.pop(name)[1], self.shared.now
        self._cached_at = float("-inf")

    def tidy(self) -> None:
        self._do("tidy")
        self.left_at_tidying = len(self.shared.objects)


class Process:
    """A process with a folder, which takes a turn whenever one is due."""

    def __init__(self, client: Client, number: int, *, host: bool = False, bucket: bool = False) -> None:
        self.client = client
        self.member = member_id(number)
        self.folder = Folder(NODE, random.Random(number), bucket=bucket)
        self.reports: list[Report] = []
        self.found_at: dict[bytes, float] = {}
        self.show(host=host)

    def show(self, *, host: bool = False, urgent: object = None, lasting: bool = False) -> None:
        data = offer_of(self.member) if host else b"sign"
        sign = Sign("h" if host else "s", self.member, data, urgent=urgent, lasting=lasting)
        self.folder.show(sign, self.client.shared.now)

    def leave(self) -> None:
        self.folder.show(None, self.client.shared.now)

    def act(self) -> None:
        due = self.folder.next_turn()
        if due is not None and due <= self.client.shared.now:
            report = self.folder.turn(self.client, self.client.shared.now)  # type: ignore[arg-type]
            self.reports.append(report)
            for found in report.found:
                message = datagrams.decode(found.data)
                assert isinstance(message, Offer)
                self.found_at.setdefault(message.host, self.client.shared.now)


def run(seconds: float, *processes: Process) -> None:
    """Let time pass, in which each process takes its turns."""
    shared = processes[0].client.shared
    end = shared.now + seconds
    while True:
        for process in processes:
            process.act()
        due = [time for process in processes if (time := process.folder.next_turn()) is not None]
        if min(due, default=end) >= end:
            break
        shared.now = max(shared.now, min(due))
    shared.now = end


# --- hearing of a host --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "seconds", "lag", "within"),
    [
        pytest.param("host", 5.0, 0.0, 0.1, id="that was there, in the first turn"),
        # The seeker's own new names make each of its first listings a true one.
        *(pytest.param("seeker", 0.5, lag, 3.0, id=f"in listings that are {lag:g} s late") for lag in (0, 3, 30, 60)),
        pytest.param("seeker", 300.0, 60.0, 25.0, id="after minutes, when the seeker renews its sign"),
    ],
)
def test_host_is_found_in_late_listings(shared: Shared, first: str, seconds: float, lag: float, within: float) -> None:
    made = {}
    for role in ("host", "seeker") if first == "host" else ("seeker", "host"):
        made[role] = Process(Client(shared, lag=lag), 1 if role == "host" else 2, host=role == "host")
        if role == first:
            run(seconds, made[role])
    met = shared.now
    run(30.0, *made.values())
    assert made["seeker"].found_at[made["host"].member] <= met + within
    assert not made["host"].client.reads, "no process reads its own object"


def test_an_object_without_content_is_read_again_and_one_with_content_never(shared: Shared) -> None:
    host = Process(Client(shared), 1, host=True)
    seeker = Process(Client(shared, empty_first=True), 2)
    run(60.0, host, seeker)
    assert host.member in seeker.found_at
    # The host's name changes some seven times in a minute. Each is read until it decodes.
    assert max(seeker.client.reads.values()) <= 6
    assert not [name for name in seeker.client.reads if name.startswith("s-")]


# --- the election ----------------------------------------------------------------------------------------------------


def test_listings_that_are_a_minute_late_count_for_the_election_and_for_a_host_once_they_come(shared: Shared) -> None:
    host, seeker = (Process(Client(shared, own_lag=60.0), number, host=number == 1) for number in (1, 2))
    run(59.0, host, seeker)
    assert not any(report.listed for report in seeker.reports)
    run(16.0, host, seeker)
    assert seeker.reports[-1].listed
    # Its names change meanwhile, and each of them stays until a later one is listed.
    assert host.member in seeker.found_at
    run(200.0, host, seeker)
    assert len(shared.objects) <= 14


@pytest.mark.parametrize("behind", [0.0, LIVE_SECONDS + 60])
def test_only_a_lower_living_sign_delays_whatever_clock_stamps_it(shared: Shared, behind: float) -> None:
    higher, lower = Process(Client(shared), 2), Process(Client(shared, behind=behind), 1)
    run(2.0, higher)
    run(2.0, higher, lower)
    assert higher.reports[-1].lower
    assert not lower.reports[-1].lower
    run(30.0, higher)  # the lower one was killed
    assert not higher.reports[-1].lower


# --- names, times and litter ------------------------------------------------------------------------------------------


def test_new_content_has_a_new_name_and_the_old_one_goes(shared: Shared) -> None:
    host = Process(Client(shared), 1, host=True)
    run(1.0, host)
    for urgent in ("full", "not full"):
        host.show(host=True, urgent=urgent)
        run(0.1, host)
    assert len(shared.objects) == 1
    assert len(shared.names_used) >= 3


def test_a_process_has_one_object_and_renews_it_every_fifteen_seconds(shared: Shared) -> None:
    seeker = Process(Client(shared), 1)
    run(60.0, seeker)
    before = len(shared.names_used)
    ages = []
    for _ in range(200):
        run(1.0, seeker)
        assert len(shared.objects) == 1
        ages.append(shared.now - next(iter(shared.objects.values()))[1])
    assert max(ages) <= 15 + 5 * 1.25 + 0.1  # a process that has waited takes a turn every 5 s
    assert len(shared.names_used) - before <= 200 / 14


@pytest.mark.parametrize("now", [1000.0, 5e9])
def test_old_objects_are_not_believed_and_litter_goes_by_the_storages_clock_alone(shared: Shared, now: float) -> None:
    shared.now = now
    old = shared.put_of("h", 7, age=BELIEVED_SECONDS + 5)
    litter = {shared.put_of(kind, 8, age=LITTER_SECONDS + 5) for kind in "hst"}
    strangers = {"README", f"h-{NODE}-{member_id(9).hex()}", "h-", ".nfs0001"}
    for each in strangers:
        shared.put(each, offer_of(member_id(8)), age=LITTER_SECONDS + 5)
    host, seeker = Process(Client(shared), 1, host=True), Process(Client(shared), 2)
    run(5.0, host, seeker)
    assert set(seeker.found_at) == {host.member}
    assert not litter & shared.objects.keys()
    assert {old, *strangers} <= shared.objects.keys()


@pytest.mark.parametrize(("bucket", "most"), [(False, SWEPT_PER_TURN), (True, BUCKET_SWEPT_PER_TURN)])
def test_litter_is_deleted_bit_by_bit_while_a_host_is_found(shared: Shared, *, bucket: bool, most: int) -> None:
    for number in range(1_000):
        shared.put_of("s", number, age=LITTER_SECONDS + 5)
    host, seeker = Process(Client(shared), 2_000, host=True), Process(Client(shared), 2_001, bucket=bucket)
    while not seeker.found_at:
        run(0.1, host, seeker)
    turns = len(seeker.reports)
    assert 0 < seeker.client.requests["delete"] <= most * turns
    assert turns < 5


@pytest.mark.parametrize("behind", [BELIEVED_SECONDS + 30, LITTER_SECONDS + 3600])
@pytest.mark.parametrize("first", ["host", "seeker"])
def test_host_is_found_whose_own_clock_stamps_and_is_behind(shared: Shared, first: str, behind: float) -> None:
    host, seeker = Process(Client(shared, behind=behind), 1, host=True), Process(Client(shared), 2)
    run(5.0, host if first == "host" else seeker)
    run(16.0, host, seeker)  # until it renews the object that was there before the seeker
    assert host.member in seeker.found_at
    listed = [name for name in shared.objects if name.startswith("h-")]
    run(60.0, host, seeker)
    assert listed, "nobody has deleted the object of a process that renews it"
    assert not shared.objects.keys() & set(listed), "and it is renewed as ever"


def test_old_objects_stay_old_for_a_process_that_has_not_looked_for_long(shared: Shared) -> None:
    """It has a session and loses it: what came meanwhile is as old as the storage says."""
    seeker = Process(Client(shared), 2)
    run(5.0, seeker)
    seeker.leave()
    run(1.0, seeker)
    name = shared.put_of("h", 7)
    shared.now += LITTER_SECONDS + 60
    seeker.show()
    run(5.0, seeker)
    assert not seeker.found_at
    assert name not in shared.objects, "deleted as litter"


def test_without_times_objects_are_believed_and_not_deleted(shared: Shared) -> None:
    name = shared.put_of("h", 7, age=1e6)
    seeker = Process(Client(shared, times=False), 2)
    run(2.0, seeker)
    assert member_id(7) in seeker.found_at
    assert name in shared.objects


def test_leaving_process_deletes_its_object(shared: Shared) -> None:
    seeker = Process(Client(shared), 2)
    run(3.0, seeker)
    seeker.leave()
    run(1.0, seeker)
    assert not shared.objects
    assert seeker.client.requests["tidy"] == 1
    assert seeker.client.left_at_tidying == 0, "a directory that is not empty can't be deleted"
    assert seeker.folder.next_turn() is None


def test_failed_deletion_is_repeated(shared: Shared) -> None:
    host = Process(Client(shared), 2, host=True)
    run(0.5, host)
    host.client.failing = "delete"
    run(20.0, host)
    assert len(shared.objects) > 1
    host.client.failing = "write delete"
    run(20.0, host)
    problem = host.reports[-1].problem
    assert problem is not None
    assert problem.what == "write failed", "without it there would be nothing to delete"
    host.client.failing = ""
    run(2.0, host)
    assert len(shared.objects) == 1


def test_a_process_that_looks_again_finds_the_host_that_it_found_before(shared: Shared) -> None:
    host, seeker = Process(Client(shared), 1, host=True), Process(Client(shared), 2)
    host.show(host=True, lasting=True)
    run(2.0, host, seeker)
    seeker.leave()
    run(1.0, host, seeker)
    assert seeker.found_at.pop(host.member)
    seeker.show()
    run(2.0, host, seeker)
    assert host.member in seeker.found_at


# --- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["open", "list", "write"])
def test_failure_is_reported_and_tried_again_and_without_writing_a_host_is_found(
    shared: Shared, operation: str
) -> None:
    host, seeker = Process(Client(shared), 1, host=True), Process(Client(shared), 2)
    seeker.client.failing = operation
    run(5.0, host, seeker)
    assert all(report.problem is not None and not report.listed for report in seeker.reports)
    assert (host.member in seeker.found_at) is (operation == "write")
    seeker.client.failing = ""
    run(2.0, host, seeker)
    assert (seeker.reports[-1].problem, seeker.reports[-1].listed) == (None, True)
    assert host.member in seeker.found_at


def test_others_litter_that_cannot_be_deleted_is_no_failure(shared: Shared) -> None:
    shared.put_of("h", 7, age=LITTER_SECONDS + 5)
    seeker = Process(Client(shared), 2)
    run(0.06, seeker)
    seeker.client.failing = "delete"
    run(0.5, seeker)
    assert seeker.reports[-1].problem is None


# --- strangers and crowds --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [*(pytest.param(each, marks=pytest.mark.slow) for each in (b"", b"\0" * 1200)), offer_of(member_id(99))],
    ids=["empty", "zeros", "an offer"],
)
@pytest.mark.parametrize("bucket", [False, True])
def test_a_strangers_objects_delay_a_host_by_one_renewal(shared: Shared, content: bytes, bucket: bool) -> None:
    for number in range(2_000):
        shared.put(f"h-{NODE}-{member_id(1000 + number).hex()}-1", content)
    host = Process(Client(shared), 1, host=True, bucket=bucket)
    seeker = Process(Client(shared), 2, bucket=bucket)
    # Their first listing is the first of all these names, so the host is found by its second one.
    run(20.0, host, seeker)
    assert seeker.found_at[host.member] < 1000.0 + (18.0 if bucket else 2.0)
    assert max(Counter(seeker.client.reads).values()) < 30
    assert seeker.client.requests["read"] < 2_000 + 20 * 10 + READS_PER_TURN


def test_a_crowd_of_objects_is_read_without_the_pauses_of_a_patient_process(shared: Shared) -> None:
    seeker = Process(Client(shared), 2)
    run(100.0, seeker)
    for number in range(4 * READS_PER_TURN):
        shared.put_of("h", 1000 + number)
    run(PATIENT_INTERVAL_SECONDS * 1.25 + 1.0, seeker)
    assert len(seeker.found_at) == 4 * READS_PER_TURN


def test_many_waiting_processes_read_nothing_twice(shared: Shared) -> None:
    waiters = [Process(Client(shared), 2 + number) for number in range(40)]
    host = Process(Client(shared), 1, host=True)
    run(60.0, host, *waiters)
    assert all(host.member in waiter.found_at for waiter in waiters)
    names = sum(1 for name in shared.names_used if name.startswith("h-"))
    assert all(waiter.client.requests["read"] <= names for waiter in waiters)


def test_a_host_that_takes_no_members_is_quiet(shared: Shared) -> None:
    host = Process(Client(shared), 1, host=True)
    run(5.0, host)
    host.show(host=True, urgent="sealed", lasting=True)
    host.client.requests.clear()
    run(600.0, host)
    assert host.client.requests["list"] <= 21
    assert len(shared.objects) == 1
    ((_, written),) = shared.objects.values()
    assert shared.now - written <= BELIEVED_SECONDS / 2


# --- an observer ----------------------------------------------------------------------------------------------------

JOBS = ("1" * 32, "2" * 32)


class Place:
    """The folders of several jobs, as an observer sees them."""

    def __init__(self, **clients: Client) -> None:
        self.clients = {job[1:]: client for job, client in clients.items()}
        self.opened: Counter[str] = Counter()

    def jobs(self) -> list[str]:
        return [*self.clients, "not a job", "lost+found"]

    def of(self, job: str) -> Client:
        self.opened[job] += 1
        return self.clients[job]


def place(*shared: Shared) -> Place:
    return Place(**{f"_{job}": Client(each) for job, each in zip(JOBS, shared, strict=True)})


@pytest.fixture
def both(shared: Shared) -> Place:
    """The folders of two jobs; that of the first one is `shared`."""
    return place(shared, Shared())


def survey(place: Place, now: float, job: str | None = None, seen: Survey | None = None) -> list[int]:
    """Return the numbers of the processes whose objects an observer reports."""
    seen = seen or Survey(job)
    report = seen.turn(place, now)  # type: ignore[arg-type]
    assert report.listed
    return sorted(int.from_bytes(datagrams.decode(each.data).host, "big") for each in report.found)  # type: ignore[union-attr]


@pytest.mark.parametrize(("job", "found"), [(None, [1, 2, 3]), (JOBS[0], [1, 2])])
def test_an_observer_reads_all_jobs_or_one_and_writes_nothing(
    shared: Shared, job: str | None, found: list[int]
) -> None:
    second = Shared()
    for kind, number in (("h", 1), ("s", 2), ("t", 4)):  # the writer of the last one has not renamed it yet
        shared.put_of(kind, number)
    second.put_of("h", 3)
    before = shared.objects | second.objects
    both = place(shared, second)
    assert survey(both, 0.0, job) == found
    assert shared.objects | second.objects == before
    assert set(both.opened) == {*JOBS[: 2 if job is None else 1]}


@pytest.mark.parametrize(("bucket", "seconds"), [(False, INTERVAL_SECONDS), (True, BUCKET_INTERVAL_SECONDS)])
def test_an_observer_of_a_bucket_looks_less_often_since_each_look_costs(bucket: bool, seconds: float) -> None:
    seen = Survey(None, bucket=bucket)
    survey(place(Shared(), Shared()), 5.0, seen=seen)
    assert seen.next_turn() == 5.0 + seconds


def test_an_observer_opens_no_more_than_two_hundred_folders() -> None:
    many = Place(**{f"_{number:032x}": Client(Shared()) for number in range(SURVEYED_JOBS + 5)})
    assert survey(many, 0.0) == []
    assert many.opened.total() == SURVEYED_JOBS


def test_an_observer_reads_an_object_once_and_reports_it_while_it_is_there(shared: Shared, both: Place) -> None:
    name, seen = shared.put_of("h", 1), Survey(None)
    for second in range(3):
        assert survey(both, second, seen=seen) == [1]
    assert both.clients[JOBS[0]].reads == {name: 1}
    del shared.objects[name]
    assert survey(both, 3.0, seen=seen) == []


def test_observer_leaves_out_what_is_older_than_the_newest_by_minutes(shared: Shared, both: Place) -> None:
    shared.put_of("h", 1, age=BELIEVED_SECONDS + 1)
    seen = Survey(None)
    assert survey(both, 0.0, seen=seen) == [1]  # perhaps no clock tells better
    shared.put_of("h", 2)
    assert survey(both, 1.0, seen=seen) == [2]
    assert survey(both, 1.0 + BELIEVED_SECONDS, seen=seen) == []


def test_observer_leaves_out_a_seeker_that_has_not_renewed_its_sign(shared: Shared, both: Place) -> None:
    shared.put_of("h", 1)
    shared.put_of("s", 2)
    seen = Survey(None)
    assert survey(both, LIVE_SECONDS - 0.1, seen=seen) == [1, 2]
    assert survey(both, 2 * LIVE_SECONDS, seen=seen) == [1]


def test_an_observer_names_what_it_can_not_read(shared: Shared, both: Place) -> None:
    hidden = shared.put_of("h", 1)
    shared.put(object_name("h", 2))
    both.clients[JOBS[0]].hidden.add(hidden)
    report = Survey(None).turn(both, 0.0)  # type: ignore[arg-type]
    assert (report.unread, report.found) == ([hidden], [])


def test_observer_reports_a_folder_that_fails_and_reads_the_others(shared: Shared, both: Place) -> None:
    shared.put_of("h", 1)
    both.clients[JOBS[1]].failing = "open"
    assert survey(both, 0.0) == [1]
    assert Survey(JOBS[1]).turn(both, 0.0).problem is not None  # type: ignore[arg-type]
    both.clients[JOBS[0]].failing = "list"
    assert Survey(None).turn(both, 0.0).problem is not None  # type: ignore[arg-type]


# --- the requests of a bucket ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, pytest.param(128, marks=pytest.mark.slow)])
def test_requests_of_waiting_processes_to_a_bucket(shared: Shared, count: int) -> None:
    """The figures of docs/networks.md: requests of a waiting process in its first minute, and in later ones."""
    processes = [Process(Client(shared), number, bucket=True) for number in range(1, count + 1)]
    requests: list[list[int]] = [[0] * count]
    for _ in range(3):
        run(60.0, *processes)
        done = ([each.client.requests[kind] for kind in ("write", "list", "read", "delete")] for each in processes)
        requests.append([sum(each) for each in done])
    minutes = [max(map(sub, after, before)) for before, after in pairwise(requests)]
    assert sum(each.client.requests["read"] for each in processes) == 0  # there is no host, and signs are not read
    assert minutes[0] <= 43
    assert minutes[2] <= 24
    print(f"requests per minute and process: {minutes}")
    host = Process(Client(shared), 200, host=True, bucket=True)
    run(20.0, host, *processes)
    # Each name of the host once: it changes its name every 15 s.
    assert max(each.client.requests["read"] for each in processes) <= 3
    assert all(host.member in each.found_at for each in processes)
