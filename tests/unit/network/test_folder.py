"""What a process writes, reads and deletes in a shared folder, and when: on storage and a clock of the test's own."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Iterator

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


class Client:
    """One machine's view of the storage.

    Args:
        shared: the storage.
        lag: for how long a change by others is not seen, unless this machine has changed the folder itself since.
        own_lag: the age of what this machine sees, its own changes included.
        empty_first: whether an object that was written less than a second ago has no content yet.
        behind: by how much the clock of this machine is behind, which stamps what it writes.
    """

    bucket = False
    patience = leave_seconds = 1.0

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

    def jobs(self) -> list[str]:
        return []

    def of(self, job: str) -> Client:
        return self

    def close(self) -> None: ...

    def reap(self) -> None: ...

    def abort(self) -> None: ...


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
            report = self.folder.turn(self.client, self.client.shared.now)
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
def test_a_host_is_found_although_directories_are_cached(first: str, seconds: float, lag: float, within: float) -> None:
    shared = Shared()
    made = {}
    for role in ("host", "seeker") if first == "host" else ("seeker", "host"):
        made[role] = Process(Client(shared, lag=lag), 1 if role == "host" else 2, host=role == "host")
        if role == first:
            run(seconds, made[role])
    met = shared.now
    run(30.0, *made.values())
    assert made["seeker"].found_at[made["host"].member] <= met + within
    assert not made["host"].client.reads, "no process reads its own object"


def test_an_object_without_content_is_read_again_and_one_with_content_never() -> None:
    shared = Shared()
    host = Process(Client(shared), 1, host=True)
    seeker = Process(Client(shared, empty_first=True), 2)
    run(60.0, host, seeker)
    assert host.member in seeker.found_at
    # The host's name changes some seven times in a minute. Each is read until it decodes.
    assert max(seeker.client.reads.values()) <= 6
    assert not [name for name in seeker.client.reads if name.startswith("s-")]


# --- the election ----------------------------------------------------------------------------------------------------


def test_a_sign_that_is_not_listed_yet_does_not_count() -> None:
    shared = Shared()
    seeker = Process(Client(shared, own_lag=60.0), 2)
    run(59.0, seeker)
    assert not any(report.listed for report in seeker.reports)
    run(10.0, seeker)
    assert seeker.reports[-1].listed


def test_a_host_is_found_in_listings_that_are_a_minute_late() -> None:
    shared = Shared()
    host, seeker = (Process(Client(shared, own_lag=60.0), number, host=number == 1) for number in (1, 2))
    run(75.0, host, seeker)
    # Its names change meanwhile, and each of them stays until a later one is listed.
    assert host.member in seeker.found_at
    run(200.0, host, seeker)
    assert len(shared.objects) <= 14


@pytest.mark.parametrize("behind", [0.0, LIVE_SECONDS + 60])
def test_only_a_lower_living_sign_delays_whatever_clock_stamps_it(behind: float) -> None:
    shared = Shared()
    higher, lower = Process(Client(shared), 2), Process(Client(shared, behind=behind), 1)
    run(2.0, higher)
    run(2.0, higher, lower)
    assert higher.reports[-1].lower
    assert not lower.reports[-1].lower
    run(30.0, higher)  # the lower one was killed
    assert not higher.reports[-1].lower


# --- names, times and litter ------------------------------------------------------------------------------------------


def test_new_content_has_a_new_name_and_the_old_one_goes() -> None:
    shared = Shared()
    host = Process(Client(shared), 1, host=True)
    run(1.0, host)
    host.show(host=True, urgent="full")
    run(0.1, host)
    host.show(host=True, urgent="not full")
    run(0.1, host)
    assert len(shared.objects) == 1
    assert len(shared.names_used) >= 3


@pytest.mark.parametrize("seconds", [200.0])
def test_a_process_has_one_object_and_renews_it_every_fifteen_seconds(seconds: float) -> None:
    shared = Shared()
    seeker = Process(Client(shared), 1)
    run(60.0, seeker)
    before = len(shared.names_used)
    ages = []
    for _ in range(int(seconds)):
        run(1.0, seeker)
        assert len(shared.objects) == 1
        ages.append(shared.now - next(iter(shared.objects.values()))[1])
    assert max(ages) <= 15 + 5 * 1.25 + 0.1  # a process that has waited takes a turn every 5 s
    assert len(shared.names_used) - before <= seconds / 14


def test_old_objects_are_not_believed_and_litter_is_deleted() -> None:
    shared = Shared()
    name = f"h-{NODE}-{member_id(7).hex()}-3"
    litter = [f"{kind}-{NODE}-{member_id(8).hex()}-3" for kind in "hst"]
    strangers = ["README", f"h-{NODE}-{member_id(9).hex()}", "h-", ".nfs0001"]
    shared.put(name, offer_of(member_id(7)), age=BELIEVED_SECONDS + 5)
    for each in (*litter, *strangers):
        shared.put(each, offer_of(member_id(8)), age=LITTER_SECONDS + 5)
    seeker = Process(Client(shared), 2)
    run(5.0, seeker)
    assert not seeker.found_at
    assert name in shared.objects
    assert not set(litter) & shared.objects.keys()
    assert set(strangers) <= shared.objects.keys()


@pytest.mark.parametrize(("bucket", "most"), [(False, SWEPT_PER_TURN), (True, BUCKET_SWEPT_PER_TURN)])
def test_litter_is_deleted_a_few_objects_at_a_time_while_a_host_is_found(*, bucket: bool, most: int) -> None:
    shared = Shared()
    for number in range(1_000):
        shared.put(f"s-{NODE}-{member_id(number).hex()}-1", offer_of(member_id(number)), age=LITTER_SECONDS + 5)
    host = Process(Client(shared), 2_000, host=True)
    seeker = Process(Client(shared), 2_001, bucket=bucket)
    while not seeker.found_at:
        run(0.1, host, seeker)
    turns = len(seeker.reports)
    assert 0 < seeker.client.requests["delete"] <= most * turns
    assert turns < 5


def test_the_clock_of_the_storage_counts_alone() -> None:
    shared = Shared()
    shared.now = 5e9  # of this machine; the storage's times come from the same clock, whatever it says
    host = Process(Client(shared), 1, host=True)
    seeker = Process(Client(shared), 2)
    shared.put(f"h-{NODE}-{member_id(7).hex()}-3", offer_of(member_id(7)), age=1e6)
    run(2.0, host, seeker)
    assert set(seeker.found_at) == {host.member}


@pytest.mark.parametrize("behind", [BELIEVED_SECONDS + 30, LITTER_SECONDS + 3600])
@pytest.mark.parametrize("first", ["host", "seeker"])
def test_a_host_is_found_whose_own_clock_stamps_its_objects_and_is_behind(first: str, behind: float) -> None:
    shared = Shared()
    host, seeker = Process(Client(shared, behind=behind), 1, host=True), Process(Client(shared), 2)
    run(5.0, host if first == "host" else seeker)
    run(16.0, host, seeker)  # until it renews the object that was there before the seeker
    assert host.member in seeker.found_at
    listed = [name for name in shared.objects if name.startswith("h-")]
    run(60.0, host, seeker)
    assert listed, "nobody has deleted the object of a process that renews it"
    assert not shared.objects.keys() & set(listed), "and it is renewed as ever"


def test_old_objects_stay_old_for_a_process_that_has_not_looked_for_long() -> None:
    """It has a session and loses it: what came meanwhile is as old as the storage says."""
    shared = Shared()
    seeker = Process(Client(shared), 2)
    run(5.0, seeker)
    seeker.leave()
    run(1.0, seeker)
    shared.put(f"h-{NODE}-{member_id(7).hex()}-3", offer_of(member_id(7)))
    shared.now += LITTER_SECONDS + 60
    seeker.show()
    run(5.0, seeker)
    assert not seeker.found_at
    assert not [name for name in shared.objects if name.startswith("h-")], "deleted as litter"


def test_without_times_objects_are_believed_and_not_deleted() -> None:
    shared = Shared()
    shared.put(f"h-{NODE}-{member_id(7).hex()}-3", offer_of(member_id(7)), age=1e6)
    seeker = Process(Client(shared, times=False), 2)
    run(2.0, seeker)
    assert member_id(7) in seeker.found_at
    assert len(shared.objects) == 2


def test_leaving_process_deletes_its_object() -> None:
    shared = Shared()
    seeker = Process(Client(shared), 2)
    run(3.0, seeker)
    seeker.leave()
    run(1.0, seeker)
    assert not shared.objects
    assert seeker.client.requests["tidy"] == 1
    assert seeker.client.left_at_tidying == 0, "a directory that is not empty can't be deleted"
    assert seeker.folder.next_turn() is None


def test_failed_deletion_is_repeated() -> None:
    shared = Shared()
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


def test_a_process_that_looks_again_finds_the_host_that_it_found_before() -> None:
    shared = Shared()
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


def test_a_process_that_cannot_write_still_finds_a_host() -> None:
    shared = Shared()
    host = Process(Client(shared), 1, host=True)
    seeker = Process(Client(shared), 2)
    seeker.client.failing = "write"
    run(2.0, host, seeker)
    assert host.member in seeker.found_at
    assert seeker.reports[-1].problem is not None
    assert not seeker.reports[-1].listed


@pytest.mark.parametrize("operation", ["open", "list"])
def test_a_failure_is_reported_and_tried_again(operation: str) -> None:
    shared = Shared()
    host, seeker = Process(Client(shared), 1, host=True), Process(Client(shared), 2)
    seeker.client.failing = operation
    run(5.0, host, seeker)
    assert all(report.problem is not None for report in seeker.reports)
    seeker.client.failing = ""
    run(2.0, host, seeker)
    assert seeker.reports[-1].problem is None
    assert host.member in seeker.found_at


def test_others_litter_that_cannot_be_deleted_is_no_failure() -> None:
    shared = Shared()
    shared.put(f"h-{NODE}-{member_id(7).hex()}-3", age=LITTER_SECONDS + 5)
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
def test_two_thousand_objects_of_a_stranger_delay_a_host_by_one_renewal(content: bytes, bucket: bool) -> None:
    shared = Shared()
    for number in range(2_000):
        shared.put(f"h-{NODE}-{member_id(1000 + number).hex()}-1", content)
    host = Process(Client(shared), 1, host=True, bucket=bucket)
    seeker = Process(Client(shared), 2, bucket=bucket)
    # Their first listing is the first of all these names, so the host is found by its second one.
    run(20.0, host, seeker)
    assert seeker.found_at[host.member] < 1000.0 + (18.0 if bucket else 2.0)
    assert max(Counter(seeker.client.reads).values()) < 30
    assert seeker.client.requests["read"] < 2_000 + 20 * 10 + READS_PER_TURN


def test_a_crowd_of_objects_is_read_without_the_pauses_of_a_patient_process() -> None:
    shared = Shared()
    seeker = Process(Client(shared), 2)
    run(100.0, seeker)
    for number in range(4 * READS_PER_TURN):
        shared.put(f"h-{NODE}-{member_id(1000 + number).hex()}-1", offer_of(member_id(1000 + number)))
    run(PATIENT_INTERVAL_SECONDS * 1.25 + 1.0, seeker)
    assert len(seeker.found_at) == 4 * READS_PER_TURN


def test_many_waiting_processes_read_nothing_twice() -> None:
    shared = Shared()
    waiters = [Process(Client(shared), 2 + number) for number in range(40)]
    host = Process(Client(shared), 1, host=True)
    run(60.0, host, *waiters)
    assert all(host.member in waiter.found_at for waiter in waiters)
    names = sum(1 for name in shared.names_used if name.startswith("h-"))
    assert all(waiter.client.requests["read"] <= names for waiter in waiters)


def test_requests_to_a_bucket_are_few() -> None:
    shared = Shared()
    waiter = Process(Client(shared), 2, bucket=True)
    run(60.0, waiter)
    first = sum(waiter.client.requests.values()) - waiter.client.requests["open"]
    run(60.0, waiter)
    second = sum(waiter.client.requests.values()) - waiter.client.requests["open"] - first
    assert first <= 50
    assert second <= 25


def test_a_host_that_takes_no_members_is_quiet() -> None:
    shared = Shared()
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

    bucket = False
    patience = leave_seconds = 1.0

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


def survey(place: Place, now: float, job: str | None = None, seen: Survey | None = None) -> list[bytes]:
    seen = seen or Survey(job)
    report = seen.turn(place, now)  # type: ignore[arg-type]
    assert report.listed
    return sorted(each.data for each in report.found)


def test_an_observer_reads_hosts_and_seekers_of_all_jobs_and_writes_nothing() -> None:
    first, second = Shared(), Shared()
    host = Process(Client(first), 1, host=True)
    first.put(f"s-{NODE}-{member_id(2).hex()}-1", offer_of(member_id(2)))
    second.put(f"h-{NODE}-{member_id(3).hex()}-1", offer_of(member_id(3)))
    run(0.1, host)
    before = first.objects | second.objects
    first.put(f"t-{NODE}-{member_id(4).hex()}-1", offer_of(member_id(4)))  # its writer has not renamed it yet
    before |= first.objects
    both = place(first, second)
    assert survey(both, 0.0) == sorted(map(offer_of, map(member_id, (1, 2, 3))))
    assert first.objects | second.objects == before
    assert set(both.opened) == set(JOBS)


def test_an_observer_of_one_job_opens_only_its_folder() -> None:
    first, second = Shared(), Shared()
    first.put(f"h-{NODE}-{member_id(1).hex()}-1", offer_of(member_id(1)))
    both = place(first, second)
    assert survey(both, 0.0, JOBS[0]) == [offer_of(member_id(1))]
    assert set(both.opened) == {JOBS[0]}


@pytest.mark.parametrize(("bucket", "seconds"), [(False, INTERVAL_SECONDS), (True, BUCKET_INTERVAL_SECONDS)])
def test_an_observer_of_a_bucket_looks_less_often_since_each_look_costs(bucket: bool, seconds: float) -> None:
    seen = Survey(None, bucket=bucket)
    survey(place(Shared(), Shared()), 5.0, seen=seen)
    assert seen.next_turn() == 5.0 + seconds


def test_an_observer_opens_no_more_than_two_hundred_folders() -> None:
    many = Place(**{f"_{number:032x}": Client(Shared()) for number in range(SURVEYED_JOBS + 5)})
    assert survey(many, 0.0) == []
    assert many.opened.total() == SURVEYED_JOBS


def test_an_observer_reads_an_object_once_and_reports_it_while_it_is_there() -> None:
    shared = Shared()
    name = f"h-{NODE}-{member_id(1).hex()}-1"
    shared.put(name, offer_of(member_id(1)))
    both = place(shared, Shared())
    seen = Survey(None)
    for second in range(3):
        assert survey(both, second, seen=seen) == [offer_of(member_id(1))]
    assert both.clients[JOBS[0]].reads == {name: 1}
    del shared.objects[name]
    assert survey(both, 3.0, seen=seen) == []


def test_an_observer_does_not_report_what_is_older_than_the_newest_object_by_minutes() -> None:
    shared = Shared()
    shared.put(f"h-{NODE}-{member_id(1).hex()}-1", offer_of(member_id(1)), age=BELIEVED_SECONDS + 1)
    both = place(shared, Shared())
    seen = Survey(None)
    assert survey(both, 0.0, seen=seen) == [offer_of(member_id(1))]  # perhaps no clock tells better
    shared.put(f"h-{NODE}-{member_id(2).hex()}-1", offer_of(member_id(2)))
    assert survey(both, 1.0, seen=seen) == [offer_of(member_id(2))]
    assert survey(both, 1.0 + BELIEVED_SECONDS, seen=seen) == []


def test_an_observer_does_not_report_the_sign_of_a_seeker_that_has_not_been_renewed() -> None:
    shared = Shared()
    for kind, number in (("h", 1), ("s", 2)):
        shared.put(f"{kind}-{NODE}-{member_id(number).hex()}-1", offer_of(member_id(number)))
    both = place(shared, Shared())
    seen = Survey(None)
    assert survey(both, LIVE_SECONDS - 0.1, seen=seen) == [offer_of(member_id(1)), offer_of(member_id(2))]
    assert survey(both, 2 * LIVE_SECONDS, seen=seen) == [offer_of(member_id(1))]


def test_an_observer_names_what_it_can_not_read() -> None:
    shared = Shared()
    hidden, torn = (f"h-{NODE}-{member_id(number).hex()}-1" for number in (1, 2))
    shared.put(hidden, offer_of(member_id(1)))
    shared.put(torn, b"")
    both = place(shared, Shared())
    both.clients[JOBS[0]].hidden.add(hidden)
    report = Survey(None).turn(both, 0.0)  # type: ignore[arg-type]
    assert report.unread == [hidden]
    assert report.found == []


def test_an_observer_reports_a_folder_that_fails_and_reads_the_jobs_beside_one_that_is_closed_to_it() -> None:
    shared = Shared()
    shared.put(f"h-{NODE}-{member_id(1).hex()}-1", offer_of(member_id(1)))
    both = place(shared, Shared())
    both.clients[JOBS[1]].failing = "open"
    assert survey(both, 0.0) == [offer_of(member_id(1))]
    assert Survey(JOBS[1]).turn(both, 0.0).problem is not None  # type: ignore[arg-type]
    both.clients[JOBS[0]].failing = "list"
    assert Survey(None).turn(both, 0.0).problem is not None  # type: ignore[arg-type]


# --- the requests of a bucket ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_requests_of_128_waiting_processes_to_a_bucket() -> None:
    """The figures of docs/networks.md: requests of a waiting process in its first minute, and in later ones."""
    shared = Shared()
    processes = [Process(Client(shared), number, bucket=True) for number in range(1, 129)]
    minutes = []
    for _ in range(3):
        before = [sum(each.client.requests[kind] for kind in ("write", "list", "read", "delete")) for each in processes]
        run(60.0, *processes)
        after = [sum(each.client.requests[kind] for kind in ("write", "list", "read", "delete")) for each in processes]
        minutes.append([now - then for now, then in zip(after, before, strict=True)])
    assert sum(each.client.requests["read"] for each in processes) == 0  # there is no host, and signs are not read
    assert max(minutes[0]) <= 43
    assert max(minutes[2]) <= 24
    print(
        f"requests per minute and process: {[max(each) for each in minutes]}, of 128: {[sum(each) for each in minutes]}"
    )
    host = Process(Client(shared), 200, host=True, bucket=True)
    run(20.0, host, *processes)
    # Each name of the host once: it changes its name every 15 s.
    assert max(each.client.requests["read"] for each in processes) <= 3
    assert all(host.member in each.found_at for each in processes)
