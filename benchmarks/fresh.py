"""Ranks in fresh interpreters: each is a new Python, as a user's rank is, and not the fork of one that is warm.

A forked rank replaces itself by ``python -m benchmarks.fresh``, which inherits its channel to the benchmark. The new
process imports the module of the rank's function, and with it torch and mingle, before that function runs.
"""

from __future__ import annotations

import base64
import os
import pickle
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from tests.lab import rank


def run(function: Callable[..., None], *arguments: Any) -> None:
    """Run a function in a new interpreter, which takes the place of this forked process; this does not return."""
    channel = rank._channel
    if channel is None:
        raise RuntimeError("only a rank of the lab can start anew")
    os.set_inheritable(channel.fileno(), True)
    call = base64.b64encode(pickle.dumps((function, arguments, {}))).decode()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "benchmarks.fresh", str(channel.fileno()), call]
    os.execve(sys.executable, command, environment)


if __name__ == "__main__":
    sys.exit(rank.run_rank(Connection(int(sys.argv[1])), base64.b64decode(sys.argv[2])))
