"""The discovery client, and when each process speaks on the network. No sockets, no clock.

The rules, and what each is for:

* A seeker asks, in a large job after a short random delay, then ever more rarely, and in the end by one IP version at
  a time. A question of the same job heard by multicast stands for its own: ten thousand waiting ranks together ask
  about as often as a few. Processes that elect their host count each other by their questions, so in a job of
  moderate size each of them asks for itself at first.
* Multicast can pass one way only. So a seeker that hears no host for a while pads its questions, and a host also
  answers those by unicast. The seeker passes such an answer on to the group, since its question stood for those of
  others.
* A host speaks in a burst (single packets get lost), then at a slow period until its session is sealed, so
  that a seeker whose questions are lost still hears it. It answers all questions by one multicast, and no
  faster than a limit, so that the number of datagrams does not grow with the square of the number of ranks.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from mingle.protocol.effects import Answer, Effect, Multicast
from mingle.protocol.events import Source
from mingle.protocol.explain.observations import TOLD_AGAIN_SECONDS, Diagnostics
from mingle.protocol.machine import Context, Identity
from mingle.token_bucket import TokenBucket
from mingle.wire.datagrams import Datagram, Failed, List, Offer, Seek

FIRST_SEEK_SECONDS_PER_RANK = 0.0002
FIRST_SEEK_FREE_RANKS = 16
"""The number of ranks that can all ask at once; each rank beyond them spreads the first questions of all."""
FIRST_SEEK_MAX_SECONDS = 0.5
SEEK_INTERVAL_SECONDS = 0.05
SEEK_INTERVAL_SECONDS_PER_RANK = 0.0002
"""A host that all ranks of a large job call at once answers later, and every further question is read by all ranks."""
SEEK_GROWTH = 1.6
SEEK_INTERVAL_MAX_SECONDS = 2.5
"""A host that takes members announces itself every second, so a question only hastens the answer of one that is
sealed."""
SEEK_INTERVAL_MAX_SECONDS_PER_RANK = 0.004
"""The longest interval for each rank, if that is more: a host also offers itself unasked, once a second."""
COUNTED_RANKS = 128
"""The largest job whose processes count each other by their questions before an election."""
COUNTED_SECONDS = 0.6
"""The time after its start in which such a process asks for itself, whatever questions it hears: most elections are
over by then (:data:`mingle.protocol.election.ELECT_AFTER_SECONDS`)."""
LATE_SECONDS = 3.0
"""The time without any OFFER after which a seeker pads its questions."""
LATE_ANSWERS_PER_SECOND = 10.0
"""The sustained rate of padded questions to the group that a host answers by unicast."""
LATE_ANSWERS_AT_ONCE = 20.0
"""The burst of the same. A seeker without an answer asks again."""

BURST_SECONDS = (0.0, 0.03, 0.1, 0.25, 0.6, 1.2)
"""When a host speaks after its start, without being asked."""
OFFER_PERIOD_SECONDS = 1.0
"""How often it speaks after that, until the session is sealed."""
ANSWER_SPACING_SECONDS = 0.002
"""The least time between two OFFERs: what is asked meanwhile is answered by one."""
ANSWER_GAP_SECONDS = 0.02
"""The sustained interval between two OFFERs of an open session."""
ANSWER_CREDIT = 8
"""The burst of the same: ranks that start together ask one after another, each when it listens."""
SEALED_ANSWER_GAP_SECONDS = 0.15
"""The sustained interval between two OFFERs of a sealed session: shorter than a process that asks waits before it can
become a host (:data:`mingle.protocol.election.ELECT_SOONEST_SECONDS`)."""
SEALED_ANSWER_CREDIT = 3
"""The burst of the same: a rank that asks is answered before it forms the job a second time."""

EARLY_ASK_SECONDS = 3.0
"""The time after which a rank asks on the browse group first: one that waits longer may wait for the wrong job."""
ASK_AGAIN_SECONDS = 30.0
"""The time after which it asks again: a question can be lost, and what was mistyped can have been mended."""
LAST_ASK_SECONDS = 2.0
"""The time before its deadline at which it asks for the last time."""
ASK_JITTER_SECONDS = 0.5
OVERHEARD_SECONDS = 1.0
"""The time before the last question of a seated rank in which the question of another rank stands for it."""
BROWSE_ANSWER_JITTER_SECONDS = 0.1
BROWSE_ANSWER_GAP_SECONDS = 0.5
"""The least time between two answers on the browse group, however many ask."""
UNICAST_ANSWERS_PER_SECOND = 2.0
"""The sustained rate of LISTs by unicast that one process answers."""
UNICAST_ANSWERS_AT_ONCE = 8.0
"""The burst of the same. An asker without an answer asks again."""


class Seeker:
    """The times at which a rank asks for its host.

    Args:
        world_size: the size of the job.
        now: the time.
        rng: spreads the questions.
        counted: whether the others count this process by its questions, because the job elects its host.
    """

    def __init__(self, world_size: int, now: float, rng: random.Random, *, counted: bool = False) -> None:
        self.asked_at: float | None = None
        """The time of the first question since it started to ask."""
        self._rng = rng
        self._few = world_size <= COUNTED_RANKS
        self._counted = counted and self._few
        self._asks_for_itself_until = now
        beyond = max(0, world_size - FIRST_SEEK_FREE_RANKS)
        self._first = min(FIRST_SEEK_SECONDS_PER_RANK * beyond, FIRST_SEEK_MAX_SECONDS)
        self._longest = max(SEEK_INTERVAL_MAX_SECONDS, SEEK_INTERVAL_MAX_SECONDS_PER_RANK * world_size)
        shortest = SEEK_INTERVAL_SECONDS + SEEK_INTERVAL_SECONDS_PER_RANK * world_size
        self._shortest = self._interval = min(shortest, SEEK_INTERVAL_MAX_SECONDS)
        self._next: float | None = None
        self._turns = 0
        self.resume(now)

    def next_timer(self) -> float | None:
        """Return when to ask next; None while the rank has a host."""
        return self._next

    def resume(self, now: float) -> None:
        """Start to ask, or start again, first at short intervals."""
        self._interval = self._shortest
        self._grows_at = self._offered_at = now
        self._next = now + self._rng.uniform(0, self._first)
        self.asked_at = None
        if self._counted:
            self.ask_for_itself(now + COUNTED_SECONDS)

    def hurry(self, now: float) -> None:
        """Return to short intervals, unless the rank has a host: other hosts can be in reach now."""
        if self._next is not None:
            self.resume(now)

    def pause(self) -> None:
        """Stop asking: the rank has a host."""
        self._next = None

    def heard_seek(self, now: float) -> None:
        """Take note that another rank of the job has asked by multicast, which serves this one as well."""
        if self._next is not None and now >= self._asks_for_itself_until:
            self._schedule(now)

    def heard_offer(self, now: float) -> None:
        """Take note that a host of the job was heard."""
        self._offered_at = now

    def ask_for_itself(self, until: float) -> None:
        """Ask whatever questions others ask, since this rank's says more: not in a large job, where some say it."""
        if self._few:
            self._asks_for_itself_until = until

    def is_late(self, now: float) -> bool:
        """Return whether no host was heard for so long that multicasts from there may be lost."""
        return now >= self._offered_at + LATE_SECONDS

    def should_ask(self, now: float) -> bool:
        """Return whether to ask now; if so, set the next time."""
        if self._next is None or now < self._next:
            return False
        if self.asked_at is None:
            self.asked_at = now
        self._schedule(now)
        return True

    def turn(self) -> int | None:
        """Return the number of the question to send, if IPv4 and IPv6 take turns; None while it asks quickly."""
        if self._interval < self._longest:
            return None
        self._turns += 1
        return self._turns

    def _schedule(self, now: float) -> None:
        # Jitter of a quarter keeps seekers that started together from always asking together.
        self._next = now + self._interval * self._rng.uniform(0.75, 1.25)
        # Questions that come together count once: ranks that start together would otherwise fall silent for seconds.
        if now >= self._grows_at:
            self._grows_at = now + self._interval / 2
            self._interval = min(self._interval * SEEK_GROWTH, self._longest)


class Announcer:
    """The times at which a host sends its OFFER."""

    def __init__(self, now: float) -> None:
        self.sealed = False
        self._last = float("-inf")
        self._debt = float("-inf")
        """The time at which the bucket is empty: a leaky bucket limits the OFFERs."""
        self._asked = False
        self._burst: list[float] = []
        self.burst(now)

    def burst(self, now: float) -> None:
        """Begin a burst: at the start, and when a session takes members again."""
        self._burst = [now + offset for offset in BURST_SECONDS]
        self._debt = min(self._debt, now)  # the answers of a sealed session weigh more, and would delay it

    def asked(self) -> None:
        """Take note that another process looks for this job, or claims to host it."""
        self._asked = True

    def next_timer(self) -> float | None:
        """Return when to speak next; None: only when asked."""
        gap, credit = self._allowance
        soonest = max(self._last + ANSWER_SPACING_SECONDS, self._debt - (credit - 1) * gap)
        if self._asked:
            return soonest
        if self.sealed:
            return None
        return max(self._burst[0], soonest) if self._burst else self._last + OFFER_PERIOD_SECONDS

    @property
    def _allowance(self) -> tuple[float, int]:
        if self.sealed:
            return SEALED_ANSWER_GAP_SECONDS, SEALED_ANSWER_CREDIT
        return ANSWER_GAP_SECONDS, ANSWER_CREDIT

    def should_speak(self, now: float) -> bool:
        """Return whether to speak now; if so, set the next time."""
        due = self.next_timer()
        if due is None or now < due:
            return False
        # An answer also serves for the part of the burst that was due by now.
        self._burst = [at for at in self._burst if at > now]
        self._asked = False
        self._last = now
        self._debt = max(now, self._debt) + self._allowance[0]
        return True


class BrowseGroup:
    """The times at which a process asks on the browse group, and answers there.

    The browse group is a well-known group on which no process speaks unless one asks. A rank that waits asks there for
    other processes, so that a mistyped job id, the commonest mistake, can be named; ``mingle-discover list`` asks
    there, too. Of each job the host and one seeker answer: a seeker that hears an answer for its own job keeps its own
    back. Of the ranks with a seat about one asks: all of them hear the answers, and if a thousand asked, each of them
    would have to read a thousand questions.

    Where there is no multicast, the same question comes by unicast. Every process of the machine answers it then, so
    one question can have many answers, and its source can be forged: that is why each process answers rarely.
    """

    def __init__(self, now: float, deadline: float, rng: random.Random) -> None:
        self._rng = rng
        last = max(now, deadline - LAST_ASK_SECONDS - rng.uniform(0, ASK_JITTER_SECONDS))
        self._last_due: float | None = last
        self._next_due: float | None = None
        """When to ask before that."""
        self._ask_after(EARLY_ASK_SECONDS, now)
        self._answer_at: float | None = None
        self._answered_at = float("-inf")
        self._by_unicast = TokenBucket.full(UNICAST_ANSWERS_PER_SECOND, UNICAST_ANSWERS_AT_ONCE, now)

    def _ask_after(self, seconds: float, now: float) -> None:
        due = now + seconds + self._rng.uniform(0, ASK_JITTER_SECONDS)
        self._next_due = due if self._last_due is not None and due < self._last_due else None

    def next_timer(self) -> float | None:
        """Return when there is something to do."""
        times = [time for time in (self._next_due, self._last_due, self._answer_at) if time is not None]
        return min(times, default=None)

    def answer_timer(self) -> float | None:
        """Return when an answer is due; a host whose job has formed does nothing else on the browse group."""
        return self._answer_at

    def found(self) -> None:
        """Take note that a host of the same job spoke, so the job id is not mistyped."""
        self._next_due = None

    def overheard(self, now: float, *, seated: bool) -> None:
        """Take note that another process of the job has asked: this one hears the answers, too.

        A rank that has no seat still asks before its deadline. Otherwise the other waiting ranks would not learn of it.
        """
        if self._next_due is not None:
            self._ask_after(ASK_AGAIN_SECONDS, now)
        if seated and self._last_due is not None and now >= self._last_due - OVERHEARD_SECONDS:
            self._last_due = None

    def asked(self, now: float) -> None:
        """Plan an answer to a question by multicast."""
        if self._answer_at is None:
            at = now + self._rng.uniform(0, BROWSE_ANSWER_JITTER_SECONDS)
            self._answer_at = max(at, self._answered_at + BROWSE_ANSWER_GAP_SECONDS)

    def may_answer_by_unicast(self, now: float) -> bool:
        """Return whether to answer a question by unicast, and count the answer."""
        return self._by_unicast.take(now)

    def answered(self) -> None:
        """Cancel the planned answer: another process has named the job already."""
        self._answer_at = None

    def should_ask(self, now: float) -> bool:
        """Return whether to ask now."""
        if self._next_due is not None and now >= self._next_due:
            self._ask_after(ASK_AGAIN_SECONDS, now)
            return True
        if self._last_due is not None and now >= self._last_due:
            self._last_due = None
            return True
        return False

    def should_answer(self, now: float) -> bool:
        """Return whether to answer now."""
        if self._answer_at is None or now < self._answer_at:
            return False
        self._answer_at = None
        self._answered_at = now
        return True


class DiscoveryClient:
    """The datagrams of a rank until its job has formed: questions, ever more rarely, and answers on the browse group.

    It hands on only the OFFERs of its own job. Everything else is kept for the report of a job that does not form.

    Args:
        identity: of this process.
        context: its secret decides what a signature means.
        now: the time.
        diagnostics: takes note of what was heard.
        effects: the list to which the client adds its datagrams.
    """

    def __init__(
        self, identity: Identity, context: Context, now: float, *, diagnostics: Diagnostics, effects: list[Effect]
    ) -> None:
        self._identity = identity
        self._secured = context.key is not None
        self._diagnostics = diagnostics
        self._effects = effects
        self._browse = BrowseGroup(now, now + context.timeout, context.rng)
        self.seeker = Seeker(identity.world_size, now, context.rng, counted=identity.rank is None)
        self.question = identity.seek()
        """What it asks."""
        self._names_until = now
        """Until when the question names a host that this rank can't connect to."""
        self._asked_late = False
        """Whether the last question was a padded one, and no OFFER has come since."""

    def heard(self, message: Datagram, source: Source, now: float, *, seated: bool) -> Offer | None:
        """Handle a valid datagram; return it if it is the OFFER of a host that ranks can join."""
        identity, diagnostics = self._identity, self._diagnostics
        if isinstance(message, List):
            if message.member != identity.member:
                self._browsed(message, source, now, seated=seated)
        elif diagnostics.concerns(identity, message, source, now, secured=self._secured):
            if isinstance(message, Seek) and message.member != identity.member:
                diagnostics.seeker(message, source, now)
                self._browse.answered()
                if source.multicast:
                    self.seeker.heard_seek(now)
            elif isinstance(message, Failed):
                diagnostics.has_failed(message, source)
            elif isinstance(message, Offer):
                self._browse.answered()
                self._browse.found()
                self._offered(message, source, now)
                return message
        return None

    def _offered(self, offer: Offer, source: Source, now: float) -> None:
        self._diagnostics.heard_host(offer, source)
        self.seeker.heard_offer(now)
        if self._asked_late and not source.multicast and not source.folder:
            # Ranks that hear this one and not the host have kept their questions back.
            self._effects.append(Multicast(offer))
        self._asked_late = False

    def cannot_reach(self, session: bytes, how: str, now: float) -> None:
        """Say in the next questions that the host of a session is heard, and that no connection to it can be made."""
        self.question, self._names_until = self._identity.seek(session, how), now + TOLD_AGAIN_SECONDS
        self.seeker.ask_for_itself(self._names_until)

    def reached(self) -> None:
        """Ask as before: a host was reached."""
        self.question = self._identity.seek()

    def _browsed(self, message: List, source: Source, now: float, *, seated: bool) -> None:
        if self._diagnostics.concerns(self._identity, message, source, now, secured=self._secured):
            self._diagnostics.seeker(message, source, now)
            self._browse.overheard(now, seated=seated)
        if seated:
            return  # the host speaks for its members
        if source.multicast:
            self._browse.asked(now)
        elif self._browse.may_answer_by_unicast(now):
            self._effects.append(Answer(source, self.question))

    def next_timer(self) -> float | None:
        """The time of the next call to :meth:`handle_timer`."""
        times = (self.seeker.next_timer(), self._browse.next_timer())
        return min((time for time in times if time is not None), default=None)

    def handle_timer(self, now: float) -> None:
        """Send what is due."""
        if self.question.unreached is not None and now > self._names_until:
            self.reached()
        if self.seeker.should_ask(now):
            self._asked_late = self.seeker.is_late(now)
            self._effects.append(Multicast(self.question, turn=self.seeker.turn(), padded=self._asked_late))
        if self._browse.should_ask(now):
            self._effects.append(Multicast(self._identity.list(), browse=True))
        if self._browse.should_answer(now):
            self._effects.append(Multicast(self.question, browse=True))


class HostAnnouncements:
    """The datagrams of a host: its OFFERs, and questions on the browse group until its job has formed.

    It hands on only the OFFERs of other sessions of its job. Everything else is kept for the report of a job that does
    not form.

    Args:
        identity: of this process.
        session: the session that it hosts.
        context: its secret decides what a signature means.
        now: the time.
        deadline: when a job that has not formed is an error; the host asks once more shortly before.
        offer: returns the OFFER of the session.
        seated: returns whether a process has a seat in it.
        diagnostics: takes note of what was heard.
        effects: the list to which the datagrams are added.
    """

    def __init__(
        self,
        identity: Identity,
        session: bytes,
        context: Context,
        now: float,
        deadline: float,
        *,
        offer: Callable[[], Offer],
        seated: Callable[[bytes], bool],
        diagnostics: Diagnostics,
        effects: list[Effect],
    ) -> None:
        self._identity = identity
        self._session = session
        self._secured = context.key is not None
        self._offer = offer
        self._seated = seated
        self._diagnostics = diagnostics
        diagnostics.sessions[session] = identity.member, str(identity.who)
        self._effects = effects
        self._announcer = Announcer(now)
        self._browse = BrowseGroup(now, deadline, context.rng)
        self._late_answers = TokenBucket.full(LATE_ANSWERS_PER_SECOND, LATE_ANSWERS_AT_ONCE, now)

    def heard(self, message: Datagram, source: Source, now: float) -> Offer | None:
        """Handle a valid datagram; return it if it is the OFFER of another session of the job."""
        identity = self._identity
        if isinstance(message, List):
            if message.member != identity.member:
                self._browsed(message, source, now)
        elif self._diagnostics.concerns(identity, message, source, now, secured=self._secured):
            if isinstance(message, Seek):
                self._sought(message, source, now)
            elif isinstance(message, Failed) and not self._seated(message.member):
                self._diagnostics.has_failed(message, source)
            elif isinstance(message, Offer) and message.session != self._session:
                self._diagnostics.heard_host(message, source)
                if self._announcer.sealed and message.state == "open" and not source.folder:
                    # That host should hear that the job runs. Two open hosts dial each other, which tells both.
                    self._announcer.asked()
                return message
        return None

    def _sought(self, message: Seek, source: Source, now: float) -> None:
        if not self._seated(message.member):  # the host's own are from before it was one
            self._diagnostics.seeker(message, source, now)
        if source.multicast:
            self._announcer.asked()
        if not source.multicast or (message.padding and self._late_answers.take(now)):
            self._effects.append(Answer(source, self._offer()))

    def _browsed(self, message: List, source: Source, now: float) -> None:
        ours = self._diagnostics.concerns(self._identity, message, source, now, secured=self._secured)
        if ours and not self._seated(message.member):
            self._diagnostics.seeker(message, source, now)
        if source.multicast:
            self._browse.asked(now)
        elif self._browse.may_answer_by_unicast(now):
            self._effects.append(Answer(source, self._offer()))

    def sealed(self) -> None:
        """Speak only when asked: the session takes no members."""
        self._announcer.sealed = True

    def reopened(self, now: float) -> None:
        """Speak unasked again: the session takes members."""
        self._announcer.sealed = False
        self._announcer.burst(now)

    def readdressed(self, now: float) -> None:
        """Announce new addresses."""
        self._announcer.burst(now)

    def next_timer(self, *, forming: bool) -> float | None:
        """Return the time of the next call to :meth:`handle_timer`.

        Args:
            forming: whether the job has not formed.
        """
        browse = self._browse.next_timer() if forming else self._browse.answer_timer()
        return min((time for time in (self._announcer.next_timer(), browse) if time is not None), default=None)

    def handle_timer(self, now: float, *, forming: bool) -> None:
        """Send what is due."""
        if self._announcer.should_speak(now):
            self._effects.append(Multicast(self._offer()))
        if forming and self._browse.should_ask(now):
            self._effects.append(Multicast(self._identity.list(), browse=True))
        if self._browse.should_answer(now):
            self._effects.append(Multicast(self._offer(), browse=True))
