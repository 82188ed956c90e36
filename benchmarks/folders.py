"""A job that meets in a directory or a bucket, beside multicast and FileStore."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from urllib.request import Request, urlopen

from benchmarks.results import Comparison
from benchmarks.samples import alternate

RANKS = 4
SETTLE_SECONDS = 5.0
"""How long the first ranks wait for the last one; the helper processes of a bucket have started by then."""
WAYS = ("multicast", "directory", "bucket", "FileStore")

TEXT = """\
Three ranks wait on `lo`, and the last one comes: its call, until its process group exists. In a directory and a bucket
each rank has a UDP port of its own, so that no datagram helps. The server of S3 is moto's, on this machine; each
request to a bucket in a region takes some ten milliseconds more. `FileStore` is torch's own, and confirms nothing."""


def run(rounds: int) -> Comparison:
    """Measure; a round takes half a minute."""
    with tempfile.TemporaryDirectory() as directory, s3_server(Path(directory) / "log") as server:
        samples = alternate(
            math.ceil(rounds / 4), {way: partial(_milliseconds, way, Path(directory), server) for way in WAYS}
        )
    return Comparison(name="folders", title="In a directory or a bucket", text=TEXT, unit="ms", samples=samples)


def _milliseconds(way: str, directory: Path, server: Mapping[str, str], number: int) -> float:
    """Return how long the last rank's call took."""
    port = free_port()
    children = [start(way, rank, port, directory, server, number) for rank in range(RANKS - 1)]
    time.sleep(SETTLE_SECONDS)
    children.append(start(way, RANKS - 1, port, directory, server, number))
    times = []
    for pid, reader in children:
        with os.fdopen(reader) as answer:
            times.append(float(answer.read() or "nan"))
        os.waitpid(pid, 0)
    return times[-1] * 1e3


def start(way: str, rank: int, port: int, directory: Path, server: Mapping[str, str], number: int) -> tuple[int, int]:
    """Fork a rank; return its process id and the pipe that says how long its call took."""
    import torch.distributed as dist

    import mingle

    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    try:
        os.close(reader)
        os.environ.update(server, MINGLE_INTERFACE="lo", MINGLE_PROGRESS="off", GLOO_SOCKET_IFNAME="lo")
        # Its own port where datagrams must not help.
        os.environ["MINGLE_PORT"] = str(port if way == "multicast" else free_port())
        job, began = f"{way} {number}", time.monotonic()
        if way == "FileStore":
            where = f"file://{directory}/{number}"
            dist.init_process_group("gloo", init_method=where, rank=rank, world_size=RANKS)
            took = time.monotonic() - began
            dist.destroy_process_group()
        else:
            peers = {"directory": f"dir:{directory}", "bucket": "s3://place/mingle"}.get(way)
            with mingle.init(job, rank=rank, world_size=RANKS, backend="gloo", peers=peers):
                took = time.monotonic() - began
        os.write(writer, str(took).encode())
    finally:
        os._exit(0)


@contextmanager
def s3_server(log: Path) -> Iterator[dict[str, str]]:
    """Run moto's server; yield the environment of those who use it."""
    port = free_port()
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], stdout=file, stderr=file
        )
        try:
            url = f"http://127.0.0.1:{port}"
            for _ in range(300):
                try:
                    with urlopen(Request(f"{url}/place", method="PUT", data=b"")):
                        break
                except OSError:
                    time.sleep(0.1)
            yield {
                "AWS_ENDPOINT_URL": url,
                "AWS_ACCESS_KEY_ID": "a",
                "AWS_SECRET_ACCESS_KEY": "b",
                "AWS_DEFAULT_REGION": "us-east-1",
                "AWS_EC2_METADATA_DISABLED": "true",
            }
        finally:
            process.kill()
            process.wait()


def free_port() -> int:
    """Return a port that nothing uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
