"""What processes of the lab run to see what people are told: ranks that fail, and the command, as text."""

from __future__ import annotations

import contextlib
import io
import logging
import socket
import threading
from pathlib import Path

import mingle
from mingle.cli import main
from mingle.wire import datagrams
from mingle.wire.datagrams import BROWSE_GROUP, job_group

from . import report
from .scenarios import report_log

PORT = 29499


def attempt(job_id: str, rank: int, world_size: int, **arguments: object) -> str:
    """Discover; return the error as the user reads it, or, where none comes, the warnings."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setLevel(logging.WARNING)
    logging.getLogger("mingle").addHandler(handler)
    report_log()
    report("started")
    try:
        with mingle.discover(job_id, rank=rank, world_size=world_size, **arguments):  # type: ignore[arg-type]
            return f"the job has formed\n{text.getvalue()}"
    except mingle.MingleError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        logging.getLogger("mingle").removeHandler(handler)


def command(*words: str) -> tuple[int, str]:
    """Run mingle-discover; return its exit status and what it printed, on both streams."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            main(list(words), prog_name="mingle-discover")
        except SystemExit as end:
            status = end.code
    assert isinstance(status, int)
    return status, text.getvalue()


def speak_another_version(job_id: str) -> None:
    """Multicast what an incompatible mingle would, until killed."""
    seek = datagrams.encode(datagrams.Seek(job=job_id, member=bytes(16), world_size=2))
    foreign = seek[:4] + bytes((datagrams.MAJOR_VERSION + 1,)) + seek[5:]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        while True:
            for group in (job_group(job_id), BROWSE_GROUP):
                sender.sendto(foreign, (group.ipv4, PORT))
            threading.Event().wait(0.1)


HOLD_PORT = Path(__file__).with_name("hold_port.py")
"""A program that is no mingle and opens the discovery's port."""
