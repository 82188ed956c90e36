"""Precedence over what else the machine does, for a machine that is not idle: a figure shall be the contenders' own.

Off unless it is asked for (``--realtime``). What is measured then runs under SCHED_RR (sched(7)) from its begin on, the
same for every contender; what prepares it does not.
"""

from __future__ import annotations

import os

VARIABLE = "BENCH_REALTIME"
"""Set for the processes of a run in which it was asked for."""


def asked_for() -> bool:
    """Whether this run was started with ``--realtime``."""
    return os.environ.get(VARIABLE) == "1"


def take() -> None:
    """Give it to this thread and to all that it starts from here on, if it was asked for."""
    if asked_for():
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
