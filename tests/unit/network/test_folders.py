"""The shared folders of one process: what its threads show and find there, on storage in memory."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec import structs

from mingle.network import directory, folders
from mingle.network.directory import Directory
from mingle.network.folder import Entry, FolderProblem, Found, Report, Sign
from mingle.network.folders import BETWEEN_SECONDS, EXAMINED_JOB, Examined, Folders, digest, sign_of
from mingle.wire import datagrams
from mingle.wire.datagrams import Offer, Seek
from tests.support.loopback import until

Make = Callable[..., "Process"]
NODE = digest("here")[:16]
OTHER_NODE = "b" * 16
MEMBER, OTHER = bytes(15) + b"\2", bytes(15) + b"\1"
SEEK = Seek(job="job", member=MEMBER, world_size=2)
OFFER = Offer(job="job", session=bytes(16), host=MEMBER, addresses=("10.0.0.1",), port=5000, world_size=2)
THEIRS = structs.replace(OFFER, host=OTHER)


class Memory:
    """A folder in memory.

    Args:
        objects: what lies there.
        bucket: whether it stands for a bucket.
        patience: how long a turn can take.
    """

    leave_seconds = 60.0

    def __init__(
        self, objects: dict[str, bytes] | None = None, *, bucket: bool = False, patience: float = 30.0
    ) -> None:
        self.objects = {} if objects is None else objects
        self.bucket = bucket
        self.patience = patience
        self.answers = threading.Event()
        """Cleared: its server is silent."""
        self.answers.set()
        self.asked = threading.Event()
        """Whether a turn has begun."""
        self.error: Exception | None = None
        self.ages: dict[str, float] = {}
        """How long ago these objects were written, and the others just now; empty: the storage does not tell."""
        self.lists = True
        """Whether its listings show what lies there."""
        self.hidden: set[str] = set()
        """What can't be read."""
        self.written: list[bytes] = []
        """All that was ever written."""
        self.ended: list[str] = []
        self.opened: list[str] = []

    def jobs(self) -> list[str]:
        return [digest(job)[:32] for job in ("job", "another")]

    def of(self, job: str) -> Memory:
        self.opened.append(job)
        return self

    @contextlib.contextmanager
    def open(self, *, create: bool) -> Iterator[Memory]:
        self.asked.set()
        assert self.answers.wait(30)
        if self.error is not None:
            raise self.error
        yield self

    def kinds(self) -> set[str]:
        """What kinds of objects lie there, while threads go on."""
        return {each[0] for each in list(self.objects)}

    def write(self, name: str, data: bytes) -> None:
        self.written.append(data)
        self.objects[name] = data

    def list(self) -> list[Entry]:
        names = list(self.objects) if self.lists else []
        return [Entry(name, 1000.0 - self.ages.get(name, 0.0) if self.ages else None) for name in names]

    def read(self, name: str) -> bytes | None:
        return None if name in self.hidden else self.objects.get(name)

    def delete(self, name: str) -> None:
        self.objects.pop(name, None)

    def tidy(self) -> None: ...

    def close(self) -> None:
        self.ended.append("closed")

    def reap(self) -> None:
        self.ended.append("reaped")

    def abort(self) -> None:
        self.ended.append("aborted")
        self.answers.set()


def name_of(kind: str, *, node: str = OTHER_NODE, member: bytes = OTHER, number: int = 1) -> str:
    return f"{kind}-{node}-{member.hex()}-{number}"


_of_others: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def _threads_of_others() -> None:
    """An earlier test's thread can outlast it."""
    _of_others.clear()
    _of_others.update(threading.enumerate())


def threads() -> int:
    """The number of threads of this test that take turns."""
    return sum(each.name == "mingle-abandoned-folder" for each in {*threading.enumerate()} - _of_others)


class Process:
    """A process with folders, which takes what they have shown when the test lets it."""

    def __init__(self, **storages: Memory) -> None:
        self.calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.reports: list[tuple[str, Report]] = []
        self.folders = Folders(
            storages, node="here", call=self.calls.put, found=lambda url, report: self.reports.append((url, report))
        )

    def show(self, message: Seek | Offer | None) -> None:
        self.folders.show(message, datagrams.encode)

    def turn(self) -> Report:
        """Wait for the end of a turn, and return what it has shown."""
        self.calls.get(timeout=30)()
        return self.reports[-1][1]

    def turn_until(self, condition: Callable[[], object]) -> None:
        """Wait for the ends of turns, of one at least, until the folders are as the test wants them."""
        self.turn()
        while not condition():
            self.turn()


@pytest.fixture
def processes() -> Iterator[Make]:
    """Make processes that leave their folders at the end of the test."""
    made: list[Process] = []

    def make(**storages: Memory) -> Process:
        made.append(Process(**storages))
        return made[-1]

    yield make
    for each in made:
        each.folders.close()


# --- what is shown and found ------------------------------------------------------------------------------------------


def test_host_is_found_and_leaves_nothing(processes: Make) -> None:
    objects: dict[str, bytes] = {}
    host, seeker = processes(shared=Memory(objects)), processes(shared=Memory(objects))
    host.show(OFFER)
    assert host.turn().listed
    seeker.show(structs.replace(SEEK, member=OTHER))
    (found,) = seeker.turn().found
    assert datagrams.decode(found.data) == OFFER
    assert seeker.folders.is_ours(found)
    assert not seeker.folders.is_ours(Found(found.data, OTHER_NODE))
    assert seeker.reports[0][0] == "shared"
    for each in (host, seeker):
        each.folders.close()
    assert (objects, threads()) == ({}, 0)


def test_what_a_turn_has_shown_is_taken_by_the_owner(processes: Make) -> None:
    process = processes(shared=Memory())
    process.show(SEEK)
    take = process.calls.get(timeout=30)
    assert (process.reports, process.folders.looked) == ([], False)
    take()
    assert (len(process.reports), process.folders.looked) == (1, True)


@pytest.mark.parametrize("member", [MEMBER, OTHER])
def test_process_with_a_lower_id_is_noticed(processes: Make, member: bytes) -> None:
    process = processes(empty=Memory(), shared=Memory({name_of("s", member=member): b"sign"}))
    process.show(SEEK)
    process.turn_until(lambda: process.folders.looked)
    assert process.folders.lower is (member < MEMBER)


def test_each_folder_must_have_listed_the_sign_or_failed(processes: Make) -> None:
    late, failing, unlisted = Memory(), Memory(), Memory()
    late.answers.clear()
    failing.error = FolderProblem("it is full", "delete something")
    unlisted.lists = False
    process, lonely = processes(late=late, failing=failing), processes(unlisted=unlisted)
    process.show(SEEK)
    assert process.turn().problem is failing.error
    assert not process.folders.looked
    late.answers.set()
    while process.turn().problem is not None:
        pass
    assert process.folders.looked
    assert list(process.folders.problems) == ["failing"]
    lonely.show(SEEK)
    lonely.turn()
    assert not lonely.folders.looked


def test_sign_of_another_kind_has_to_be_listed_itself(processes: Make) -> None:
    shared = Memory()
    process = processes(shared=shared)
    process.show(SEEK)
    process.turn()
    shared.answers.clear()
    process.show(OFFER)
    assert not process.folders.looked
    shared.answers.set()
    process.turn_until(lambda: shared.kinds() == {"h"})
    assert process.folders.looked
    process.show(structs.replace(OFFER, joined=2))
    assert process.folders.looked
    assert threads() == 1


def test_nothing_to_show_deletes_the_sign(processes: Make) -> None:
    shared = Memory()
    process = processes(shared=shared)
    process.show(None)
    assert threads() == 0
    process.show(SEEK)
    process.turn()
    assert shared.kinds() == {"s"}
    process.show(None)
    assert not process.folders.looked
    process.turn_until(lambda: not shared.objects)
    process.show(SEEK)
    process.turn_until(lambda: shared.objects)


@pytest.mark.parametrize(("job", "opened"), [("job", ["job"]), (None, ["job", "another"])])
def test_observer_reads_one_folder_or_all_and_shows_nothing(
    processes: Make, job: str | None, opened: list[str]
) -> None:
    shared = Memory({name_of("h"): datagrams.encode(THEIRS)})
    process = processes(shared=shared)
    process.folders.watch(job)
    assert process.folders.watching
    process.show(OFFER)
    assert {datagrams.decode(each.data) for each in process.turn().found} == {THEIRS}
    assert set(shared.opened) == {digest(each)[:32] for each in opened}
    process.folders.close()
    assert list(shared.objects) == [name_of("h")]


def test_slowest_folder_decides_how_long_the_first_look_can_take() -> None:
    process = Process(slow=Memory(patience=7.0), quick=Memory(patience=1.0))
    assert process.folders.first_look_seconds == 7.0 + BETWEEN_SECONDS
    process.folders.close()
    without = Process()
    without.show(SEEK)
    assert (without.folders.open, without.folders.first_look_seconds, threads()) == (False, 0.0, 0)


# --- folders that can't be used ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (FolderProblem("it is full", "delete something"), "it is full"),
        (ZeroDivisionError("a riddle"), "can't be used (ZeroDivisionError: a riddle)"),
    ],
)
def test_problem_is_named_until_a_turn_succeeds(processes: Make, error: Exception, what: str) -> None:
    shared = Memory()
    shared.error = error
    process = processes(shared=shared)
    process.show(SEEK)
    process.turn()
    assert [problem.what for problem in process.folders.problems.values()] == [what]
    shared.error = None
    process.turn_until(lambda: not process.folders.problems)


@pytest.mark.parametrize(("bucket", "fix"), [(False, "with `ls`"), (True, "AWS_ENDPOINT_URL")])
def test_silent_server_is_named_once_a_turn_takes_too_long(processes: Make, bucket: bool, fix: str) -> None:
    both = {"patient": Memory(), "silent": Memory(bucket=bucket, patience=0.0)}
    process = processes(**both)
    for each in both.values():
        each.answers.clear()
    process.show(SEEK)
    assert all(each.asked.wait(30) for each in both.values())
    ((name, problem),) = process.folders.problems.items()
    assert (name, problem.what) == ("silent", "has not answered for more than 0 s")
    assert fix in problem.fix
    assert not process.folders.looked
    for each in both.values():
        each.answers.set()
    process.turn()
    process.turn()


# --- the end ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("used", [True, False])
def test_process_that_has_left_shows_and_takes_nothing_more(processes: Make, used: bool) -> None:
    shared = Memory()
    process = processes(shared=shared)
    if used:
        process.show(SEEK)
        take = process.calls.get(timeout=30)
        process.folders.leave()
        take()
    process.folders.leave()
    process.show(OFFER)
    assert (process.reports, process.folders.open) == ([], False)
    process.folders.close()
    assert (shared.objects, threads()) == ({}, 0)
    assert shared.ended == ["closed", "reaped"][: 1 + used]


def test_silent_server_does_not_hold_up_the_end() -> None:
    shared = Memory()
    shared.leave_seconds = 0.01
    shared.answers.clear()
    process = Process(shared=shared)
    process.show(SEEK)
    assert shared.asked.wait(30)
    began = time.monotonic()
    process.folders.close()
    assert time.monotonic() - began < 25.0  # its answer is waited for by the test for 30
    assert shared.ended[0] == "aborted"
    until(lambda: shared.ended == ["aborted", "closed", "reaped"])
    until(lambda: threads() == 0)


# --- a check of folders -----------------------------------------------------------------------------------------------


def test_check_names_what_is_wrong_with_each_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Directory, "leave_seconds", 60.0)
    monkeypatch.setattr(Directory, "patience", 60.0)
    good, missing = f"dir:{tmp_path}", f"dir:{tmp_path}/missing"
    found = folders.examine([good, missing, good], "node")
    assert list(found) == [good, missing]
    assert found[good] == Examined(None)
    problem = found[missing].problem
    assert problem is not None
    assert "does not exist" in problem.what
    assert not list(tmp_path.iterdir())
    assert folders.examine([], "node") == {}


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Memory:
    """The storage of each directory that is examined."""
    made = Memory()
    monkeypatch.setattr(directory, "Directory", lambda _path, _job: made)
    return made


def examine() -> Examined:
    (examined,) = folders.examine(["dir:/shared"], "here").values()
    return examined


def test_check_counts_the_other_nodes_that_have_left_an_object(shared: Memory) -> None:
    for number in (1, 2):
        shared.objects[name_of("h", number=number)] = datagrams.encode(THEIRS)
    shared.objects[name_of("s", node="c" * 16)] = datagrams.encode(SEEK)
    shared.objects[name_of("s", node=NODE)] = datagrams.encode(SEEK)
    assert examine() == Examined(None, others=2)
    shared.ages = {name_of("h", number=1): 50.0, name_of("h", number=2): 30.0, name_of("s", node="c" * 16): 15.0}
    examined = examine()
    assert examined.others == 2
    assert examined.age is not None
    assert 14.9 < examined.age < 30.0, "that of the newest"


def test_check_names_an_object_that_this_user_may_not_read(shared: Memory) -> None:
    shared.objects[name_of("h")] = datagrams.encode(THEIRS)
    shared.hidden.add(name_of("h"))
    problem = examine().problem
    assert problem is not None
    assert problem.what == f"holds {name_of('h')}, which this host can't read"
    assert "umask" in problem.fix


def test_folder_that_is_examined_shows_a_sign_of_no_job(shared: Memory) -> None:
    shown: list[Report] = []
    with folders.examined(["dir:/shared"], "here", lambda _, report: shown.append(report)) as examined:
        until(lambda: shown)
        (data,) = set(shared.written)
        sign = datagrams.decode(data)
        assert isinstance(sign, Seek)
        assert (sign.job, sign.kind) == (EXAMINED_JOB, "observer")
        examined.show(SEEK, datagrams.encode)
        before = len(shown)
        until(lambda: len(shown) > before + 1)
    assert set(shared.written) == {data}
    assert shared.objects == {}


# --- signs ------------------------------------------------------------------------------------------------------------


AGENTS = structs.replace(OFFER, kind="agents", state="sealed")


def test_sign_has_the_id_of_its_process_and_lasts_where_a_host_takes_no_members() -> None:
    assert sign_of(SEEK, b"data") == Sign("s", MEMBER, b"data")
    for offer, lasting in ((OFFER, False), (AGENTS, False), (structs.replace(AGENTS, joined=2), True)):
        sign = sign_of(offer, b"data")
        assert (sign.kind, sign.member, sign.data, sign.lasting) == ("h", MEMBER, b"data", lasting)


@pytest.mark.parametrize(
    ("offer", "changed", "urgent"),
    [
        (OFFER, {"session": b"s" * 16}, True),
        (OFFER, {"addresses": ("10.0.0.9",)}, True),
        (OFFER, {"port": 5001}, True),
        (OFFER, {"state": "sealed"}, True),
        (OFFER, {"quorum": True}, True),
        (OFFER, {"joined": 2}, False),
        (OFFER, {"hostname": "another"}, False),
        (AGENTS, {"joined": 2}, True),
        (AGENTS, {"state": "open"}, True),
    ],
)
def test_offer_is_shown_at_once_if_others_need_the_change(
    offer: Offer, changed: dict[str, object], urgent: bool
) -> None:
    before, after = (sign_of(structs.replace(offer, **each), b"data") for each in ({}, changed))
    assert (before.urgent != after.urgent) is urgent
