"""How the ranks of a check speak to each other: small TCP connections apart from the collectives under test.

Rank 0 conducts: each rank holds one connection to it, gets tasks and returns results, one JSON object a line. An empty
line, sent twice a second, is a heartbeat. Segments are small, so that a network that loses large packets carries them.
Besides, each rank listens for its peers, which probe the path to it or ask whether rank 0 is still heard there.
"""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mingle import detached, forksafe

PULSE_SECONDS = 0.5
SILENCE_SECONDS = 6.0
"""A process from which no heartbeat came for this long is stopped or cut off; a busy machine still sends some."""
GRACE_SECONDS = 2.0
"""The time for a result to arrive after the deadline of its task."""
CONNECT_SECONDS = 5.0
SEGMENT_BYTES = 500
SMALL_BYTES, LARGE_BYTES = 64, 1 << 18
_CHUNK = 1 << 18

Record = dict[str, Any]


def listener() -> socket.socket:
    """Return a listening socket on a free port of every address."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", 0), family=family, dualstack_ipv6=dual, backlog=1024)


def dial(address: str, port: int, seconds: float, *, source: str = "", small: bool = False) -> socket.socket:
    """Connect, from this source address if one is given, in small segments if told so."""
    family, kind, protocol, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    connection = socket.socket(family, kind, protocol)
    try:
        connection.settimeout(seconds)
        if small:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT_BYTES)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if source:
            connection.bind((source, 0))
        connection.connect(target)
    except BaseException:
        connection.close()
        raise
    return connection


class Line:
    """One end of a control connection."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError):  # macOS refuses it on a connection that stands
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT_BYTES)
        self.connection = connection
        self.heard = time.monotonic()
        self._sending = forksafe.register_lock(threading.Lock())

    def send(self, record: Record | None = None) -> None:
        """Send a record, or a heartbeat; the end of the connection shows where it is read."""
        data = b"\n" if record is None else json.dumps(record).encode() + b"\n"
        with self._sending, contextlib.suppress(OSError):
            self.connection.sendall(data)

    def records(self) -> Iterator[Record]:
        """Yield what arrives until the connection ends."""
        with contextlib.suppress(OSError, ValueError), self.connection.makefile("rb") as lines:
            for line in lines:
                self.heard = time.monotonic()
                if line.strip():
                    yield json.loads(line)

    def silent(self) -> bool:
        """Tell whether no heartbeat came for long."""
        return time.monotonic() - self.heard > SILENCE_SECONDS

    def close(self) -> None:
        """Close the connection, also under a thread that reads from it."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()


def _start(function: Callable[..., None], *arguments: Any) -> None:
    threading.Thread(target=function, args=arguments, name=f"mingle-check-{function.__name__}", daemon=True).start()


class Conductor:
    """Rank 0's side: asks the ranks to do something, and waits for their answers no longer than the deadline."""

    def __init__(self, size: int, token: str) -> None:
        self.server = listener()
        self.port: int = self.server.getsockname()[1]
        self.lines: dict[int, Line] = {}
        self.hellos: dict[int, Record] = {}
        self.lost: dict[int, str] = {}
        self.size, self.token = size, token
        self._answers: queue.Queue[tuple[int, Record]] = queue.Queue()
        self._asked = 0
        self._ended = threading.Event()
        _start(self._accept)
        _start(self._pulse)

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                connection, _ = self.server.accept()
            except OSError:
                return
            _start(self._serve, Line(connection))

    def _serve(self, line: Line) -> None:
        records = line.records()
        hello = next(records, {})
        if hello.get("token") != self.token:
            line.close()
            return
        rank = int(hello["rank"])
        hello["seen_by"] = plain(line.connection.getsockname()[0])
        self.lines[rank], self.hellos[rank] = line, hello
        for record in records:
            self._answers.put((rank, record))
        self._answers.put((rank, {"gone": "ended"}))

    def _pulse(self) -> None:
        while not self._ended.wait(PULSE_SECONDS):
            for line in list(self.lines.values()):
                line.send()

    def gather(self, seconds: float) -> bool:
        """Wait until every rank has said hello; tell whether all have."""
        deadline = time.monotonic() + seconds
        while len(self.hellos) < self.size and time.monotonic() < deadline:
            time.sleep(0.01)
        return len(self.hellos) == self.size

    def ask(self, tasks: Mapping[int, Record], seconds: float) -> dict[int, Record]:
        """Give ranks a task each and return their answers; ``{"timeout": True}`` stands for one that did not come.

        A rank that ends or falls silent cuts the waiting short: it is in `lost` then.
        """
        self._asked += 1
        for rank, task in tasks.items():
            self.lines[rank].send({"id": self._asked, "seconds": seconds, **task})
        answers: dict[int, Record] = {}
        deadline = time.monotonic() + seconds + GRACE_SECONDS
        while len(answers) < len(tasks) and not self.lost and (remaining := deadline - time.monotonic()) > 0:
            try:
                rank, record = self._answers.get(timeout=min(remaining, PULSE_SECONDS))
            except queue.Empty:
                self._look_for_silence(tasks)
                continue
            if "gone" in record:
                self.lost.setdefault(rank, record["gone"])
            elif record.get("id") == self._asked:
                answers[rank] = record
        return {rank: answers.get(rank, {"timeout": True}) for rank in tasks}

    def _look_for_silence(self, tasks: Mapping[int, Record]) -> None:
        for rank in tasks:
            if self.lines[rank].silent():
                self.lost[rank] = "silent"

    def confirm_silence(self) -> None:
        """Ask other machines whether they reach the ranks that are silent here: then the path is at fault."""
        for rank, how in list(self.lost.items()):
            witnesses = [
                each
                for each, hello in self.hellos.items()
                if each and each not in self.lost and hello["node"] not in (self.hellos[rank]["node"], 0)
            ]
            if how == "silent" and witnesses:
                hello, held = self.hellos[rank], self.lost
                self.lost = {}  # or the waiting below would be cut short
                task = {"do": "alive", "address": hello["address"], "port": hello["port"]}
                answers = self.ask(dict.fromkeys(witnesses[:3], task), CONNECT_SECONDS)
                self.lost = held
                if any("result" in answer for answer in answers.values()):
                    self.lost[rank] = "cut"
            elif how == "silent" and not accepts(self.hellos[rank]["address"], self.hellos[rank]["port"]):
                self.lost[rank] = "cut"

    def end(self, report: Record) -> None:
        """Give every rank the report, and let go of all connections when they have closed theirs."""
        self._ended.set()
        for line in self.lines.values():
            line.send({"do": "end", "report": report})
        deadline = time.monotonic() + GRACE_SECONDS
        gone = len(self.lost)
        while gone < len(self.lines) and (remaining := deadline - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                gone += "gone" in self._answers.get(timeout=remaining)[1]
        self.server.close()
        for line in self.lines.values():
            line.close()


class LostError(Exception):
    """Rank 0 is lost: the check ends without its report."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.how = how


class Worker:
    """Every rank's side, rank 0's included: does the tasks, each in a thread that can be given up."""

    def __init__(self, connection: socket.socket, peers: Peers, hello: Record) -> None:
        self.roster: list[Record] = []
        self._line = Line(connection)
        self._tasks: queue.Queue[Record | None] = queue.Queue()
        self._ending = threading.Event()
        self._peers = peers
        peers.line = self._line
        self.rank = int(hello["rank"])
        self._line.send(hello)
        _start(self._read)
        _start(self._pulse)

    def _read(self) -> None:
        for record in self._line.records():
            if record["do"] == "end":
                self._ending.set()
            self._tasks.put(record)
        self._ending.set()
        self._tasks.put(None)

    def _pulse(self) -> None:
        while not self._ending.wait(PULSE_SECONDS):
            self._line.send()

    def run(self, actions: Mapping[str, Callable[..., Any]], say: Callable[[str], None]) -> Record:
        """Do what rank 0 says until it sends the report.

        Raises:
            LostError: rank 0 has ended, does not answer, or is cut off from this rank.
        """
        try:
            while True:
                try:
                    task = self._tasks.get(timeout=PULSE_SECONDS)
                except queue.Empty:
                    if self._line.silent():
                        how = self._ask_around()
                        self._line.send({"gone": "cut"})
                        raise LostError(how) from None
                    continue
                if task is None:
                    raise LostError("ended")
                if task["do"] == "end":
                    return dict(task["report"])
                if "say" in task:
                    say(task["say"])
                if task["do"] == "roster":
                    self.roster = task["roster"]
                self._line.send({"id": task["id"], **self._attempt(actions, task)})
        except KeyboardInterrupt:
            self._line.send({"gone": "interrupted"})
            raise
        finally:
            self._ending.set()
            self._line.close()

    def _attempt(self, actions: Mapping[str, Callable[..., Any]], task: Record) -> Record:
        named = {name: value for name, value in task.items() if name not in ("id", "do", "say")}
        deadline = time.monotonic() + task["seconds"]
        try:
            result = detached.run(
                lambda: actions[task["do"]](**named),
                f"check-{task['do']}",
                lambda: not self._tasks.empty() or self._line.silent() or time.monotonic() > deadline,
            )
        except detached.AbandonedError:
            return {"timeout": True}
        except Exception as error:  # whatever torch raises belongs into the report
            return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        return {"result": result}

    def _ask_around(self) -> str:
        """Return ``cut`` if another machine still hears rank 0, else ``silent``."""
        if not self.roster:
            return "silent"
        here, zero = self.roster[self.rank]["node"], self.roster[0]
        witnesses = [each for each in self.roster if each["node"] not in (here, zero["node"])][:3]
        for other in witnesses:
            with contextlib.suppress(OSError, ValueError):
                if ask_alive(other["address"], other["port"], self._peers.token) < SILENCE_SECONDS / 2:
                    return "cut"
        return "silent" if witnesses or accepts(zero["address"], zero["port"]) else "cut"


# --- peers ---------------------------------------------------------------------------------------------------------


class Peers:
    """Serves the other ranks' probes, in threads of its own."""

    def __init__(self, rank: int, token: str) -> None:
        self.server = listener()
        self.port: int = self.server.getsockname()[1]
        self.token = token
        self.line: Line | None = None
        self._rank = rank
        _start(self._accept)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.server.accept()
                _start(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError), connection:
            connection.settimeout(CONNECT_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            question = json.loads(_read_line(connection))
            if question["token"] != self.token:
                return
            heard = 0.0 if self.line is None else time.monotonic() - self.line.heard
            connection.sendall(json.dumps({"rank": self._rank, "heard": heard}).encode() + b"\n")
            while asked := _read_line(connection):
                send, receive = map(int, asked.split())
                drain(connection, min(receive, _CHUNK))
                connection.sendall(bytes(min(send, _CHUNK)) or b"\0")

    def close(self) -> None:
        """Stop listening."""
        with contextlib.suppress(OSError):
            self.server.shutdown(socket.SHUT_RDWR)
        self.server.close()


def visit(address: str, port: int, token: str, seconds: float, source: str = "") -> tuple[socket.socket, Record]:
    """Connect to a peer and return its answer, which says its rank and how long ago it heard rank 0."""
    connection = dial(address, port, seconds, source=source)
    try:
        connection.sendall(json.dumps({"token": token}).encode() + b"\n")
        return connection, json.loads(_read_line(connection))
    except BaseException:
        connection.close()
        raise


def ask_alive(address: str, port: int, token: str) -> float:
    """Return how long ago a peer heard rank 0, in seconds."""
    connection, answer = visit(address, port, token, CONNECT_SECONDS / 2)
    connection.close()
    return float(answer["heard"])


def accepts(address: str, port: int) -> bool:
    """Tell whether a peer's kernel takes a connection: it does so for a process that is stopped, too."""
    try:
        dial(address, port, CONNECT_SECONDS / 2).close()
    except OSError:
        return False
    return True


def exchange(connection: socket.socket, send: int, receive: int) -> float:
    """Send and receive this many bytes; return the seconds until the answer was there."""
    started = time.perf_counter()
    connection.sendall(f"{receive} {send}\n".encode() + bytes(send))
    drain(connection, receive or 1)
    return time.perf_counter() - started


def drain(connection: socket.socket, count: int) -> None:
    """Read exactly this many bytes."""
    buffer = bytearray(min(count, _CHUNK) or 1)
    while count > 0:
        got = connection.recv_into(buffer, min(count, len(buffer)))
        if not got:
            raise ConnectionError("the connection ended early")
        count -= got


def _read_line(connection: socket.socket) -> bytes:
    """Read up to a newline byte by byte: what follows it belongs to the next reader."""
    line = bytearray()
    while (byte := connection.recv(1)) not in (b"", b"\n") and len(line) < 300:
        line += byte
    return bytes(line)


def plain(address: str) -> str:
    """Return an address without the prefix of IPv4 in IPv6."""
    return address.removeprefix("::ffff:")


def first_reached(addresses: Sequence[str], port: int, seconds: float) -> socket.socket:
    """Connect to the first address that answers.

    Raises:
        OSError: none of them does.
    """
    problem: OSError = OSError("no address is known")
    for address in addresses:
        try:
            return dial(address, port, min(seconds, CONNECT_SECONDS), small=True)
        except OSError as error:
            problem = error
    raise problem
