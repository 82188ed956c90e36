"""A comparison as a picture: each measurement a dot, the medians as lines, on a logarithmic axis."""

from __future__ import annotations

import random
from pathlib import Path

from benchmarks.results import ROOT, Comparison
from benchmarks.samples import median

PICTURES = ROOT / "docs" / "pictures"


def draw(comparison: Comparison, folder: Path = PICTURES) -> Path:
    """Draw a comparison and return the file."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib import ticker

    names = list(comparison.samples)
    figure, axes = plt.subplots(figsize=(6.4, 0.7 + 0.42 * len(names)), layout="constrained")
    rng = random.Random(0)
    for row, name in enumerate(names):
        values = comparison.samples[name]
        color = "tab:blue" if name.startswith("mingle") else "tab:gray"
        heights = [row + rng.uniform(-0.2, 0.2) for _ in values]
        axes.plot(values, heights, ".", color=color, alpha=0.5, markersize=4)
        middle = median(values)
        axes.plot([middle, middle], [row - 0.32, row + 0.32], color=color, linewidth=2)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel(comparison.unit)
    every = [value for values in comparison.samples.values() for value in values]
    if min(every) > 0 and max(every) / min(every) > 20:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(ticker.NullFormatter())
    else:
        axes.set_xlim(left=0)
    axes.grid(axis="x", alpha=0.3)
    axes.set_title(comparison.title, fontsize=9, loc="left")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"bench-{comparison.name.replace('_', '-')}.png"
    # Without the version of matplotlib in it the same figures give the same file.
    figure.savefig(path, dpi=80, metadata={"Software": None})
    plt.close(figure)
    return path
