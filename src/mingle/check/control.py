"""Every rank's side of a check: a server that the other ranks probe, and the loop that does what rank 0 says.

Each rank has a control connection to rank 0, apart from what is tested. A rank echoes the heartbeats of rank 0. The
segments are small, so a network that loses large packets carries them.
"""

from __future__ import annotations

import contextlib
import hmac
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

import msgspec
from msgspec import Raw

from mingle import detached, forksafe
from mingle.check.messages import (
    GREETING,
    ORDER,
    QUESTION_LIMIT,
    Greeting,
    Introduction,
    Order,
    ProbedRank,
    Question,
    Reply,
    question_of,
    receive,
    send,
)
from mingle.check.verdicts import Report
from mingle.errors import lacks_descriptor
from mingle.protocol.machine import scoped

PULSE_SECONDS = 0.5
SILENCE_SECONDS = 6.0
"""A process from which no heartbeat came for this long is stopped or cut off; a busy machine still sends some."""
CONNECT_SECONDS = 5.0
"""The limit of a connect, and of a message that has begun to arrive or to leave."""
PROBE_SECONDS = 3.0
"""The same for a rank that is probed on behalf of another one, which waits for the result."""
LINGER_SECONDS = SILENCE_SECONDS + CONNECT_SECONDS
"""How long the ranks still answer after a check in which one was cut off from rank 0: that one will ask them."""
PROBED_SECONDS = 60.0
"""How long a rank that has proved itself can probe this one over one connection."""
PAUSE_SECONDS = 0.2
"""How long no caller is accepted after the system has refused one."""
STRANGERS, PROBERS = 64, 4096
"""How many callers are served at once before and after they have proved that they are ranks; then the oldest goes."""
SEGMENT_BYTES = 500
_ECHO_LIMIT = 1 << 21
WITNESSES = 3
"""How many other machines are asked whether they reach a rank."""
NO_DESCRIPTOR = "descriptors"
"""How a rank is lost that has no file descriptor left."""
DEPARTURES = ("interrupted", NO_DESCRIPTOR)
"""What a rank can say of its own end."""


own_interface = ""
"""This rank's interface in the network that all ranks share, once the job has formed."""


def start(
    function: Callable[..., object], *arguments: object, among: list[threading.Thread] | None = None
) -> threading.Thread:
    """Start a daemon thread: calls of torch can block beyond every deadline, and nothing in Python ends them.

    Args:
        function: what it calls.
        arguments: its arguments.
        among: takes the thread before it starts, whatever a signal handler raises meanwhile.
    """
    name = f"mingle-check-{function.__name__.strip('_')}"
    thread = threading.Thread(target=function, args=arguments, name=name, daemon=True)
    if among is not None:
        among.append(thread)
    detached.start(thread)
    return thread


def dial(
    address: str, port: int, *, seconds: float = CONNECT_SECONDS, source: str = "", segment: int = 0
) -> Connection:
    """Connect, from this source address and with this maximum segment size if given.

    A link-local address without a zone is one of the interface in `own_interface`: each machine has its own zone.
    """
    address = scoped(address, own_interface) if own_interface and "%" not in address else address
    family, kind, protocol, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as connection:
        connection.settimeout(seconds)
        if segment:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, segment)
        if source:
            connection.bind((source, 0))
        connection.connect(target)
        return _framed(connection, seconds)


def _framed(connection: socket.socket, seconds: float) -> Connection:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", *divmod(int(1e6 * seconds), 10**6)))
    return forksafe.register(Connection(connection.detach()))


def own_address(connection: Connection) -> str:
    """Return the address from which this process called; the other end can see that of a proxy instead."""
    shared = socket.socket(fileno=connection.fileno())
    try:
        return str(shared.getsockname()[0]).partition("%")[0]
    finally:
        shared.detach()


def greet(connection: Connection, peer: ProbedRank, probe: ProbedRank | None = None) -> Greeting:
    """Make sure that a rank's server is at the other end, and return its answer.

    Args:
        connection: a new connection.
        peer: what that rank says of itself.
        probe: another rank that this one has to reach.

    Raises:
        OSError, EOFError, ValueError: another process answers, or none does.
    """
    send(connection, Question(peer.token, probe=probe))
    answer = receive(connection, GREETING)
    if answer.gone == NO_DESCRIPTOR:
        raise OSError(f"rank {peer.rank} has no file descriptor left")
    if answer.rank != peer.rank:
        raise OSError(f"rank {answer.rank} answers there")
    return answer


def reaches(peer: ProbedRank) -> bool:
    """Tell whether a rank's server answers this process."""
    try:
        with dial(peer.address, peer.port, seconds=PROBE_SECONDS) as connection:
            greet(connection, peer)
            return True
    except (OSError, EOFError, ValueError):
        return False


def judge_loss(roster: Sequence[Introduction], own: int, lost: int, how: str) -> str:
    """Return ``cut`` if a rank that this one has lost still answers other machines, else how it was lost."""
    there = {each.rank: each for each in roster}  # a rank is no index: rank 0 sends the roster of those that came
    peer = there[lost]
    nodes = {there[own].node, peer.node}
    witnesses = [each for each in roster if each.node not in nodes][:WITNESSES]
    for witness in witnesses:
        with contextlib.suppress(OSError, EOFError, ValueError), dial(witness.address, witness.port) as connection:
            if greet(connection, witness, probe=peer).reached:
                return "cut"
    if how == "silent" and not witnesses and len(nodes) > 1:
        try:
            dial(peer.address, peer.port).close()
        except OSError:  # the kernel would accept the connection for a process that is stopped
            return "cut"
    return how


def exchange(connection: Connection, sent: int, received: int) -> float:
    """Send this many bytes to a rank's server and receive as many as wanted; return the seconds that it took."""
    started = time.perf_counter()
    connection.send_bytes(f"{received:8}".encode() + bytes(sent))
    connection.recv_bytes()
    return time.perf_counter() - started


class Server:
    """Answers the probes of the other ranks; that of rank 0 also takes their control connections.

    The first message of a caller has the token of this rank, which only the job's ranks know, and a deadline.
    """

    def __init__(self, rank: int) -> None:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._socket = forksafe.register(
            socket.create_server(("", 0), family=family, dualstack_ipv6=dual, backlog=1024)
        )
        self.port: int = self._socket.getsockname()[1]
        self.token = secrets.token_hex(16)
        self.controls: queue.SimpleQueue[tuple[Connection, Introduction]] = queue.SimpleQueue()
        """The control connections, with what each rank says of itself."""
        self.starved = threading.Event()
        """Set once the process had no file descriptor for a caller."""
        self._closed = threading.Event()
        self._spare: socket.socket | None = forksafe.register(socket.socket())
        # In order of arrival. A value is written and deleted in one step of the interpreter, by the threads that serve.
        self._strangers: dict[socket.socket, None] = {}
        self._probers: dict[socket.socket, None] = {}
        self._rank = rank
        start(self._accept)

    def close(self) -> None:
        """Stop listening; connections go on until the other end closes them."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends the thread that waits in accept()
        self._socket.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                caller = self._next_caller()
            except OSError:  # there is no descriptor, or a caller's network has failed: see accept(2)
                self._closed.wait(PAUSE_SECONDS)
                continue
            _enter(self._strangers, forksafe.register(caller), STRANGERS)
            try:
                start(self._serve, caller)
            except RuntimeError:  # the system allows no more threads
                self._strangers.pop(caller, None)
                caller.close()
        self._release_spare()

    def _next_caller(self) -> socket.socket:
        """Wait for a caller. Without a free descriptor the spare one serves to tell it so.

        Raises:
            OSError: no caller was accepted, or it was told that there is no descriptor.
        """
        try:
            return self._socket.accept()[0]
        except OSError as error:
            if not lacks_descriptor(error):
                raise
        self.starved.set()
        self._release_spare()
        caller, _ = self._socket.accept()
        try:
            self._spare = forksafe.register(socket.socket())
        except OSError:
            with caller, contextlib.suppress(OSError):
                _write(caller, msgspec.json.encode(Greeting(gone=NO_DESCRIPTOR)), time.monotonic() + PAUSE_SECONDS)
            self._spare = forksafe.register(socket.socket())
            raise
        return caller

    def _release_spare(self) -> None:
        if self._spare is not None:
            self._spare.close()
            self._spare = None

    def _serve(self, caller: socket.socket) -> None:
        until = time.monotonic() + CONNECT_SECONDS
        with contextlib.suppress(OSError, EOFError, ValueError), caller:
            try:
                question = question_of(_read(caller, QUESTION_LIMIT, until))
            finally:
                self._strangers.pop(caller, None)
            if not hmac.compare_digest(question.token.encode(), self.token.encode()):
                return
            if question.hello:
                question.hello.reached = caller.getsockname()[0].removeprefix("::ffff:")
                self.controls.put((_framed(caller, CONNECT_SECONDS), question.hello))
                return
            _enter(self._probers, caller, PROBERS)
            try:
                self._answer(caller, question)
            finally:
                self._probers.pop(caller, None)

    def _answer(self, caller: socket.socket, question: Question) -> None:
        until = time.monotonic() + PROBED_SECONDS
        caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        reached = question.probe is not None and reaches(question.probe)
        _write(caller, msgspec.json.encode(Greeting(self._rank, reached)), until)
        while True:
            wanted = int(_read(caller, _ECHO_LIMIT, until)[:8])
            _write(caller, bytes(min(wanted, _ECHO_LIMIT)), until)


def _enter(callers: dict[socket.socket, None], caller: socket.socket, limit: int) -> None:
    """Add a caller, and end the oldest ones beyond the limit: the thread that serves one sees that it has ended."""
    callers[caller] = None
    for oldest in list(callers)[: max(0, len(callers) - limit)]:
        callers.pop(oldest, None)
        with contextlib.suppress(OSError):
            oldest.shutdown(socket.SHUT_RDWR)


def _read(connection: socket.socket, limit: int, until: float) -> bytes:
    """Return a message as :class:`Connection` sends it.

    Raises:
        EOFError: the connection has ended.
        OSError: it was reset, or the message does not arrive before the deadline or makes no progress.
        ValueError: it is longer than the limit.
    """

    def exactly(count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            connection.settimeout(_left(until))
            piece = connection.recv(min(count - len(data), 1 << 16))
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)

    (size,) = struct.unpack("!i", exactly(4))
    if not 0 <= size <= limit:
        raise ValueError(f"{size} bytes")
    return exactly(size)


def _write(connection: socket.socket, message: bytes, until: float) -> None:
    connection.settimeout(_left(until))
    connection.sendall(struct.pack("!i", len(message)) + message)


def _left(until: float) -> float:
    """Return the time limit of one call, which is above 0: 0 would make the socket non-blocking."""
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return min(left, CONNECT_SECONDS)


class LostError(Exception):
    """Rank 0 has ``ended``, is ``silent``, or has no ``descriptors``, before it sent the report."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.how = how


class Worker:
    """Does what rank 0 says. Rank 0 keeps the deadlines: the next task supersedes one that hangs."""

    def __init__(
        self, control: Connection, roster: list[Introduction], patience: float, starved: threading.Event | None = None
    ) -> None:
        self._control, self._patience = control, patience
        self._starved = starved or threading.Event()
        self._calls: list[threading.Thread] = []
        self._roster = roster  # what each rank says of itself; empty until all are there
        self._sending = forksafe.register_lock(threading.Lock())

    def run(self, tasks: object, show: Callable[[str], None]) -> Report:
        """Do tasks until rank 0 sends the report, and return it.

        Args:
            tasks: its methods are what rank 0 can ask for.
            show: called with the words for each step.

        Raises:
            LostError: rank 0 is lost.
        """
        try:
            while True:
                waited = 0.0
                while not self._control.poll(PULSE_SECONDS):
                    waited += PULSE_SECONDS  # not by the clock, which also counts time in which this process is stopped
                    if waited > self._patience:
                        raise LostError("silent")
                order = receive(self._control, ORDER)
                if order.report:
                    return order.report
                if order.gone == NO_DESCRIPTOR:
                    raise LostError(NO_DESCRIPTOR)
                self._roster += order.roster
                if order.show:
                    show(order.show)
                if order.do:
                    start(self._do, tasks, order, among=self._calls)
                if order == Order():
                    self._send(Reply())
        except (EOFError, OSError, ValueError):
            raise LostError("ended") from None
        except KeyboardInterrupt:
            self._send(Reply(gone="interrupted"))
            raise
        finally:
            self._control.close()

    def hangs(self) -> bool:
        """Return whether a task has not ended: what it uses must be left alone (NCCL crashed, observed)."""
        return any(call.is_alive() for call in self._calls)

    def _do(self, tasks: object, order: Order) -> None:
        try:
            result = msgspec.json.encode(getattr(tasks, order.do)(**order.arguments))
        except Exception as error:  # whatever torch raises belongs into the report
            # Sent from here: after this block the failed call's process group ends, which can take long.
            words = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            self._send(Reply(order.id, error=words.encode(errors="replace").decode()))
        else:
            self._send(Reply(order.id, Raw(result)))

    def _send(self, reply: Reply) -> None:
        if self._starved.is_set():
            reply.gone = NO_DESCRIPTOR
        with self._sending:
            send(self._control, reply)
