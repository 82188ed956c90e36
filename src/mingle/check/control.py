"""Every rank's side of a check: a server that the other ranks probe, and the loop that does what rank 0 says.

Each rank has a control connection to rank 0, apart from what is tested. The messages are JSON; an empty one is a
heartbeat of rank 0, which the rank echoes. The segments are small, so a network that loses large packets carries them.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from mingle import detached, forksafe
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
SEGMENT_BYTES = 500
_MESSAGE_LIMIT = 1 << 24
_ECHO_LIMIT = 1 << 21
WITNESSES = 3
"""How many other machines are asked whether they reach a rank."""

Record = dict[str, Any]

own_interface = ""
"""This rank's interface in the network that all ranks share, once the job has formed."""


def start(function: Callable[..., object], *arguments: object) -> threading.Thread:
    """Start a daemon thread: calls of torch can block beyond every deadline, and nothing in Python ends them."""
    name = f"mingle-check-{function.__name__.strip('_')}"
    thread = threading.Thread(target=function, args=arguments, name=name, daemon=True)
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


def send(connection: Connection, message: Record) -> None:
    """Send a message; a connection that has ended shows where it is read."""
    with contextlib.suppress(OSError):
        connection.send_bytes(json.dumps(message).encode())


def receive(connection: Connection) -> Record:
    """Return the next message.

    Raises:
        EOFError: the connection has ended.
        OSError: it was reset, or the message does not arrive.
        ValueError: it is not a message.
    """
    message = json.loads(connection.recv_bytes(_MESSAGE_LIMIT))
    if not isinstance(message, dict):
        raise ValueError(message)
    return message


def greet(connection: Connection, peer: Record, **question: Record) -> Record:
    """Make sure that a rank's server is at the other end, and return its answer.

    Args:
        connection: a new connection.
        peer: what that rank says of itself.
        **question: ``probe``: another rank that this one has to reach.

    Raises:
        OSError, EOFError, ValueError: another process answers, or none does.
    """
    send(connection, {"token": peer["token"], **question})
    answer = receive(connection)
    if answer.get("rank") != peer["rank"]:
        raise OSError(f"rank {answer.get('rank')} answers there")
    return answer


def reaches(peer: Record) -> bool:
    """Tell whether a rank's server answers this process."""
    try:
        with dial(peer["address"], peer["port"], seconds=PROBE_SECONDS) as connection:
            return bool(greet(connection, peer))
    except (OSError, EOFError, ValueError):
        return False


def judge_loss(roster: Sequence[Record], own: int, lost: int, how: str) -> str:
    """Return ``cut`` if a rank that this one has lost still answers other machines, else how it was lost."""
    nodes, peer = {roster[own]["node"], roster[lost]["node"]}, roster[lost]
    witnesses = [each for each in roster if each["node"] not in nodes][:WITNESSES]
    for witness in witnesses:
        with (
            contextlib.suppress(OSError, EOFError, ValueError),
            dial(witness["address"], witness["port"]) as connection,
        ):
            if greet(connection, witness, probe=peer)["reached"]:
                return "cut"
    if how == "silent" and not witnesses and len(nodes) > 1:
        try:
            dial(peer["address"], peer["port"]).close()
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
    """Answers the probes of the other ranks; that of rank 0 also takes their control connections."""

    def __init__(self, rank: int) -> None:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._socket = forksafe.register(
            socket.create_server(("", 0), family=family, dualstack_ipv6=dual, backlog=1024)
        )
        self.port: int = self._socket.getsockname()[1]
        self.token = secrets.token_hex(16)
        self.controls: queue.SimpleQueue[tuple[Connection, Record]] = queue.SimpleQueue()
        """The control connections, with what each rank says of itself."""
        self._rank = rank
        start(self._accept)

    def close(self) -> None:
        """Stop listening; connections go on until the other end closes them."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends the thread that waits in accept()
        self._socket.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, address = self._socket.accept()
                there, here = (end[0].removeprefix("::ffff:") for end in (address, connection.getsockname()))
                start(self._serve, _framed(connection, CONNECT_SECONDS), there, here)

    def _serve(self, connection: Connection, there: str, here: str) -> None:
        with contextlib.suppress(OSError, EOFError, ValueError):
            question = receive(connection)
            if not hmac.compare_digest(str(question.get("token")), self.token):
                connection.close()
            elif hello := question.get("hello"):
                self.controls.put((connection, {**hello, "address": hello["address"] or there, "reached": here}))
            else:
                with connection:
                    reached = "probe" in question and reaches(question["probe"])
                    send(connection, {"rank": self._rank, "reached": reached})
                    while True:
                        wanted = int(connection.recv_bytes(_ECHO_LIMIT)[:8])
                        connection.send_bytes(bytes(min(wanted, _ECHO_LIMIT)))


class LostError(Exception):
    """Rank 0 has ``ended``, or is ``silent``, before it sent the report."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.how = how


class Worker:
    """Does what rank 0 says. Rank 0 keeps the deadlines: the next task supersedes one that hangs."""

    def __init__(self, control: Connection, roster: list[Record], patience: float) -> None:
        self._control, self._patience = control, patience
        self._roster = roster  # what each rank says of itself; empty until all are there
        self._sending = forksafe.register_lock(threading.Lock())

    def run(self, tasks: object, show: Callable[[str], None]) -> Record:
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
                    waited += PULSE_SECONDS  # not by the clock: time in which this process did not run is no silence
                    if waited > self._patience:
                        raise LostError("silent")
                message = receive(self._control)
                if "report" in message:
                    return dict(message["report"])
                if "roster" in message:
                    self._roster += message["roster"]
                elif message:
                    show(message["show"])
                    if "do" in message:
                        start(self._do, getattr(tasks, message["do"]), message)
                else:
                    self._send({})
        except (EOFError, OSError):
            raise LostError("ended") from None
        except KeyboardInterrupt:
            self._send({"gone": "interrupted"})
            raise
        finally:
            self._control.close()

    def _do(self, method: Callable[..., Any], task: Record) -> None:
        try:
            answer = {"result": method(**task["with"])}
        except Exception as error:  # whatever torch raises belongs into the report
            answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        self._send({"id": task["id"], **answer})

    def _send(self, message: Record) -> None:
        with self._sending:
            send(self._control, message)
