"""The small steps, by pyperf: one datagram and one frame, made and read, and the key of a secret."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.results import ROOT, Comparison

TEXT = """\
Measured by pyperf: an OFFER written and read, a JOIN frame written and read, and the same with a secret's signature."""


def run(rounds: int) -> Comparison:
    """Measure; the number of rounds is pyperf's own affair, but for its order of magnitude."""
    import pyperf

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "micro.json")
        words = [sys.executable, "-m", "benchmarks.micro", "--quiet", "--fast", "-o", str(path)]
        words += ["--inherit-environ=PYTHONPATH", *(["--processes=3"] if rounds < 10 else [])]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
        subprocess.run(words, env=environment, stdout=subprocess.DEVNULL, check=True, cwd=ROOT)
        suite = pyperf.BenchmarkSuite.load(str(path))
    samples = {each.get_name(): [value * 1e6 for value in each.get_values()] for each in suite.get_benchmarks()}
    return Comparison(name="micro", title="The small steps", text=TEXT, unit="µs", samples=samples)


def _measure() -> None:
    import pyperf

    from mingle.wire import datagrams, frames
    from mingle.wire.authentication import JobKey

    key = JobKey(b"a secret of some length", "bench")
    offer = datagrams.Offer(
        job="bench",
        session=bytes(16),
        host=bytes(range(16)),
        addresses=("192.0.2.10", "2001:db8::a"),
        port=40125,
        world_size=8,
        hostname="node-0",
        pid=815,
    )
    who = frames.ProcessInfo(hostname="node-3", pid=4711, address="192.0.2.13", rank=3)
    path = frames.Path(host_address="192.0.2.10", local_address="192.0.2.13", interface="eth0")
    join = frames.Join(world_size=8, rank=3, node="boot:9a3f/net:4026531840/pid:4026531836", who=who, paths=(path,))
    plain, signed = datagrams.encode(offer), datagrams.encode(offer, key)
    frame = frames.PREFACE + frames.encode_frame(join)

    def read_frame() -> None:
        reader = frames.FrameReader()
        reader.feed(frame)
        if reader.next_frame() is None:
            raise RuntimeError("no frame was read")

    runner = pyperf.Runner()
    runner.bench_func("OFFER written", datagrams.encode, offer)
    runner.bench_func("OFFER read", datagrams.decode, plain)
    runner.bench_func("OFFER written, signed", datagrams.encode, offer, key)
    runner.bench_func("OFFER read, signed", datagrams.decode, signed, key)
    runner.bench_func("JOIN written", frames.encode_frame, join)
    runner.bench_func("JOIN read", read_frame)


if __name__ == "__main__":
    _measure()
