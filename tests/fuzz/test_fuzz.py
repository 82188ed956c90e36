"""A few seconds of what ``make fuzz`` does for long, and proof that it would notice."""

from __future__ import annotations

import json
import random
import typing
from collections.abc import Collection
from typing import Any

import msgspec
import pytest

from mingle.check import messages
from mingle.elastic.agent import Agent
from mingle.network import local_relay
from mingle.protocol.session.registrar import Registrar
from mingle.wire import frame_codec, frames
from mingle.wire.authentication import JobKey
from tests.support.levels import soaking

from . import __main__ as fuzzing
from . import targets
from .machines import KINDS, Theatre
from .targets import TARGETS

SECONDS = 60.0 if soaking() else 12.0
STEPS = 20_000


@pytest.mark.slow
@pytest.mark.soak
def test_hostile_bytes_break_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    done = fuzzing.fuzz(float("inf"), SECONDS, seed=random.Random(SECONDS).getrandbits(32))
    assert done > 100 * SECONDS
    assert "no exception" in capsys.readouterr().out


@pytest.mark.parametrize("name", TARGETS)
def test_every_target_accepts_its_corpus_and_the_mutations_differ(name: str) -> None:
    target, rng = TARGETS[name], random.Random(1)
    for seed in target.seeds():
        target.check(seed)
    make = target.maker()
    assert len({make(rng) for _ in range(200)}) > 100


@pytest.mark.parametrize("kind", KINDS)
def test_the_machines_come_far(kind: str) -> None:
    """Fuzz that every machine turned away at its door would show little."""
    far = {"host": {"confirming", "sealed", "running"}, "rank": {"seated", "confirmed", "acknowledged", "formed"}}
    wanted = far.get(kind, {"seeking", "confirming", "running", "formed"})
    assert _play(Theatre(kind, random.Random(2)), wanted) >= wanted


def test_agents_begin_round_after_round() -> None:
    theatre, rounds = Theatre("agent", random.Random(5)), set[tuple[int, int]]()
    for _ in range(STEPS):
        theatre.step()
        assert isinstance(theatre.machine, Agent)
        if (begun := theatre.machine.memory.round) is not None:
            rounds.add((min(begun.number, 2), begun.size))
    assert rounds >= {(number, size) for number in range(3) for size in (1, 2)}


@pytest.mark.parametrize("kind", KINDS)
def test_recorded_events_replay_to_the_same_state(kind: str) -> None:
    theatre = Theatre(kind, random.Random(3))
    for _ in range(500):
        theatre.step()
    machine = theatre.recording.replay()
    assert machine.stage() == theatre.machine.stage()
    started = [name for name, *_ in theatre.recording.steps].index("handle")
    del theatre.recording.steps[started:-1:2]
    with pytest.raises((AssertionError, KeyError, StopIteration)):
        theatre.recording.replay()


def _decode_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JobKey, "verify", lambda *_: True)


def _take_any_number(monkeypatch: pytest.MonkeyPatch) -> None:
    class Boundless(frames.Running, frozen=True, kw_only=True, tag="running", omit_defaults=True):
        seconds: float = 0.0

    known = [each for each in typing.get_args(frames.AnyFrame) if each is not frames.Running]
    monkeypatch.setattr(frame_codec, "_decoder", msgspec.msgpack.Decoder(typing.Union[(*known, Boundless)]))


def _keep_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_codec.FrameReader, "_next_frame", lambda _: None)
    monkeypatch.setattr(targets, "MAX_FRAME_BYTES", 100)


def _hand_everything_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_relay, "_check_unicast", lambda *_: None)


def _believe_every_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "question_of", lambda data: msgspec.convert(json.loads(data), messages.Question))


@pytest.mark.parametrize(
    ("plant", "target"),
    [
        (_believe_every_question, "check-question"),
        (_decode_everything, "signed-datagram"),
        (_keep_everything, "frames"),
        (_hand_everything_on, "local-message"),
        (_take_any_number, "json-told"),
    ],
)
def test_a_planted_bug_of_a_decoder_is_found(plant: Any, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, ValueError, OSError, RecursionError)):
        fuzzing.decoders(STEPS, random.Random(7), only=target)


def test_a_planted_bug_of_a_machine_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def pong(_: Registrar, conn: int, *_args: object, **_more: object) -> None:
        raise KeyError(conn)  # nobody was asked: no honest peer says it

    monkeypatch.setattr(Registrar, "pong", pong)
    with pytest.raises(KeyError):
        _play(Theatre("host", random.Random(4)))


def _play(theatre: Theatre, wanted: Collection[str] = ()) -> set[str]:
    """Return the stages that it has come to, all of them or as soon as the wanted ones are among them."""
    stages = set[str]()
    for _ in range(STEPS):
        if wanted and stages.issuperset(wanted):
            break
        theatre.step()
        stages.add(theatre.machine.stage().partition(",")[0])
    return stages
