"""What cannot form says so: to every rank, in time, with the names of those concerned."""

from __future__ import annotations

import functools

import pytest

from mingle.errors import AuthenticationError, ConflictError, DiscoveryTimeoutError, MingleError
from mingle.protocol.session.conflicts import ConflictingHosts
from mingle.protocol.session.phases import Committed
from mingle.protocol.session.seats import Seats
from tests.lan.gathering import Gathering, failure_of, outcome_of
from tests.lan.planting import Rule, always, expect_found
from tests.lan.process import Process


def expect(process: Process, error: type[MingleError], *words: str) -> str:
    """Demands this failure with these words in its text; returns the text."""
    failure = failure_of(process)
    assert type(failure) is error, f"{process.name}: {failure!r}"
    assert failure.cause
    assert failure.remedy
    for word in words:
        assert word in str(failure), f"{word!r} is not in {failure}"
    return str(failure)


@pytest.mark.parametrize("loss", [0.0, 0.3])
def test_a_rank_that_never_comes_is_named_by_all(loss: float, seeds: range) -> None:
    for seed in seeds:
        gathering = Gathering(seed, loss=loss, timeout=20)
        gathering.host(at=gathering.rng.uniform(0, 3))
        for rank in (1, 3):
            gathering.member(rank, at=gathering.rng.uniform(0, 3))
        gathering.run()
        for process in gathering.processes:
            expect(process, DiscoveryTimeoutError, "missing ranks: 2", "within 20 s")
            assert process.elapsed < 20.1


def test_a_rank_that_came_and_went_is_named_apart() -> None:
    gathering = Gathering(1, timeout=20)
    gathering.host()
    gathering.member(1)
    gone = gathering.member(2)
    gathering.world.run(3.0)
    gone.kill()
    gathering.run()
    for process in gathering.processes[:2]:
        text = expect(process, DiscoveryTimeoutError, "missing ranks: 3", "came and went: rank 2 on host m2")
        assert "pid 103" in text


def test_no_rank_0_at_all(seeds: range) -> None:
    for seed in seeds:
        gathering = Gathering(seed, timeout=10)
        for rank in (1, 2, 3):
            gathering.member(rank)
        gathering.run()
        for process in gathering.processes:
            expect(process, DiscoveryTimeoutError, "rank 0 was not found", "others that look for the same job")
            assert 10.0 <= process.elapsed < 10.1


def test_a_host_that_hangs_is_said_to_hang() -> None:
    gathering = Gathering(1, timeout=10)
    host, member = gathering.host(), gathering.member(1)
    gathering.world.run(2.0)
    host.stop()
    gathering.world.run(20.0)
    expect(member, DiscoveryTimeoutError, "does not answer", "stopped")


@pytest.mark.parametrize("loss", [0.0, 0.3])
def test_the_same_rank_twice(loss: float, seeds: range) -> None:
    for seed in seeds:
        gathering = Gathering(seed, loss=loss)
        gathering.host()
        seated = gathering.member(1, "m1")
        newcomer = gathering.member(1, "m9", at=2.0)
        gathering.world.run(30.0)
        text = expect(newcomer, ConflictError, "already taken", "rank 1 on host m1 (10.0.0.2), pid 102")
        assert "started twice" in text
        assert loss or newcomer.elapsed < 5.0
        assert seated.alive
        others = [gathering.member(2), gathering.member(3)]
        gathering.run()
        gathering.expect_formed([gathering.processes[0], seated, *others])


def test_rank_that_is_given_twice_is_found() -> None:
    run = functools.partial(test_the_same_rank_twice, 0.0, range(1))
    expect_found("give_a_rank_twice", Rule(Seats, "holder", always(None)), run=run, finding="has not failed")


def test_a_stopped_rank_is_replaced_and_learns_of_it(seeds: range) -> None:
    for seed in seeds:
        gathering = Gathering(seed)
        host, stopped = gathering.host(), gathering.member(1, "m1")
        gathering.world.run(2.0)
        stopped.stop()
        newcomer = gathering.member(1, "m9")
        gathering.world.run(5.0)
        assert newcomer.identity.member in host.host.registrar.seats
        stopped.cont()
        gathering.world.run(5.0)
        expect(stopped, ConflictError, "already taken", "host m9")
        others = [gathering.member(2), gathering.member(3)]
        gathering.run()
        gathering.expect_formed([host, newcomer, *others])


def two_rank_0s_that_know_each_other(seed: int) -> None:
    """The only other rank comes while each of them waits for the other to go."""
    gathering = Gathering(seed, size=2)
    gathering.lan.loss = gathering.rng.choice((0.0, 0.0, 0.3))
    gathering.host("m0")
    gathering.host("m9", at=gathering.rng.uniform(0, 0.1))
    gathering.member(1, at=gathering.rng.uniform(1.0, 1.7))
    gathering.run()
    for process in gathering.processes:
        expect(process, ConflictError, "more than one rank 0")


def test_two_rank_0s_that_know_each_other_form_no_job(seeds: range) -> None:
    for seed in seeds:
        two_rank_0s_that_know_each_other(seed)


def test_host_that_goes_on_beside_another_one_is_found() -> None:
    seam = Rule(ConflictingHosts, "any_alive", always(False))
    run = functools.partial(two_rank_0s_that_know_each_other, 0)
    expect_found("go_on_beside_another_host", seam, run=run, finding="has not failed")


@pytest.mark.parametrize("deaf", [False, True])
def test_two_rank_0s(deaf: bool, seeds: range) -> None:
    for seed in seeds:
        gathering = Gathering(seed, size=5)
        one = gathering.host("m0")
        other = gathering.host("m9", at=gathering.rng.choice((0.0, gathering.rng.uniform(0, 1))))
        workers = [gathering.member(rank) for rank in (1, 2, 3)]
        if deaf:
            gathering.lan.deaf.add(("m0", "m9"))
        gathering.run()
        expect(one, ConflictError, "more than one rank 0", "host m9")
        expect(other, ConflictError, "more than one rank 0", "host m0")
        assert one.elapsed < 5.0
        assert other.elapsed < 5.0
        for worker in workers:
            expect(worker, ConflictError, "more than one rank 0")


def test_a_rank_0_that_goes_in_time_is_no_conflict(seeds: range) -> None:
    for seed in seeds:
        gathering = Gathering(seed)
        old, new = gathering.host("m0"), gathering.host("m9", at=1.0)
        workers = [gathering.member(rank, at=gathering.rng.uniform(0, 2)) for rank in (1, 2)]
        workers.append(gathering.member(3, at=2.5))
        gathering.world.after(2.0, old.kill)
        gathering.run()
        gathering.expect_formed([new, *workers], within=6.0)


def test_different_world_sizes() -> None:
    gathering = Gathering(1)
    gathering.host()
    odd = gathering.member(1, size=8)
    gathering.world.run(3.0)
    expect(odd, ConflictError, "world_size=4", "world_size=8", "host m0 (10.0.0.1), pid 101")
    rest = [gathering.member(rank) for rank in (1, 2, 3)]
    gathering.run()
    gathering.expect_formed([gathering.processes[0], *rest])


def test_some_ranks_given_and_some_not() -> None:
    gathering = Gathering(1)
    gathering.host()
    without = gathering.elector("m5")
    gathering.world.run(3.0)
    expect(without, ConflictError, "ranks mixed", "has no rank")


def test_a_rank_out_of_range_and_another_kind() -> None:
    gathering = Gathering(1)
    gathering.host()
    large, agent = gathering.member(7, "m7"), gathering.member(1, "m1", kind="agents")
    gathering.world.run(3.0)
    expect(large, ConflictError, "rank out of range")
    expect(agent, ConflictError, "kind", "torchrun")


@pytest.mark.parametrize("hosted", [True, False])
def test_a_job_that_runs_already(hosted: bool, seeds: range) -> None:
    for seed in seeds:
        gathering = Gathering(seed, size=3, duplicates=True)
        old = gathering.everybody()
        gathering.world.run(2.0)
        new = [gathering.member(rank, f"n{rank}") for rank in (1, 2)]
        if hosted:
            new.append(gathering.host("n0"))
        began = gathering.now
        gathering.world.run(6.0)
        for process in new:
            assert any("has been running for" in notice for notice in process.notices), process.name
        gathering.run()
        for process in new:
            text = expect(process, ConflictError, "has been running for", "3 ranks", "host m0 (10.0.0.1), pid 101")
            assert "rank 2 on host m2" in text
            assert 29.0 < process.elapsed < 33.0
        assert gathering.now - began < 33.0
        assert all(process.alive for process in old)


def test_patience_with_a_running_job_ends_at_the_timeout() -> None:
    gathering = Gathering(1, size=2)
    gathering.everybody()
    gathering.world.run(2.0)
    new = [gathering.host("n0", timeout=8), gathering.member(1, "n1", timeout=8)]
    gathering.run()
    for process in new:
        assert process.elapsed < 8.1
        expect(process, ConflictError, "has been running for")


@pytest.mark.parametrize("how", ["closed", "killed", "powered off"])
def test_a_job_that_ends_makes_room(how: str, seeds: range) -> None:
    for seed in seeds:
        gathering = Gathering(seed, size=3, duplicates=True)
        old = gathering.everybody()
        gathering.world.run(2.0)
        new = [gathering.host("n0"), *(gathering.member(rank, f"n{rank}") for rank in (1, 2))]
        gathering.world.run(10.0)
        assert not any(process.finished for process in new)
        for process in reversed(old):
            if how == "powered off":
                gathering.network.cut(process.machine)
            if how == "closed":
                process.close()
            else:
                process.kill()
        ended = gathering.now
        gathering.run()
        gathering.expect_formed(new)
        # A machine that is gone without a word is noticed by keepalive, then proved silent for ten seconds.
        assert gathering.now - ended < (25.0 if how == "powered off" else 3.0)


def test_a_job_that_has_ended_is_not_in_the_way(seeds: range) -> None:
    for seed in seeds:
        gathering = Gathering(seed, size=3, duplicates=True)
        old = gathering.everybody()
        gathering.world.run(2.0)
        for process in old:
            process.close()
        new = [gathering.host("m0"), *(gathering.member(rank) for rank in (1, 2))]
        gathering.run()
        gathering.expect_formed(new, within=0.5)


def test_two_jobs_at_once(seeds: range) -> None:
    for seed in seeds:
        gathering = Gathering(seed, size=3, loss=0.2)
        jobs = [
            [
                gathering.host("m0", job=job),
                *(gathering.member(rank, job=job, at=gathering.rng.uniform(0, 2)) for rank in (1, 2)),
            ]
            for job in ("red", "blue")
        ]
        gathering.run()
        for members in jobs:
            gathering.expect_formed(members)
        assert outcome_of(jobs[0][0]).session != outcome_of(jobs[1][0]).session


def test_a_mistyped_job_id_is_named_by_both_sides(seeds: range) -> None:
    for seed in seeds:
        gathering = Gathering(seed, size=2, timeout=10)
        host, member = gathering.host(job="resnet50"), gathering.member(1, job="resnet5O")
        gathering.run()
        expect(host, DiscoveryTimeoutError, "missing ranks: 1", "'resnet5O' by host m1 (10.0.0.2), pid 102")
        expect(member, DiscoveryTimeoutError, "'resnet50' by host m0 (10.0.0.1), pid 101", "mistyped")


def test_another_attempt_is_named_and_not_joined() -> None:
    gathering = Gathering(1, size=2, timeout=5)
    host, member = gathering.host(attempt="1"), gathering.member(1, attempt="2")
    gathering.run()
    expect(host, DiscoveryTimeoutError, "missing ranks: 1", "'2' by")
    expect(member, DiscoveryTimeoutError, "'1' by")


def test_a_secret_on_all(seeds: range) -> None:
    for seed in seeds:
        gathering = Gathering(seed, secret=b"s3cret", loss=0.2)
        gathering.everybody()
        gathering.run()
        gathering.expect_formed()


@pytest.mark.parametrize("keys", [(b"one", None), (None, b"one"), (b"one", b"two")])
def test_secrets_that_differ(keys: tuple[bytes | None, bytes | None], seeds: range) -> None:
    for seed in seeds:
        gathering = Gathering(seed, size=2, timeout=6)
        host, member = gathering.host(secret=keys[0]), gathering.member(1, secret=keys[1])
        gathering.run()
        for process in (host, member):
            expect(process, AuthenticationError, "MINGLE_SECRET")


def test_another_secured_job_nearby_is_no_sign_of_a_wrong_secret() -> None:
    gathering = Gathering(1, size=2, timeout=8)
    lonely = gathering.member(1, job="red", secret=b"one")
    other = gathering.host(job="blue", secret=b"two")
    gathering.run()
    expect(lonely, DiscoveryTimeoutError, "rank 0 was not found")
    expect(other, DiscoveryTimeoutError, "missing ranks: 1")


def test_a_member_that_gives_up_while_go_is_under_way_is_a_loss(seeds: range) -> None:
    for seed in seeds:
        gathering = Gathering(seed, size=3)
        host, hasty, _ = gathering.everybody([0.0, 0.0, 0.5])

        def decided(host: Process = host) -> bool:
            return host.phase is Committed

        gathering.world.when(decided, hasty.give_up)
        gathering.world.run(20.0)
        assert isinstance(hasty.failure, DiscoveryTimeoutError)
        assert len(host.closed_stores) == 1
