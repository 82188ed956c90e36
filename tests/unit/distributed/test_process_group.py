"""The doors that end in a process group: what is checked first, what is made, and how it ends."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mingle
from mingle.config.settings import Arguments
from mingle.distributed import gloo, process_group, rendezvous
from mingle.distributed.process_group import GroupArguments
from mingle.distributed.session import LoneSession
from mingle.distributed.url_scheme import formed_handler, parse_url, rendezvous_handler
from mingle.engine import store
from mingle.errors import ConfigurationError, MingleError
from tests.support.children import in_child
from tests.support.failing import raising
from tests.support.loopback import answers, job_name, until
from tests.support.ports import free_udp_port

# Not by an import statement: torch.distributed has a function of that name as well.
torch_rendezvous = importlib.import_module("torch.distributed.rendezvous")


@pytest.fixture(autouse=True)
def _no_group_is_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        destroy_group()


@pytest.fixture
def foreign_group() -> Callable[[], Any]:
    """A process group that somebody else made."""
    dist.init_process_group("gloo", store=dist.HashStore(), **ALONE)
    return weakref.ref(dist.group.WORLD)


def destroy_group() -> None:
    """As a user would, but safe with torch before 2.8, too: there a group that has just worked may hang at its end."""
    gloo.settle()
    dist.destroy_process_group()


def reduced() -> float:
    """One collective: the process group works."""
    number = torch.tensor([1.0])
    dist.all_reduce(number)
    return float(number)


ALONE: dict[str, Any] = {"rank": 0, "world_size": 1}


def made(what: str, **options: Any) -> mingle.Job:
    """The job of a rank alone, with a process group."""
    return mingle.init(job_name(what), **{**ALONE, "backend": "gloo", **options})


def through_the_url(backend: str | None) -> None:
    dist.init_process_group(backend, init_method=f"mingle://{job_name('url')}", **ALONE)


# --- refused before the first packet --------------------------------------------------------------------------------


def refused(match: str, call: Callable[[], object]) -> ConfigurationError:
    """Return the plain error of a call, which changes nothing."""
    before = dict(os.environ)
    with pytest.raises(ConfigurationError, match=match) as caught:
        call()
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None or caught.value.__suppress_context__
    assert len(caught.value.observation.splitlines()) == 1
    assert dict(os.environ) == before
    return caught.value


def check_options(backend: str | None, options: Mapping[str, Any]) -> None:
    process_group.check_arguments(GroupArguments(backend=backend, options=options))


@pytest.mark.usefixtures("no_socket")
@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"timeuot": timedelta(1)}, "no option timeuot=; did you mean timeout="),
        ({"discovery_timout": 3}, "no option discovery_timout=; did you mean discovery_timeout="),
        ({"job": "resnet"}, "no option job=; did you mean job_id="),
        ({"world_sise": 2, "world_size": None}, "no option world_sise="),  # before what is missing without it
        ({"frobnicate": 3}, r"no option frobnicate=\.\n(.|\n)*pg_options"),
        ({"init_method": "env://"}, "init_method= is not an option of mingle.init"),
        ({"timeout": 5}, "timeout=5 is not a positive datetime.timedelta"),
        ({"timeout": timedelta(0)}, "timeout="),
        ({"group_name": 5}, "group_name=5 has the wrong type"),
        ({"device_id": "cuda:0"}, "device_id='cuda:0' has the wrong type"),
        ({"device_id": True}, "device_id=True has the wrong type"),
        ({"device_id": 0}, "device_id=0 is no device of this machine"),
        ({"device_id": torch.device("cpu")}, "is no device of this machine"),
    ],
)
def test_a_wrong_option(options: dict[str, Any], match: str) -> None:
    remedy = refused(match, partial(made, "option", **options)).remedy
    assert " _" not in str(remedy), "those that an error lists are public"


@pytest.mark.usefixtures("no_socket")
@pytest.mark.parametrize("backend", [None, "undefined", "gloo", "cpu:gloo"])
def test_a_value_of_nccl_in_gloos_variable(monkeypatch: pytest.MonkeyPatch, backend: str | None) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "^lo,docker0")
    for call in (partial(made, "variable", backend=backend), partial(through_the_url, backend)):
        refused("only NCCL_SOCKET_IFNAME takes", call)


@pytest.mark.parametrize(
    ("device", "taken"),
    [
        (torch.device("cuda", 1), True),
        (1, True),
        (torch.device("cuda", 2), False),
        (2, False),
        (torch.device("cuda"), False),
        (torch.device("xpu", 0), False),
        (torch.device("cpu", 0), False),
    ],
)
def test_a_device_is_one_of_this_machine_with_its_index(
    monkeypatch: pytest.MonkeyPatch, device: object, taken: bool
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    if taken:
        check_options("gloo", {"device_id": device})
    else:
        refused("there are 2 devices of the type cuda, counted from 0", partial(made, "device", device_id=device))


@pytest.mark.usefixtures("no_socket")
@pytest.mark.parametrize(
    ("backend", "match"),
    [
        ("glooo", "backend='glooo' can't be used: torch knows no 'glooo'; did you mean 'gloo'?"),
        ("cpu:gloo,cuda:ncccl", "torch knows no 'ncccl'"),
        ("gloo,", "torch knows no ''"),
        ("cpu:gloo,cpu:gloo", "Duplicate device type cpu"),
        ("cpu:gloo,gpu:gloo", "device string: gpu"),
        (5, "backend=5 can't be used: it is not a str"),
    ],
)
def test_a_wrong_backend(backend: Any, match: str) -> None:
    remedy = str(refused(match, partial(made, "backend", backend=backend)).remedy)
    assert "gloo" in remedy
    for name in ("nccl", "mpi", "xccl"):
        usable = getattr(dist, f"is_{name}_available")() and (name != "nccl" or torch.cuda.is_available())
        assert (name in remedy) is usable, "only those that torch takes here are listed"
    assert "undefined" not in remedy


@pytest.mark.usefixtures("no_socket")
@pytest.mark.parametrize("job_id", ["gloo", "cpu:gloo,cuda:nccl", "ours"])
def test_a_backend_where_the_job_id_belongs(monkeypatch: pytest.MonkeyPatch, job_id: str) -> None:
    """What a search and replace of ``init_process_group("gloo")`` leaves; torch may know backends that we don't."""
    monkeypatch.setattr(dist.Backend, "backend_list", [*dist.Backend.backend_list, "ours"])
    error = refused(f"job_id='{job_id}' is the name of a torch backend", partial(mingle.init, job_id, **ALONE))
    assert f"backend='{job_id}'" in str(error.remedy)


@pytest.mark.usefixtures("no_socket")
@pytest.mark.parametrize("backend", ["nccl", "NCCL", "nccl2", "nccl-lazy", "cpu:gloo,cuda:nccl"])
@pytest.mark.parametrize(
    ("built_in", "match"), [(False, "this build of torch has no nccl"), (True, "NCCL needs a GPU, and torch sees none")]
)
def test_nccl_that_can_not_work_is_refused(
    monkeypatch: pytest.MonkeyPatch, backend: str, built_in: bool, match: str
) -> None:
    """Torch tells the scheme's handler no backend, and refuses it itself only when all ranks have joined."""
    monkeypatch.setattr(dist, "is_nccl_available", lambda: built_in)
    monkeypatch.setattr(dist.Backend, "backend_list", [*dist.Backend.backend_list, "nccl2", "nccl-lazy"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for call in (partial(made, "nccl", backend=backend), partial(through_the_url, backend)):
        assert "gloo" in str(refused(match, call).remedy)


@pytest.mark.parametrize("seen_by", ["NVML", "CUDA"])
def test_nccl_with_a_gpu_initializes_cuda_only_where_nvml_sees_none(
    monkeypatch: pytest.MonkeyPatch, seen_by: str
) -> None:
    """``is_available`` asks CUDA itself, after which a forked child can't use it; ``device_count`` asks NVML."""
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8 if seen_by == "NVML" else 0)
    monkeypatch.setattr(
        torch.cuda, "is_available", lambda: pytest.fail("CUDA was initialized") if seen_by == "NVML" else True
    )
    check_options("nccl", {})
    check_options("cpu:gloo,cuda:nccl", {})


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Registers a third party's backend of the name "ours", which is Gloo's under another name."""
    registry = dist.Backend
    for name in ("backend_list", "backend_type_map", "backend_capability", "default_device_backend_map", "_plugins"):
        monkeypatch.setattr(registry, name, getattr(registry, name).copy())

    def make(prefix: Any, rank: int, size: int, timeout: timedelta) -> Any:
        return dist.ProcessGroupGloo(prefix, rank, size, timeout)

    yield lambda *_: registry.register_backend("ours", make, devices=["cpu"])
    if hasattr(registry, "OURS"):
        del registry.OURS


@pytest.mark.parametrize("backend", ["ours", "cpu:ours", "cpu:ours,cuda:gloo"])
def test_a_backend_of_a_third_party_works(plugin: Callable[..., Any], backend: str) -> None:
    plugin()
    with made("third party", backend=backend):
        assert reduced() == 1
    through_the_url(backend)
    assert reduced() == 1


def test_a_backend_that_torch_loads_when_it_is_asked_for(
    plugin: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch 2.15 does, by an entry point."""
    monkeypatch.setattr(dist.Backend, "_ensure_backend_registered", plugin, raising=False)
    check_options("ours", {})
    failing = raising(RuntimeError("Failed to load the c10d backend entry point: theirs"))
    monkeypatch.setattr(dist.Backend, "_ensure_backend_registered", failing, raising=False)
    with pytest.raises(ConfigurationError, match="Failed to load the c10d backend") as raised:
        check_options("theirs", {})
    assert isinstance(raised.value.__cause__, RuntimeError), "its traceback shows why the package fails"


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        (None, {}),
        ("undefined", {}),
        ("gloo", {"timeout": timedelta(seconds=5), "group_name": "g", "pg_options": None, "device_id": None}),
        ("cpu:gloo", {}),
        ("fake", {}),
    ],
)
def test_options_that_torch_takes_are_accepted(backend: str | None, options: dict[str, Any]) -> None:
    if backend == "fake":  # torch 2.6 knows it only once this has been imported
        importlib.import_module("torch.testing._internal.distributed.fake_pg")
    check_options(backend, options)


@pytest.mark.usefixtures("no_socket")
def test_a_process_group_that_somebody_else_made(foreign_group: Callable[[], Any]) -> None:
    refused("has a process group already", partial(made, "refused"))
    refused("has a process group already", partial(mingle.discover, "refused", **ALONE))
    assert dist.group.WORLD is foreign_group()
    assert reduced() == 1


# --- made, and ended ------------------------------------------------------------------------------------------------


def test_the_block_ends_the_process_group_and_restores_the_environment() -> None:
    before = dict(os.environ)
    with made("block", timeout=timedelta(seconds=77)) as job:
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "gloo")
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        assert backend.options._timeout == timedelta(seconds=77), "options reach torch"
        assert reduced() == 1
        assert answers(job.master_port), "torch holds the store now"
        assert os.environ["MASTER_PORT"] == str(job.master_port)
        del backend
    assert not dist.is_initialized()
    assert dict(os.environ) == before
    until(lambda: not answers(job.master_port))
    job.close()


@pytest.mark.usefixtures("foreign_group")
def test_the_group_is_ended_when_no_other_rank_needs_this_one_and_gloos_threads_are_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With torch before 2.8 the process hangs for ever if one of them wants the interpreter's lock just then."""
    calls: list[str] = []
    monkeypatch.setattr(gloo, "settle", partial(calls.append, "settle"))
    monkeypatch.setattr(dist, "destroy_process_group", partial(calls.append, "destroy"))
    process_group.own("job", partial(calls.append, "await the members"))(False)
    assert calls == ["await the members", "settle", "destroy"]


def test_the_store_is_torchs_alone_once_the_group_stands(opened: list[store.StoreServer]) -> None:
    with made("store"):
        assert [each.held for each in opened] == [False]


def test_closing_leaves_a_process_group_that_init_did_not_make() -> None:
    job = mingle.discover(job_name("close"), **ALONE)
    dist.init_process_group("gloo")
    job.close()
    assert reduced() == 1


@pytest.mark.parametrize("door", [mingle.init, mingle.discover])
def test_a_second_call_ends_the_group_of_the_first_and_says_so_if_that_was_another_job(
    door: Callable[..., mingle.Job], said: list[tuple[int, str]]
) -> None:
    first, second = job_name("first"), job_name("second")
    mingle.init(first, **ALONE, backend="gloo").close()
    for _ in range(3):
        mingle.init(second, **ALONE, backend="gloo")
        assert reduced() == 1
    assert said == [], "the first was closed, and a cell of a notebook is run again"
    door(first, **ALONE)
    assert dist.is_initialized() is (door is mingle.init)
    ((level, text),) = said
    assert level == logging.WARNING
    assert f"job {first}: " in text
    assert f"destroyed the process group of job {second}" in text


def test_a_process_group_that_the_user_has_replaced_is_the_users() -> None:
    with made("replaced"):
        kept = dist.group.WORLD  # so that it is told from the other by identity, and not by having gone
        destroy_group()
        dist.init_process_group("gloo", store=dist.HashStore(), **ALONE)
    assert dist.group.WORLD not in (None, kept)
    refused("has a process group already", partial(made, "refused"))


def test_a_process_group_that_the_user_has_ended() -> None:
    with made("ended") as job:
        destroy_group()
    until(lambda: not answers(job.master_port))


# --- exceptions in the block ----------------------------------------------------------------------------------------


def test_an_exception_on_its_way_waits_for_no_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    release, destroy = threading.Event(), dist.destroy_process_group

    def block() -> None:
        assert release.wait(30)
        destroy()

    monkeypatch.setattr(process_group, "DESTROY_SECONDS", 0.1)
    job = made("blocks")
    started = time.monotonic()
    monkeypatch.setattr(dist, "destroy_process_group", block)
    with pytest.raises(KeyboardInterrupt), job:
        raise KeyboardInterrupt
    assert time.monotonic() - started < 25  # the backend blocks for longer
    assert "MASTER_PORT" not in os.environ
    refused(r"of an earlier mingle\.init has not ended", partial(made, "again"))
    release.set()
    until(lambda: not dist.is_initialized())


def test_an_abandoned_group_is_destroyed_in_its_thread_to_the_last_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The destructor of Gloo's group waits for its operations, perhaps for minutes."""

    class Group:
        pass

    held, gone = [Group()], list[bool]()

    def end() -> None:
        group = weakref.ref(held.pop())
        gone.append(group() is None)

    monkeypatch.setattr(process_group, "current", lambda: held[0] if held else None)
    monkeypatch.setattr(dist, "destroy_process_group", end)
    process_group.abandon()
    assert gone == [True]


def test_an_interrupted_close_is_continued_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    for go_on in (lambda job: job.close(), lambda _: made("next").close()):
        job = made("interrupted")
        with monkeypatch.context() as patch:
            patch.setattr(dist, "destroy_process_group", raising(KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                job.close()
        go_on(job)
        assert not dist.is_initialized()
        assert "MASTER_PORT" not in os.environ


def test_a_backend_that_fails_to_end_hides_no_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    job = made("hides")
    with monkeypatch.context() as patch:
        patch.setattr(dist, "destroy_process_group", raising(RuntimeError("a peer has gone")))
        with pytest.raises(ZeroDivisionError), job:
            _ = 1 / 0
    assert "MASTER_PORT" not in os.environ


# --- forks ----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_child_that_leaves_the_block_ends_nothing() -> None:
    """The threads of the backend are not in the child: ending the group there would wait for them for ever."""
    with made("fork") as job:

        def child() -> str:
            signal.alarm(60)
            job.close()
            with pytest.raises(ConfigurationError) as caught:
                made("again")
            return f"left {os.environ['MASTER_PORT']}: {caught.value.cause}"

        assert in_child(child).startswith(f"left {job.master_port}: it is a fork of the process that made the group")
        assert reduced() == 1
        assert len(job.members) == 1


# --- env:// after discover ------------------------------------------------------------------------------------------


def test_env_shares_the_store_of_this_process_while_that_stands(opened: list[store.StoreServer]) -> None:
    with mingle.discover(job_name("env"), **ALONE) as job:
        (server,) = opened
        for ours in (True, False):
            dist.init_process_group("gloo", init_method="env://")
            assert shared_port() == job.master_port
            token = store.connect("127.0.0.1", job.master_port).token(server.session)
            assert (token != store.NOTHING) is ours
            assert reduced() == 1
            until(lambda: not server.held)  # it sees now and then that the group stands
            destroy_group()
            until(lambda: not answers(job.master_port))


def shared_port() -> int:
    shared: Any = dist.distributed_c10d._get_default_store()
    while hasattr(shared, "underlying_store"):
        shared = shared.underlying_store
    return int(shared.port)


# --- mingle://JOB ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "job_id", "options"),
    [
        ("mingle://resnet", "resnet", {}),
        ("mingle://", None, {}),
        ("mingle:?rank=1&world_size=2", None, {"rank": "1", "world_size": "2"}),
        ("MINGLE://Resnet", "Resnet", {}),
        ("mingle:///shared/run", "/shared/run", {}),
        ("mingle://ResNet/50 a&b=c;d", "ResNet/50 a&b=c;d", {}),
        ("mingle://resnet?rank=1&world_size=2", "resnet", {"rank": "1", "world_size": "2"}),
        ("mingle://?rank=1&world_size=2", None, {"rank": "1", "world_size": "2"}),
        ("mingle://100%25%3F%23%2f?rank=0", "100%?#/", {"rank": "0"}),
        ("mingle://%C3%A4+b", "ä+b", {}),
        ("mingle://ä", "ä", {}),
        ("mingle://a?rank=", "a", {"rank": ""}),
    ],
)
def test_urls(url: str, job_id: str | None, options: dict[str, str]) -> None:
    assert parse_url(url) == (job_id, options)


@pytest.mark.usefixtures("no_socket")
@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("mingle://a?timeout=5", "carries timeout"),
        ("mingle://why?", "MINGLE_WORLD_SIZE|world_size"),
        ("mingle://really?no=1&rank=0", "carries no"),
        ("mingle://a?rank=x&world_size=2", "rank=x in the URL is not a number"),
        ("mingle://a?rank=&world_size=2", "rank= in the URL is not a number"),
        ("mingle://a?rank=7&world_size=4", "7"),
        ("mingle://gloo?rank=0&world_size=1", "is the name of a torch backend"),
        # What torch makes of mingle://run#7 with rank= and world_size=: it takes #7 for a fragment.
        ("mingle://run?rank=0&world_size=2#7", "fix: write it as %23"),
    ],
)
def test_a_wrong_url(url: str, match: str) -> None:
    refused(match, partial(next, rendezvous_handler(url)))


@pytest.mark.usefixtures("no_socket")
@pytest.mark.parametrize("rank", [-1, 0])
def test_a_dynamic_group_of_rpc(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """As ``init_rpc`` without a world size asks for its store."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    asks = partial(torch_rendezvous._create_store_from_options, SimpleNamespace(init_method="mingle://rpc"), rank)
    assert "pass world_size= to init_rpc" in str(refused("a group without a world size", asks).remedy)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("host:29500", "looks like an address"),
        ("[::1]:29500", "looks like an address"),
        ("/resnet", "holds a slash"),
        ("resnet", None),
        ("resnet:v2", None),
        ("job%2Fx", None),
        ("host%3A29500", None),
    ],
)
def test_a_url_that_was_meant_otherwise_is_pointed_out(
    said: list[tuple[int, str]], name: str, words: str | None
) -> None:
    next(rendezvous_handler(f"mingle://{name}?rank=0&world_size=1"))
    if words is None:
        assert said == []
    else:
        ((level, text),) = said
        assert level == logging.WARNING
        assert text.startswith(f"'mingle://{name}' {words}")


@pytest.mark.parametrize(
    ("url", "job_id"), [("mingle://a/b%3Fc ä", "a/b?c ä"), ("mingle://Case Counts", "Case Counts"), ("mingle://", "e")]
)
def test_through_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, url: str, job_id: str
) -> None:
    caplog.set_level(logging.INFO, "mingle")
    monkeypatch.setenv("MINGLE_JOB_ID", "e")
    monkeypatch.setenv("MINGLE_RANK", "0")
    monkeypatch.setenv("MINGLE_WORLD_SIZE", "1")
    dist.init_process_group("gloo", init_method=url)
    assert (dist.get_rank(), dist.get_world_size(), reduced()) == (0, 1, 1.0)
    formed = f"job {job_id}: rank 0 of 1, rank 0 at 127.0.0.1:{os.environ['MASTER_PORT']}"
    assert any(text.startswith(formed) for text in caplog.messages)


def test_mingles_timeout_counts_when_it_is_shorter() -> None:
    wanted = partial(rendezvous.resolve, Arguments(job_id="x", rank=1, world_size=2, discovery_timeout=5.0))
    assert wanted(timedelta(minutes=30)).discovery_timeout == 5.0
    assert wanted(timedelta(seconds=2)).discovery_timeout == 2.0


def test_the_url_of_a_session_that_has_ended_is_refused() -> None:
    with mingle.discover("named", **ALONE) as job:
        session = job._session
        assert isinstance(session, LoneSession)
        url = f"{rendezvous.FORMED}://{session.key}"
        assert next(formed_handler(f"{url}?world_size=-1"))[1:] == (0, 1)
        refused("there is no job behind", partial(formed_handler, f"{rendezvous.FORMED}://{'0' * 16}"))
    refused("there is no job behind", partial(formed_handler, url))


def test_the_store_has_the_patience_that_torch_was_told() -> None:
    store_handed, *place = next(rendezvous_handler("mingle://told?rank=0&world_size=1", timeout=timedelta(seconds=7)))
    assert place == [0, 1]
    assert store_handed.timeout == timedelta(seconds=7)


def test_a_job_whose_store_torch_cannot_open_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    close, failing = LoneSession.close, list[bool]()
    monkeypatch.setattr(LoneSession, "entry", raising(RuntimeError("torch is broken")))
    monkeypatch.setattr(LoneSession, "close", lambda self, **how: (failing.append(how["failing"]), close(self, **how)))
    with pytest.raises(RuntimeError, match="torch is broken"):
        next(rendezvous_handler("mingle://broken?rank=0&world_size=1", timeout=timedelta(seconds=5)))
    assert "MASTER_PORT" not in os.environ
    assert failing == [True], "other ranks take it for a loss"


def fail(*_: object, **__: object) -> None:
    raise RuntimeError("gloo found no device")


@pytest.fixture
def _nothing_is_counted() -> None:
    dist.distributed_c10d._world.group_count = 0


def count_of_groups() -> int:
    return int(dist.distributed_c10d._world.group_count)


@pytest.mark.usefixtures("_nothing_is_counted")
@pytest.mark.parametrize(
    "cause",
    [
        {"timeout": timedelta(seconds=0.2)},
        {"init_method": "mingle://gloo"},
        {"init_method": "mingle://why?timeout=3", "rank": -1, "world_size": -1},
    ],
    ids=["the others are late", "refused", "a wrong URL"],
)
def test_a_rank_that_fails_alone_is_not_counted(monkeypatch: pytest.MonkeyPatch, cause: dict[str, Any]) -> None:
    """Torch numbers a group before the rendezvous, and the number is in the store's keys: the others would wait."""
    monkeypatch.setenv("MINGLE_PORT", str(free_udp_port()))
    arguments = {"init_method": f"mingle://{job_name('alone')}", "rank": 1, "world_size": 2, **cause}
    with pytest.raises(MingleError):
        dist.init_process_group("gloo", **arguments)
    assert count_of_groups() == 0


@pytest.mark.usefixtures("_nothing_is_counted")
def test_a_group_that_torch_can_not_make_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    for call in (partial(through_the_url, "gloo"), partial(made, "uncounted")):
        with monkeypatch.context() as patch:
            patch.setattr(dist.distributed_c10d, "ProcessGroupGloo", fail)
            with pytest.raises(RuntimeError, match="gloo found no device"):
                call()
        assert count_of_groups() == 0
    assert "MASTER_PORT" not in os.environ
    with made("counted"):
        assert reduced() == 1
        assert count_of_groups() == 1


@pytest.mark.usefixtures("_nothing_is_counted")
def test_only_torchs_count_of_this_very_call_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    world = dist.distributed_c10d._world
    with pytest.raises(ConfigurationError):
        next(torch_rendezvous.rendezvous("mingle://gloo", 0, 1))
    assert world.group_count == 0, "nothing has been counted"

    def counts(*_: object, **__: object) -> None:
        world.group_count += 1  # as another thread may
        raise ConfigurationError("refused")

    monkeypatch.setattr(rendezvous, "resolve", counts)
    with pytest.raises(ConfigurationError, match="refused"):
        through_the_url("gloo")
    assert world.group_count == 2


@pytest.mark.usefixtures("foreign_group")
def test_no_count_is_taken_back_while_a_group_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call has failed because another thread, or a handler of a signal, has made one meanwhile."""
    monkeypatch.setattr(dist.distributed_c10d._world, "group_count", 5)
    process_group.take_back_count("4")
    assert count_of_groups() == 5


def awaits_group() -> bool:
    """Whether the present session has handed out its store for a group that does not stand."""
    assert rendezvous._active is not None
    return rendezvous._active.awaits_group


def test_a_session_knows_whether_torch_has_made_the_group_that_it_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    handed_out = torch_rendezvous.rendezvous("mingle://knowing", 0, 1)
    next(handed_out)
    assert not awaits_group(), "torch's RPC makes no group"
    through_the_url("gloo")
    assert not awaits_group()
    destroy_group()
    monkeypatch.setattr(dist.distributed_c10d, "ProcessGroupGloo", fail)
    with pytest.raises(RuntimeError, match="gloo found no device") as caught:
        through_the_url("gloo")
    assert awaits_group(), "while the traceback keeps torch's generator"
    del caught
    assert awaits_group()


def test_a_loss_of_rank_zero_tells_more_than_what_torch_says(monkeypatch: pytest.MonkeyPatch) -> None:
    lost: list[MingleError | None] = [None, MingleError("rank 0 was lost")]
    monkeypatch.setattr(LoneSession, "loss", lambda _session: lost.pop())
    monkeypatch.setattr(dist, "init_process_group", fail)
    with pytest.raises(MingleError, match="rank 0 was lost") as caught:
        made("loss")
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(RuntimeError, match="gloo found no device"):
        made("loss")
    assert "MASTER_PORT" not in os.environ
