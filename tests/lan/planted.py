"""The registry of planted mistakes: each breaks one rule of the product at a named seam, and schedules must find it.

`tests/README.md` says how to plant one. ``python -m tests.lan planted`` looks for all of them, and prints a table.
"""

from __future__ import annotations

import functools
from typing import Any
from weakref import WeakKeyDictionary

from msgspec import structs

from mingle.elastic import leases
from mingle.elastic.agent import Agent
from mingle.elastic.host import ElasticHost
from mingle.elastic.leases import LEASE_SECONDS, Binding, Hold, Leases
from mingle.elastic.member import ElasticMember
from mingle.elastic.memory import Memory
from mingle.elastic.quorum import Nodes, Policy, Quorum
from mingle.elastic.rounds import Rounds
from mingle.protocol.election import Attendance, Competition, Patience
from mingle.protocol.events import Event, Heard, TimerDue
from mingle.protocol.host import Host
from mingle.protocol.links.callers import Callers
from mingle.protocol.links.prover import Prover
from mingle.protocol.machine import Identity
from mingle.protocol.node import Node
from mingle.protocol.pacing import Seeker
from mingle.protocol.session import mesh_proof
from mingle.protocol.session.mesh_proof import Proof
from mingle.protocol.session.network_choice import NetworkChoice
from mingle.protocol.session.phases import Acknowledging, Committed, Confirming, Open, State
from mingle.protocol.session.registrar import Registrar
from mingle.protocol.session.seats import Seated
from mingle.protocol.sessions import KnownSession
from mingle.wire import frames
from mingle.wire.datagrams import Offer, Seek
from tests.lan.agents import AgentProcess
from tests.lan.impostors import a_job_with_impostors, agents_with_impostors
from tests.lan.meshes import a_mesh_with_stopped_processes
from tests.lan.planting import Act, Level, Mistake, Rule, Run, Search, always, look_for, nothing
from tests.lan.seeds import KINDS

FAMILIES: dict[str, Run] = {
    **{name: (lambda seed, kind=kind: kind(seed).run()) for name, kind in KINDS.items()},
    "impostors": functools.partial(a_job_with_impostors, given=True),
    "impostors of agents": agents_with_impostors,
    "mesh with stopped processes": a_mesh_with_stopped_processes,
}
"""The families of schedules, by name."""


LEVELS: tuple[Level, ...] = ("quick", "all", "soak")
"""The levels of the suite; each has the mistakes of those before it, too."""


def search(mistake: Mistake, *, from_zero: bool = False) -> Search:
    """Look for a mistake of the registry; ``from_zero``: also among the seeds before its first."""
    seeds = range(0 if from_zero else mistake.first, mistake.first + mistake.seeds)
    return look_for(mistake.name, mistake.seams, FAMILIES[mistake.family], seeds, mistake.finding)


# --- the commit -------------------------------------------------------------------------------------------------------

LATE = "no GO 40 s after the end of the chaos|without GO 40 s after"
USED_AGAIN = "was voided and is used again|an epoch number went back"


def without_waiting(right: bool, registrar: Registrar, state: State) -> bool:
    return right or (isinstance(state, Confirming) and not registrar.held)


def that_of_the_voided_epoch(right: int, registrar: Registrar) -> int:
    return max(registrar.state.epoch, 1) if isinstance(registrar.state, Open) else right


_ACKNOWLEDGED: WeakKeyDictionary[Registrar, set[bytes]] = WeakKeyDictionary()
"""The members that have ever acknowledged."""


def remember_for_ever(genuine: Any, registrar: Registrar, conn: int, now: float) -> None:
    if (seat := registrar.seats.at(conn)) is not None:
        _ACKNOWLEDGED.setdefault(registrar, set()).add(seat.member)
    genuine(registrar, conn, now)


def once_all_have_ever(right: bool, registrar: Registrar, state: State) -> bool:
    waits = isinstance(state, Acknowledging) and not registrar.held
    ever = _ACKNOWLEDGED.get(registrar, set())
    return right or (waits and all(seat.member in ever for seat in registrar.seats.behind(state.barrier)))


def without_the_last(right: bool, registrar: Registrar, state: State) -> bool:
    waits = isinstance(state, Acknowledging) and not registrar.held
    return right or (waits and len(registrar.seats.behind(state.barrier)) == 1)


def awaits_acks(registrar: Registrar, event: str, reason: str, now: float) -> bool:
    return isinstance(registrar.state, Acknowledging)


def say_void_and_go_on(_: Any, registrar: Registrar, event: str, reason: str, now: float) -> None:
    state = registrar.state
    assert isinstance(state, Acknowledging)
    for conn in registrar.seats.connections():
        registrar._connections.send(conn, frames.Void(session=registrar.session, epoch=state.epoch, reason=reason))
    state.ends = now + registrar.admission.acknowledge_seconds
    for seat in registrar.seats.values():
        seat.due = state.ends
    registrar._advance(now)


SEAL_WITHOUT_CONFIRMED = (Rule(Registrar, "may_seal", without_waiting),)
REUSE_VOIDED_EPOCHS = (Rule(Registrar, "next_epoch", that_of_the_voided_epoch),)
TRUST_MEMBER_IDS = (Rule(Seated, "belongs_to", always(True)),)

COMMIT = [
    Mistake("seal_without_confirmed", "ranks", SEAL_WITHOUT_CONFIRMED, "has sealed without a word of|GO, but"),
    Mistake("reuse_voided_epochs", "ranks", REUSE_VOIDED_EPOCHS, USED_AGAIN),
    Mistake(
        "never_ask_by_other_means_than_multicast",
        "ranks",
        (Rule(Seeker, "is_late", always(False)),),
        "not formed 40 s after the end of the chaos",
    ),
    Mistake(
        "count_ack_of_an_earlier_epoch",
        "ranks",
        (Act(Registrar, "acknowledged", remember_for_ever), Rule(Registrar, "may_go", once_all_have_ever)),
        "GO, but",
        seeds=400,
        first=90,
        level="all",
    ),
    Mistake("go_with_one_ack_missing", "ranks", (Rule(Registrar, "may_go", without_the_last),), "GO, but"),
    Mistake(
        "go_on_after_void",
        "ranks",
        (Act(Registrar, "_void", say_void_and_go_on, when=awaits_acks),),
        "GO, but",
    ),
    Mistake("give_a_seat_to_who_knows_its_member_id", "impostors", TRUST_MEMBER_IDS, ""),
    Mistake("give_the_seat_of_an_agent_to_who_knows_its_member_id", "impostors of agents", TRUST_MEMBER_IDS, ""),
]

# --- the election -----------------------------------------------------------------------------------------------------


def would_lose(competition: Competition, offer: Offer, *_: object, **__: object) -> bool:
    return competition.can_close() and competition._candidacy.loses_to(offer)


def is_unreachable(competition: Competition, session: KnownSession, frame: frames.AnyFrame, now: float) -> bool:
    return isinstance(frame, frames.Unreachable)


def close_at_once(
    _: object, competition: Competition, offer: Offer, now: float, *, interface: str = "", sender: str = ""
) -> None:
    node = competition._close_for.__self__  # type: ignore[attr-defined]
    node._end_host("it closes for another host", offer)
    node.joiner.search.look_again(offer, interface, now)


def close_and_go_on(genuine: Any, node: Node, session: KnownSession, now: float) -> None:
    host = node.host
    assert host is not None
    state = host.state
    genuine(node, session, now)
    host.state, node.host = state, host


def was_asked_to_lead(node: Node, session: KnownSession, now: float) -> bool:
    host = node.host
    asked = host is not None and session.offer.host in host.registrar.handover.asked
    return asked and node.joiner.session is None


def join_first(_: object, node: Node, session: KnownSession, now: float) -> None:
    node.sightings.policy = node.joiner.search
    node.joiner.search.look_again(session.offer, session.paths[0].interface, now)


def another_when_it_comes_back(right: frames.Join, *_: object) -> frames.Join:
    return structs.replace(right, order=b"\x01\xff") if right.order and right.token else right


def once_all_are_counted(right: float, patience: Patience, _: float, __: float | None, now: float) -> float:
    return right if patience.attendance.complete(now) else right + 1.0


def at_once_if_all_are_there(right: float, patience: Patience, _: float, __: float | None, now: float) -> float:
    return now if patience.attendance.complete(now) else right


_HEARD: WeakKeyDictionary[Node, set[bytes]] = WeakKeyDictionary()


def is_first_question(node: Node, event: Heard, now: float) -> bool:
    message, heard = event.message, _HEARD.setdefault(node, set())
    if not isinstance(message, Seek) or message.member in heard or message.member == node.identity.member:
        return False
    heard.add(message.member)
    return node._patience.ends_at is not None


def begin_anew(genuine: Any, node: Node, event: Heard, now: float) -> None:
    genuine(node, event, now)
    node._patience.begin(now)


HOSTS_AND_JOINS = "hosts a session and has asked another host"
WAITS = "has looked for a host for .* and not become one"

ELECTION = [
    Mistake(
        "seal_without_confirmed_where_ranks_are_assigned",
        "election",
        SEAL_WITHOUT_CONFIRMED,
        f"has sealed without a word of|{LATE}",
        level="all",  # the schedules with ranks look for it on every level, and sooner
    ),
    Mistake("reuse_voided_epochs_where_ranks_are_assigned", "election", REUSE_VOIDED_EPOCHS, USED_AGAIN, first=9),
    Mistake(
        "close_for_a_lower_id_that_has_proved_nothing",
        "election",
        (Act(Competition, "call", close_at_once, when=would_lose),),
        "which has proved nothing",
    ),
    Mistake("go_on_after_closed", "election", (Act(Node, "_close_for", close_and_go_on),), HOSTS_AND_JOINS),
    Mistake(
        "join_the_first_in_order_before_closing_for_it",
        "election",
        (Act(Node, "_close_for", join_first, when=was_asked_to_lead),),
        HOSTS_AND_JOINS,
    ),
    Mistake(
        "have_another_order_when_it_comes_back",
        "election",
        (Rule(Identity, "join", another_when_it_comes_back),),
        "has another order than at its start",
    ),
    Mistake(
        "win_although_the_other_host_says_unreachable",
        "election",
        (Act(Competition, "rival_said", nothing, when=is_unreachable),),
        LATE,
        first=11,
    ),
    Mistake(
        "do_not_say_that_the_winner_is_unreachable",
        "election",
        (Act(Host, "answer_host", nothing),),
        LATE,
        first=11,
    ),
    Mistake("wait_until_all_are_counted", "election", (Rule(Patience, "elects_at", once_all_are_counted),), WAITS),
    Mistake(
        "be_patient_anew_for_each_question",
        "election",
        (Act(Node, "_heard", begin_anew, when=is_first_question),),
        WAITS,
    ),
    Mistake(
        "become_the_host_with_the_first_question",
        "election",
        (Rule(Patience, "elects_at", at_once_if_all_are_there),),
        "hosts 0.* s after its question",
    ),
    Mistake(
        "end_the_patience_although_a_lower_id_is_there",
        "election",
        (Rule(Attendance, "comes_first", always(True)),),
        "hosts early without the lowest id",
    ),
    Mistake(
        "end_the_patience_although_a_host_has_answered",
        "election",
        (Rule(Attendance, "has_host", always(False)),),
        "hosts early, .* after an OFFER",
        first=17,
    ),
]

# --- agents -----------------------------------------------------------------------------------------------------------


def silent_members(host: ElasticHost, now: float) -> list[int]:
    """Return the connections of the members that have not answered for 4 s, and still count."""
    answered = {conn: host.quorum.leases.until(member) - LEASE_SECONDS for member, conn in host._members()}
    return [conn for conn, at in answered.items() if now - at > 4.0 and conn in host._callers]


def hang_up_on_them(genuine: Any, host: ElasticHost, now: float) -> None:
    for conn in silent_members(host, now):
        host._callers.hang_up(conn)
    genuine(host, now)


def by_state(right: Hold, agent: Agent) -> Hold:
    return Hold() if agent.outcome is None else Hold(float("inf"), right.proved_at)


BELIEVE_BY_STATE = Rule(Agent, "hold", by_state)
"""Take a session for held until something has ended it, whatever the clock says."""

_LACKING: WeakKeyDictionary[ElasticHost, float] = WeakKeyDictionary()


def lacks_its_quorum(host: ElasticHost, now: float) -> bool:
    lacks = host.running and now >= host.quorum.kept_until()
    if not lacks:
        _LACKING.pop(host, None)
    return lacks


def wait_three_seconds(genuine: Any, host: ElasticHost, now: float) -> None:
    if now >= _LACKING.setdefault(host, now) + 3.0:
        genuine(host, now)


_CHECK = Agent.check


def check_and_handle(genuine: Any, agent: Agent, event: Event, now: float) -> None:
    _CHECK(agent, now)
    genuine(agent, event, now)


def for_three_seconds_less(genuine: Any, binding: Binding, session: bytes, now: float) -> None:
    genuine(binding, session, now - 3.0)


def half(_: int, nodes: Nodes) -> int:
    return max(nodes.minimum, nodes.maximum // 2)


def as_without_that_mistake(_: int, nodes: Nodes) -> int:
    return nodes.maximum - max(nodes.minimum, nodes.maximum // 2 + 1) + 1


def whoever_has_a_seat(right: float, *_: object) -> float:
    return float("inf") if right > float("-inf") else right


def is_small_and_experienced(quorum: Quorum) -> bool:
    return quorum.small and quorum._experienced


def believe_in_a_quorum(genuine: Any, quorum: Quorum) -> None:
    genuine(quorum)
    quorum.had_quorum = True


LOOK_AFTER_THE_SOCKETS = (
    Act(Agent, "check", nothing),
    Act(Agent, "handle", check_and_handle, when=lambda _, event, __: isinstance(event, TimerDue)),
    BELIEVE_BY_STATE,
)
SLEEPING_CLOCK = (
    Rule(AgentProcess, "now", lambda right, process: right - process.asleep),
    Rule(AgentProcess, "when", lambda _, process, due: (due + process.asleep) / process.rate),
)
CONFIRM_WHILE_BOUND = Rule(Binding, "elsewhere", always(False))
TAKE_A_RESET_FOR_AN_END = Rule(ElasticMember, "is_freed_by", always(True))
DATE_THE_BINDING_BEFORE = Act(Binding, "renew", for_three_seconds_less)
COUNT_WHO_HAS_A_SEAT = Rule(Leases, "until", whoever_has_a_seat)
HANG_UP_ON_WHO_COUNTS = (
    Act(ElasticHost, "_keep_in_touch", hang_up_on_them, when=silent_members),
    Act(Callers, "ping", nothing, when=lambda callers, conn, _: conn not in callers),
)
FOUND_YOUNG = Rule(Quorum, "is_grown", always(True))

HOLD = "two hosts hold|although a later session|two sessions have a round"

AGENTS = [
    Mistake(
        "never_step_down_for_another_session",
        "agents",
        (Rule(ElasticHost, "yields_to", always(False)),),
        "not together",
        seeds=831,
        first=274,
        level="all",
    ),
    Mistake(
        "allow_a_grace_after_the_quorum_is_lost",
        "agents",
        (Act(ElasticHost, "check", wait_three_seconds, when=lacks_its_quorum), BELIEVE_BY_STATE),
        HOLD,
        seeds=225,
        first=67,
        level="all",
    ),
    Mistake(
        "found_with_half",
        "agents",
        (Rule(Nodes, "founders", half), Rule(Nodes, "keepers", as_without_that_mistake)),
        HOLD,
        first=138,
        level="all",
    ),
    Mistake(
        "keep_with_one_less",
        "agents",
        (Rule(Policy, "to_keep", lambda right, *_, **__: right - 1),),
        HOLD,
        seeds=225,
        first=76,
    ),
    Mistake(
        "count_everybody_who_has_a_seat",
        "agents",
        (COUNT_WHO_HAS_A_SEAT,),
        HOLD,
        seeds=1866,
        first=619,
        level="soak",
    ),
    Mistake(
        "let_the_experienced_start_small",
        "agents",
        # Their session promises nothing then, so it is taken for what its founders believe it to be.
        (
            Rule(Policy, "may_start_small", always(True)),
            Act(Quorum, "formed", believe_in_a_quorum, when=is_small_and_experienced),
        ),
        HOLD,
        seeds=366,
        first=183,
        level="all",
    ),
    Mistake(
        "date_the_binding_before_the_processing",
        "agents",
        (DATE_THE_BINDING_BEFORE,),
        HOLD,
        seeds=4000,
        level="soak",
    ),
    Mistake(
        "look_at_the_clock_after_the_sockets",
        "agents",
        LOOK_AFTER_THE_SOCKETS,
        HOLD,
        seeds=2403,
        level="soak",
    ),
    Mistake(
        "measure_leases_by_a_clock_that_sleeps",
        "agents",
        SLEEPING_CLOCK,
        HOLD,
        seeds=1203,
        level="soak",
    ),
    Mistake(
        "confirm_while_bound",
        "agents",
        (CONFIRM_WHILE_BOUND,),
        HOLD,
        seeds=3660,
        level="soak",
    ),
    Mistake(
        "take_a_reset_for_an_orderly_end",
        "agents",
        (TAKE_A_RESET_FOR_AN_END,),
        HOLD,
        seeds=3660,
        level="soak",
    ),
    Mistake(
        "hang_up_orderly_on_a_member_that_counts",
        "agents",
        HANG_UP_ON_WHO_COUNTS,
        HOLD,
        seeds=1704,
        level="soak",
    ),
]

# --- rounds -----------------------------------------------------------------------------------------------------------


def without_a_question(right: Hold, agent: Agent) -> Hold:
    return Hold(right.until, float("inf")) if isinstance(agent.role, ElasticMember) else right


def as_if_asked_now(genuine: Any, host: ElasticHost, caller: Any, frame: frames.AnyFrame, now: float) -> None:
    genuine(host, caller, frame, now)
    host.quorum.leases.answered(caller.hello.member, now)


def is_answer(_: ElasticHost, caller: Any, frame: frames.AnyFrame, now: float) -> bool:
    return isinstance(frame, frames.Pong)


TOO_LATE = "although a later session"
APART = "not together"


def by_order_alone(right: tuple[object, ...], _: Rounds, seat: Seated) -> tuple[object, ...]:
    return (seat.key,)


def is_wanted(_: Memory, frame: frames.Begin | frames.Wanted) -> bool:
    return isinstance(frame, frames.Wanted)


ROUNDS = [
    Mistake(
        "trust_the_lease_alone",
        "rounds",
        (Rule(Hold, "allows", lambda _, hold, made, now: now < hold.until),),
        TOO_LATE,
    ),
    Mistake(
        "take_answers_of_any_age",
        "rounds",
        (Rule(Hold, "allows", lambda _, hold, made, now: made <= hold.proved_at and now < hold.until),),
        TOO_LATE,
        first=45,
        level="all",
    ),
    Mistake(
        "take_answers_of_the_last_five_seconds",
        "rounds",
        (Rule(leases, "is_fresh", lambda _, at, now: now < at + 5.0),),
        TOO_LATE,
        first=134,
        level="all",
    ),
    Mistake(
        "admit_latecomers_without_answers",
        "rounds",
        (Rule(Quorum, "admits", always(True)),),
        TOO_LATE,
        first=41,
        level="all",
    ),
    Mistake(
        "return_rounds_to_members_without_a_question",
        "rounds",
        (Rule(Agent, "hold", without_a_question),),
        TOO_LATE,
        first=17,
    ),
    Mistake("let_the_young_found", "rounds", (FOUND_YOUNG,), TOO_LATE, level="all"),
    Mistake(
        "date_an_answer_at_its_receipt",
        "rounds",
        (Act(ElasticHost, "caller_said", as_if_asked_now, when=is_answer),),
        f"{HOLD}|{TOO_LATE}",
    ),
    Mistake(
        "rank_a_round_by_order_alone", "agents", (Rule(Rounds, "seniority", by_order_alone),), "a newcomer precedes"
    ),
    Mistake("keep_newcomers_waiting", "agents", (Rule(Rounds, "newcomers_at", always(None)),), APART),
    Mistake(
        "overhear_that_a_round_is_wanted", "agents", (Act(Memory, "hear_of_round", nothing, when=is_wanted),), APART
    ),
    Mistake(
        "begin_a_round_with_any_number",
        "agents",
        (Rule(Quorum, "round_minimum", always(1)),),
        "a round of",
    ),
]

# --- the mesh ---------------------------------------------------------------------------------------------------------


def has_failures(_: object, proof: Proof | None, now: float) -> bool:
    return proof is not None and bool(proof.failures)


def overlook_them(genuine: Any, choice: NetworkChoice, proof: Proof, now: float) -> Any:
    return genuine(choice, structs.replace(proof, failures={}), now)


_PROVED: set[tuple[bytes, bytes, int]] = set()
"""The session, member and epoch of each proof."""


def remember_the_proof(genuine: Any, registrar: Registrar, conn: int, frame: frames.Confirmed, now: float) -> None:
    seat = registrar.seats.at(conn)
    if seat is not None and registrar.counts(frame.epoch):
        _PROVED.add((registrar.session, seat.member, frame.epoch))
    genuine(registrar, conn, frame, now)


def nothing_if_it_has_proved_before(
    right: frames.Confirm, _: Proof, member: bytes, confirm: frames.Confirm
) -> frames.Confirm:
    has_proved = any((confirm.session, member, epoch) in _PROVED for epoch in range(confirm.epoch))
    return structs.replace(right, targets=()) if has_proved else right


def is_of_a_latecomer(registrar: Registrar, conn: int, frame: frames.Confirmed, now: float) -> bool:
    return isinstance(registrar.state, Committed) and bool(frame.failures)


def as_if_it_reached_all(genuine: Any, registrar: Registrar, conn: int, frame: frames.Confirmed, now: float) -> None:
    genuine(registrar, conn, structs.replace(frame, failures=()), now)


MET = "have not met"

MESH = [
    Mistake(
        "count_a_target_as_reached_that_was_never_dialed",
        "mesh",
        (Rule(Prover, "was_reached", always(True)),),
        "have not met in both directions",
    ),
    Mistake(
        "count_a_proof_of_an_earlier_epoch",
        "mesh",
        (
            Act(Registrar, "confirmed", remember_the_proof),
            Rule(Proof, "asked_of", nothing_if_it_has_proved_before),
        ),
        "have not met in both directions",
    ),
    Mistake(
        "take_a_stopped_process_for_a_broken_path",
        "mesh with stopped processes",
        (Rule(mesh_proof, "shows_a_broken_path", always(True)),),
        "can't all open TCP connections",
        36,
    ),
    Mistake(
        "found_with_a_broken_mesh",
        "mesh of agents",
        (Act(NetworkChoice, "choose", overlook_them, when=has_failures),),
        MET,
        first=18,
    ),
    Mistake(
        "seat_a_latecomer_whatever_it_could_not_reach",
        "mesh of agents",
        (Act(Registrar, "confirmed", as_if_it_reached_all, when=is_of_a_latecomer),),
        MET,
        first=60,
        level="all",
    ),
]

MISTAKES = [*COMMIT, *ELECTION, *AGENTS, *ROUNDS, *MESH]
"""All of them."""
