"""What mingle logs and shows, kept out of the threads in which no line of an application may run.

A logging handler of the application, its record factory, and what it puts in place of ``sys.stderr`` can block, raise
or fork. In the loop's thread that would stop the discovery, end it, or leave half of it in the child. So such a thread
*defers* what it has to say (`defer_here`): a thread that lives as long as there is something to say runs it, in order.
Every other thread logs as usual, by the same `logger`.

A rank must not wait for the reader of its log either: a pipe that nobody empties, or a terminal that Ctrl-S has
stopped. What such a stream does not take at once is dropped and counted (`write`, `_leave_out`).
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TextIO

from mingle import forksafe
from mingle.errors import counted

MOST_DEFERRED = 1000
"""The number of deferred actions while a handler blocks; further ones are dropped."""
FLUSH_SECONDS = 1.0
"""How long `flush` waits: milliseconds, unless a handler blocks."""
PIPE_BUF = 4096
"""The bytes that fit into a pipe for which poll(2) reports POLLOUT (pipe(7))."""

_logger = logging.getLogger("mingle")
_this_thread = threading.local()
_changing = forksafe.register_lock(threading.Condition())
_deferred: deque[Callable[[], object]] = deque()
_mask: set[int | signal.Signals] | None = None
"""The signals that the application blocks."""
_running = False
"""Whether a thread runs what was deferred."""
_dropped = 0
"""The messages that found no room, since that was last said."""


def defer_here() -> None:
    """Have the present thread defer what it logs and shows, until it ends."""
    global _mask
    _this_thread.defers = True
    if _mask is None and hasattr(signal, "pthread_sigmask"):
        _mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())  # a loop comes first, and has not blocked any signal yet


def run(action: Callable[[], object]) -> None:
    """Run what can reach a line of the application: now, or in another thread if this one defers."""
    global _running
    if not getattr(_this_thread, "defers", False):
        action()
        return
    with _changing:
        if len(_deferred) < MOST_DEFERRED:
            _deferred.append(action)
        if _running:
            return
        _running = True
    try:
        threading.Thread(target=_run_deferred, name="mingle-log", daemon=True).start()
    except RuntimeError:  # no more threads: the next action tries again
        _running = False


def flush() -> None:
    """Wait until what was deferred has been run, so that it precedes what the caller shows next."""
    if _running and not getattr(_this_thread, "defers", False):
        with _changing:
            _changing.wait_for(lambda: not _running, FLUSH_SECONDS)


def _run_deferred() -> None:
    global _running
    if _mask is not None:  # a handler can start a process, which inherits the mask
        signal.pthread_sigmask(signal.SIG_SETMASK, _mask)
    process = os.getpid()
    while True:
        with _changing:
            if not _deferred:
                _running = False
                _changing.notify_all()
                return
            action = _deferred.popleft()
        try:
            action()
        except BaseException:  # a handler that calls sys.exit() ends no process here, and must not end this thread
            threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
        if os.getpid() != process:  # a handler has forked, and returns in the child as well
            return


def _forget_in_child() -> None:
    global _running
    _running = False
    _deferred.clear()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_forget_in_child)


def takes_text(stream: Any) -> bool:
    """Return whether a line can be written to a stream without waiting for its reader."""
    if not hasattr(select, "poll"):  # Windows
        return True
    poll = select.poll()
    try:
        poll.register(stream.fileno(), select.POLLOUT)
        return bool(poll.poll(0))
    except Exception:  # closed, or an object of the application's without a descriptor: a write says what is wrong
        return True


def write(stream: TextIO, text: str) -> bool:
    """Write to a stream what there is room for, and return whether that was all; raise what the stream raises."""
    # A piece in UTF-8 fits into PIPE_BUF.
    for start in range(0, len(text), PIPE_BUF // 4):
        if not takes_text(stream) or not _write(stream, text[start : start + PIPE_BUF // 4]):
            return False
    return True


def _write(stream: TextIO, text: str) -> bool:
    try:
        # A terminal has room or has none, without a least amount of it as a pipe has. O_NONBLOCK must not reach the
        # application, which shares the open file of descriptor 2 (open(2)).
        terminal = os.ttyname(stream.fileno()) if stream is sys.__stderr__ else None
        descriptor = os.open(terminal, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK) if terminal else None
    except (AttributeError, OSError, ValueError):  # no terminal, or another user's
        descriptor = None
    if descriptor is None:
        stream.write(text)
        stream.flush()
        return True
    try:
        return os.write(descriptor, data := text.encode(stream.encoding, "replace")) == len(data)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)


class ConsoleFile:
    """The file of a rich console on standard error that shows a live line: what finds no room is dropped."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.encoding = stream.encoding

    def isatty(self) -> bool:
        """Return whether it is a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._stream.fileno()

    def write(self, text: str) -> int:
        """Write what there is room for."""
        write(self._stream, text)
        return len(text)

    def flush(self) -> None:
        """Do nothing: each write was flushed."""


def drop(count: int = 1) -> None:
    """Count messages that found no room."""
    global _dropped
    _dropped += count


def take_dropped() -> int:
    """Return how many messages found no room since the last call."""
    global _dropped
    count, _dropped = _dropped, 0
    return count


def dropped_text(count: int) -> str:
    """Return what is said of messages that found no room, once there is some."""
    return f"{counted(count, 'message')} dropped, since nothing read this log"


def handlers(logger: logging.Logger, level: int) -> Iterator[logging.Handler]:
    """Yield the application's handlers that show records of this logger and level."""
    at: logging.Logger | None = logger if logger.isEnabledFor(level) else None
    while at is not None:
        for handler in at.handlers:
            if not isinstance(handler, logging.NullHandler) and handler.level <= level:
                yield handler
        at = at.parent if at.propagate else None


def _leave_out(record: logging.LogRecord) -> bool:
    """Return whether a record is handled: the filter that keeps a rank from waiting for the reader of its log."""
    streams = [getattr(handler, "stream", None) for handler in handlers(_logger, record.levelno)]
    if not all(map(takes_text, streams)):
        drop()
        return False
    if streams and (missed := take_dropped()):
        _logger.log(record.levelno, dropped_text(missed))
    return True


_logger.addFilter(_leave_out)


class Logger:
    """The logger ``mingle``, for code that can run in a thread that defers."""

    def log(self, level: int, text: str, *args: object, exc_info: BaseException | None = None) -> None:
        """Log a record."""
        self._log(level, text, args, exc_info)

    def debug(self, text: str, *args: object) -> None:
        """Log a record of this level."""
        self._log(logging.DEBUG, text, args)

    def info(self, text: str, *args: object, exc_info: BaseException | None = None) -> None:
        """Log a record of this level."""
        self._log(logging.INFO, text, args, exc_info)

    def _log(self, level: int, text: str, args: tuple[object, ...], error: BaseException | None = None) -> None:
        if not _logger.isEnabledFor(level):
            return
        if not getattr(_this_thread, "defers", False):
            _logger.log(level, text, *args, exc_info=error, stacklevel=3)
            return
        frame, thread = sys._getframe(2), threading.current_thread()
        place = frame.f_code.co_filename, frame.f_lineno
        exc_info = None if error is None else (type(error), error, error.__traceback__)
        made = {"created": time.time(), "thread": thread.ident, "threadName": thread.name}
        run(partial(_handle, (_logger.name, level, *place, text, args, exc_info, frame.f_code.co_name), made))


def _handle(record: tuple[Any, ...], made: dict[str, Any]) -> None:
    """Have the application's handlers process a record that another thread has made."""
    logged = _logger.makeRecord(*record)
    vars(logged).update(made, msecs=made["created"] % 1 * 1000)
    _logger.handle(logged)


logger = Logger()
