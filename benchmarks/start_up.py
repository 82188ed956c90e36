"""What it costs to have mingle: fresh interpreters that import it, and the command's help."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from functools import partial

from benchmarks import precedence
from benchmarks.results import ROOT, Comparison, Goal
from benchmarks.samples import alternate, median

TEXT = """\
From the start of a fresh interpreter to its end. "all that init needs" also loads what the first call of
`mingle.init` loads, except torch."""

EVERYTHING = "import mingle, mingle.distributed.rendezvous"


def run(rounds: int) -> Comparison:
    """Measure."""
    commands = {
        "python -c pass": ["-c", "pass"],
        "import mingle": ["-c", "import mingle"],
        "import mingle, and all that init needs": ["-c", EVERYTHING],
        "mingle-discover --help": ["-m", "mingle", "--help"],
    }
    for command in commands.values():  # the first of each writes the bytecode
        _seconds(command)
    samples = alternate(rounds, {name: partial(_seconds, words) for name, words in commands.items()})
    bare = median(samples["python -c pass"])
    everything = median(samples["import mingle, and all that init needs"])
    return Comparison(
        name="start_up",
        title="Importing mingle",
        text=TEXT,
        unit="ms",
        samples=samples,
        goals=(
            Goal("import mingle, over python -c pass", median(samples["import mingle"]) - bare, 80, "ms"),
            Goal("import mingle and all that init needs, over python -c pass", everything - bare, 80, "ms"),
            Goal("mingle-discover --help", median(samples["mingle-discover --help"]), 150, "ms"),
        ),
        ratios={name: median(samples[name]) / bare for name in samples if name != "python -c pass"},
    )


def _seconds(words: list[str], _round: int = 0) -> float:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPATH"] = str(ROOT / "src")
    started = time.monotonic()
    subprocess.run(
        [sys.executable, *words], env=environment, stdout=subprocess.DEVNULL, check=True, preexec_fn=precedence.take
    )
    return (time.monotonic() - started) * 1e3
