"""Forked children, and locks that another thread holds while a child is forked."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any


def in_child(question: Callable[[], str]) -> str:
    """What `question` answers in a forked child."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, question().encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    os.waitpid(pid, 0)
    return text


@contextlib.contextmanager
def held_by_another_thread(*locks: Any) -> Iterator[None]:
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with contextlib.ExitStack() as stack:
            for lock in locks:
                stack.enter_context(lock)
            held.set()
            assert done.wait(120)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert held.wait(30)
        yield
    finally:
        done.set()
        thread.join()
