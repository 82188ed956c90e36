"""Fuzzes by hand.

``python -m tests.fuzz --cases 10000000``
    so many inputs, over all targets, made from the corpus; prints the figures, and the bytes that break something;
``python -m tests.fuzz --seconds 60``
    the same for a time;
``python -m tests.fuzz --guided called --seconds 60``
    one target, with inputs guided by coverage (needs atheris).
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import tempfile
import time
from pathlib import Path

from . import mutation
from .machines import KINDS, Theatre
from .targets import TARGETS, story

GROWTH_BYTES = 16 << 20
"""How much the process may grow after its first tenth: what the allocator does; a leak would be far beyond."""
_BATCH = 2_000


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def decoders(cases: int, rng: random.Random) -> None:
    """Gives so many inputs to every decoder in turn."""
    for target in TARGETS.values():
        said = story(target.speaker) if target.speaker else []
        for _ in range(cases):
            seed = mutation.stream(said, rng) if said else mutation.datagram(rng.choice(target.datagrams), rng)
            try:
                target.check(seed)
            except BaseException:
                print(f"{target.check.__name__} breaks on {seed.hex()}")
                raise


def fuzz(cases: int, seconds: float, seed: int) -> int:
    """Gives inputs to all targets and machines; returns how many."""
    rng = random.Random(seed)
    theatres = [Theatre(kind, rng) for kind in KINDS]
    began, done, settled = time.monotonic(), 0, 0
    share = _BATCH // (len(TARGETS) + len(theatres))
    while done < cases and time.monotonic() - began < seconds:
        decoders(share, rng)
        for theatre in theatres:
            for _ in range(share):
                theatre.step()
        done += share * (len(TARGETS) + len(theatres))
        spent = max(done / cases, (time.monotonic() - began) / seconds)
        if not settled and spent > 0.1:
            settled = _peak()
    growth = _peak() - settled
    took = time.monotonic() - began
    print(
        f"{done} inputs from seed {seed} in {took:.0f} s ({done / took:.0f}/s), no exception; "
        f"peak memory {_peak() >> 20} MiB, grown by {growth >> 10} KiB since the first tenth"
    )
    assert growth <= GROWTH_BYTES, f"the process has grown by {growth} bytes"
    return done


def guided(name: str, seconds: float) -> None:
    """Fuzzes one target with atheris for a time; does not return."""
    import atheris  # type: ignore[import-not-found,unused-ignore]

    target = TARGETS[name]
    atheris.instrument_all()
    corpus = Path(tempfile.mkdtemp(prefix=f"mingle-fuzz-{name}-"))
    for number, seed in enumerate(target.seeds()):
        (corpus / str(number)).write_bytes(seed)
    atheris.Setup([sys.argv[0], f"-max_total_time={seconds:.0f}", "-max_len=4096", str(corpus)], target.check)
    atheris.Fuzz()


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Fuzz the decoders and the machines.")
    parser.add_argument("--cases", type=float, default=float("inf"))
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--guided", choices=sorted(TARGETS), metavar="TARGET", help=", ".join(TARGETS))
    arguments = parser.parse_args()
    if arguments.guided:
        guided(arguments.guided, arguments.seconds)
    elif arguments.cases == arguments.seconds == float("inf"):
        parser.error("say how long: --cases N or --seconds S")
    else:
        fuzz(arguments.cases, arguments.seconds, arguments.seed)


if __name__ == "__main__":
    main()
