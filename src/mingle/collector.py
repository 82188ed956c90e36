"""The pause of the garbage collector while mingle's modules are loaded and a job forms.

A full collection is due soon after the import of torch. It walks over all objects of torch, which takes some 80 ms, and
if it falls into rank 0's import or call, all other ranks wait for it as well. `Discovery.run` bounds the pause.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator

_collector_paused_by: threading.Thread | None = None


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector, unless the program has switched it off."""
    global _collector_paused_by
    try:
        if gc.isenabled():
            _collector_paused_by = threading.current_thread()
        gc.disable()
        yield
    finally:
        resume_collector()


def resume_collector() -> None:
    """End the pause of the garbage collector, if this thread began one: a call that is refused ends no other's."""
    if _collector_paused_by is threading.current_thread():
        _collect_again()


def _collect_again() -> None:
    global _collector_paused_by
    if _collector_paused_by is not None:
        gc.enable()
        _collector_paused_by = None


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_collect_again)
