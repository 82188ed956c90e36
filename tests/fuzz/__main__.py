"""Fuzzes by hand.

``python -m tests.fuzz --cases 10000000``
    so many inputs, over all targets, made from the corpus; prints the figures, and the bytes that break something;
``python -m tests.fuzz --seconds 60``
    the same for a time;
``python -m tests.fuzz --only local-message --cases 10000000``
    the same for one target;
``python -m tests.fuzz --guided called --seconds 60``
    one target, with inputs guided by coverage (needs atheris).
"""

from __future__ import annotations

import argparse
import contextlib
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from .machines import KINDS, Theatre
from .targets import TARGETS

GROWTH_BYTES = 16 << 20
"""How much the process may grow after its first tenth: what the allocator does; a leak would be far beyond."""
_BATCH = 2_000


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Tally:
    """How many inputs each target had, and how long they took."""

    def __init__(self) -> None:
        self._cases: Counter[str] = Counter()
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def counting(self, name: str, cases: int) -> Iterator[None]:
        """Count these cases for a target, and the time until they are over."""
        began = time.perf_counter()
        yield
        self._cases[name] += cases
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - began

    def __str__(self) -> str:
        rows = ((name, cases, self._seconds[name]) for name, cases in self._cases.items())
        return "\n".join(f"  {name:16} {cases:>10} inputs {cases / took:>10.0f}/s" for name, cases, took in rows)


def decoders(cases: int, rng: random.Random, tally: Tally | None = None, only: str | None = None) -> None:
    """Give so many inputs to every decoder in turn, or to one."""
    for name, target in TARGETS.items():
        if only not in (None, name):
            continue
        make = target.maker()
        with (tally or Tally()).counting(name, cases):
            for _ in range(cases):
                seed = make(rng)
                try:
                    target.check(seed)
                except BaseException:
                    print(f"{name} breaks on {seed.hex()}")
                    raise


def fuzz(cases: float, seconds: float, seed: int, only: str | None = None) -> int:
    """Give inputs to all targets and machines, or to one of them; return how many."""
    rng = random.Random(seed)
    theatres = {kind: Theatre(kind, rng) for kind in KINDS if only in (None, kind)}
    tally = Tally()
    began, done, settled = time.monotonic(), 0, 0
    kinds = 1 if only is not None else len(TARGETS) + len(theatres)
    share = _BATCH // kinds
    while done < cases and time.monotonic() - began < seconds:
        decoders(share, rng, tally, only)
        for kind, theatre in theatres.items():
            with tally.counting(kind, share):
                for _ in range(share):
                    theatre.step()
        done += share * kinds
        spent = max(done / cases, (time.monotonic() - began) / seconds)
        if not settled and spent > 0.1:
            settled = _peak()
    growth = _peak() - settled
    took = time.monotonic() - began
    print(
        f"{done} inputs from seed {seed} in {took:.0f} s ({done / took:.0f}/s), no exception; "
        f"peak memory {_peak() >> 20} MiB, grown by {growth >> 10} KiB since the first tenth\n{tally}"
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
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Fuzz the decoders and the machines.")
    parser.add_argument("--cases", type=float, default=float("inf"))
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=sorted([*TARGETS, *KINDS]), metavar="TARGET", help="one target or machine")
    parser.add_argument("--guided", choices=sorted(TARGETS), metavar="TARGET", help=", ".join(TARGETS))
    arguments = parser.parse_args()
    if arguments.guided:
        guided(arguments.guided, arguments.seconds)
    elif arguments.cases == arguments.seconds == float("inf"):
        parser.error("say how long: --cases N or --seconds S")
    else:
        fuzz(arguments.cases, arguments.seconds, arguments.seed, arguments.only)


if __name__ == "__main__":
    main()
