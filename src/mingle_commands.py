"""The console scripts, which end on Ctrl-C from their first line on: silently, until their command handles it.

They stand outside the package ``mingle``, whose import takes a moment. Python raises ``KeyboardInterrupt`` in whatever
module is just being imported: a traceback, or none at all, since torch and numpy drop it in some of their imports.
"""

from __future__ import annotations

import contextlib
import importlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def ended_by_ctrl_c() -> Iterator[None]:
    """Let SIGINT end the process at once in the block, as it ends programs that do not handle it."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored, as in `nohup`, or an application's
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _main(module: str) -> object:
    with ended_by_ctrl_c():
        command = importlib.import_module(module)
    return command.main()


def discover() -> object:
    """Run ``mingle-discover``."""
    return _main("mingle.cli")


def check() -> object:
    """Run ``mingle-check``."""
    return _main("mingle.check.command")


def run() -> object:
    """Run ``mingle-run``."""
    return _main("mingle.run.command")
