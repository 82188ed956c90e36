"""Real hosts on one machine: see `tests.lab.lab`."""

from __future__ import annotations

from tests.support.leaks import LeakError, leak_check

from .errors import EndedError, LabError, LabTimeoutError, RankFailedError
from .host import UDP, Host, Nic
from .lab import Lab, why_unavailable
from .network import Network
from .process import Process, Rank
from .rank import Event, RaisedError, report

__all__ = [
    "UDP",
    "EndedError",
    "Event",
    "Host",
    "Lab",
    "LabError",
    "LabTimeoutError",
    "LeakError",
    "Network",
    "Nic",
    "Process",
    "RaisedError",
    "Rank",
    "RankFailedError",
    "leak_check",
    "report",
    "why_unavailable",
]
