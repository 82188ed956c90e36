"""The pictures of the results: a plot for each comparison, and three figures for readers who have seen nothing yet.

A plot shows each measurement as a dot and the medians as lines. A figure has a sentence as its title. It is an SVG
whose colors follow the light or dark scheme of the page, and whose text is text.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import table
from benchmarks.results import ROOT, Comparison, load_all
from benchmarks.samples import median
from benchmarks.script import FORMED, FOUND

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURES = ROOT / "docs" / "pictures"
GIVEN_UP = 60.0  # seconds: when benchmarks.torchrun_recovery stops waiting

_TEXT, _OURS, _PEER, _NEVER, _GRID = "#1f2328", "#0969da", "#6e7781", "#cf222e", "#d0d7de"
_DARK = {_TEXT: "#f0f6fc", _OURS: "#58a6ff", _PEER: "#9198a1", _NEVER: "#ff7b72", _GRID: "#3d444d"}
_FONTS = "system-ui, 'Segoe UI', Helvetica, Arial, 'Liberation Sans', sans-serif"
_WIDTH = 10.0  # inches; a page of 720 pixels shows it at its own size
_TITLE, _LABEL, _SMALL = 21, 16, 14


def draw(comparison: Comparison, folder: Path = PICTURES) -> Path:
    """Draw a comparison and return the file."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib import ticker

    names = list(comparison.samples)
    figure, axes = plt.subplots(figsize=(6.4, 0.7 + 0.42 * len(names)), layout="constrained")
    _dots(axes, [(comparison.samples[name], "tab:blue" if _is_ours(name) else "tab:gray") for name in names], 4)
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


def _is_ours(name: str) -> bool:
    return "mingle" in name


def _dots(axes: Axes, rows: Sequence[tuple[Sequence[float], str]], size: float) -> None:
    """Draw each measurement of each row as a dot, and the median as a line."""
    rng = random.Random(0)
    for row, (values, color) in enumerate(rows):
        heights = [row + rng.uniform(-0.2, 0.2) for _ in values]
        axes.plot(values, heights, ".", color=color, alpha=0.5, markersize=size)
        middle = median(values)
        axes.plot([middle, middle], [row - 0.32, row + 0.32], color=color, linewidth=size / 2)


# --- figures -----------------------------------------------------------------------------------------------------


def titles(results: Mapping[str, Comparison]) -> dict[str, str]:
    """Return the sentence above each figure, by the figure's name; the numbers are those of the results."""
    recovery, first_step = results["torchrun_recovery"].samples, results["torchrun"].samples
    ours, theirs = (recovery[f"{name}, the store's node vanishes"] for name in ("mingle", "c10d"))
    return {
        "recovery": f"The node that holds the store vanishes:\nmingle resumes in {_seconds(ours)}; {_again(theirs)}",
        "start": f"torchrun makes its first step after {_seconds(first_step['mingle'])} with mingle,\n"
        f"and after {_seconds(first_step['c10d'])} with c10d and a known endpoint",
        "how-it-works": "Ranks find each other by multicast,\nagree over TCP, and start together",
    }


def _seconds(values: Sequence[float]) -> str:
    return f"{table.number(median(values))} s"


def _again(values: Sequence[float]) -> str:
    count, runs = sum(value < GIVEN_UP for value in values), len(values)
    return f"c10d resumes in {count} of {runs} runs" if count else f"c10d does not in any of {runs} runs"


def draw_figures(folder: Path = PICTURES) -> list[Path]:
    """Draw the figures and return their files."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    results = {name: comparison for name, (comparison, _) in load_all().items()}
    drawings: dict[str, tuple[float, Callable[[Axes, Mapping[str, Comparison]], None]]] = {
        "recovery": (1.7 + 1.6 * len(_faults(results)), _draw_recovery),
        "start": (4.6, _draw_start),
        "how-it-works": (4.4, _draw_how_it_works),
    }
    paths = []
    # The salt makes the identifiers in the file the same each time.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "mingle", "font.size": _LABEL, "text.color": _TEXT}):
        for name, title in titles(results).items():
            height, drawing = drawings[name]
            figure, axes = plt.subplots(figsize=(_WIDTH, height))
            figure.suptitle(title, x=0.02, y=0.965, ha="left", va="top", fontsize=_TITLE, weight="bold", color=_TEXT)
            figure.subplots_adjust(left=0.02, right=0.98, top=0.80, bottom=0.15)
            drawing(axes, results)
            path = folder / f"{name}.svg"
            figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})
            plt.close(figure)
            path.write_text(_for_both_schemes(path.read_text(encoding="utf-8"), title), encoding="utf-8")
            paths.append(path)
    return paths


def _for_both_schemes(svg: str, title: str) -> str:
    """Return the SVG with a label, with the reader's fonts, and with colors for a dark page."""
    rules = "".join(
        f'[style*="{kind}: {light}"]{{{kind}:{dark}!important}}'
        for light, dark in _DARK.items()
        for kind in ("fill", "stroke")
    )
    svg = re.sub(r"'DejaVu Sans'(, [^;\"]*)?", _FONTS, svg)
    svg = re.sub(r"<metadata>.*?</metadata>\n?", "", svg, flags=re.DOTALL)
    label = title.replace("\n", " ")
    style = f"<style>@media (prefers-color-scheme: dark){{{rules}}}</style>"
    return re.sub(r"(<svg [^>]*)>", rf'\1 role="img" aria-label="{label}">\n {style}', svg, count=1)


_FAULTS = {
    "the store's node vanishes": "the node with the store vanishes",
    "another node is killed": "another node is killed",
    "a worker crashes": "a worker crashes",
}


def _faults(results: Mapping[str, Comparison]) -> dict[str, str]:
    """Return the faults to show, by their names in the results: those that c10d was measured with as well."""
    samples = results["torchrun_recovery"].samples
    return {fault: heading for fault, heading in _FAULTS.items() if f"c10d, {fault}" in samples}


def _draw_recovery(axes: Axes, results: Mapping[str, Comparison]) -> None:
    samples, faults = results["torchrun_recovery"].samples, _faults(results)
    rows = [(f"{name}, {fault}", name) for fault in faults for name in ("mingle", "c10d")]
    places = _grouped(axes, list(faults.values()), [name for _, name in rows])
    for (contender, name), y in zip(rows, places, strict=True):
        values, color = samples[contender], _color(name)
        again = [value for value in values if value < GIVEN_UP]
        given_up = len(values) - len(again)
        _points(axes, again, y, color)
        if given_up:
            axes.plot([0, GIVEN_UP], [y, y], color=_NEVER, linewidth=2, linestyle=(0, (2, 3)), zorder=1)
            axes.plot([GIVEN_UP], [y], "x", color=_NEVER, markersize=13, markeredgewidth=3.5, clip_on=False)
            text = f"{given_up} of {len(values)} runs"
            axes.text(GIVEN_UP + 2, y, text, color=_NEVER, va="center", weight="bold")
        else:
            _median_label(axes, values, y, color)
    axes.set_xlim(-14, GIVEN_UP + 22)
    runs = len(samples[rows[0][0]])
    note = f"seconds until all that are left train again; {runs} runs each in turn; ×: not within {GIVEN_UP:.0f} s"
    _scale(axes, range(0, int(GIVEN_UP) + 1, 10), places, note)


def _draw_start(axes: Axes, results: Mapping[str, Comparison]) -> None:
    first_step, script = results["torchrun"].samples, results["script"].samples
    rows = [
        ("mingle", first_step["mingle"]),
        ("c10d, known endpoint", first_step["c10d"]),
        ("mingle", script["mingle"]),
        ("known MASTER_ADDR", script["known address"]),
    ]
    groups = ["torchrun on 3 nodes, to the first step", "python train.py on 4 nodes, to the process group"]
    places = _grouped(axes, groups, [name for name, _ in rows])
    for (name, values), y in zip(rows, places, strict=True):
        _points(axes, values, y, _color(name))
        _median_label(axes, values, y, _color(name))
    most = max(value for _, values in rows for value in values)
    axes.set_xlim(-0.5 * most, 1.2 * most)
    note = f"seconds from the start of the command; {len(rows[0][1])} runs each in turn; mostly the import of torch"
    _scale(axes, range(int(most) + 1), places, note)


def _color(name: str) -> str:
    return _OURS if _is_ours(name) else _PEER


def _grouped(axes: Axes, groups: Sequence[str], names: Sequence[str]) -> list[float]:
    """Prepare axes with groups of rows below headings, name the rows, and return their heights."""
    each = len(names) // len(groups)
    pitch = each + 1.0
    places = [group * pitch + 0.85 * row + 0.85 for group in range(len(groups)) for row in range(each)]
    for number, group in enumerate(groups):
        axes.text(0.0, number * pitch, group, transform=_row(axes), va="center", weight="bold", fontsize=_LABEL)
    for name, y in zip(names, places, strict=True):
        axes.text(0.0, y, name, transform=_row(axes), va="center", color=_color(name), fontsize=_LABEL)
    axes.set_ylim(places[-1] + 0.6, -0.45)
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    return places


def _scale(axes: Axes, ticks: Sequence[int], places: Sequence[float], note: str) -> None:
    """Draw the scale below the rows, and its lines behind them, but not behind the headings."""
    axes.set_xticks(ticks)
    axes.tick_params(axis="x", length=0, labelsize=_SMALL, labelcolor=_PEER)
    for y in places:
        axes.vlines(ticks, y - 0.43, y + 0.43, color=_GRID, linewidth=1, zorder=0)
    axes.set_xlabel(note, fontsize=_SMALL, color=_PEER, loc="left")


def _row(axes: Axes) -> Any:
    """Return the transform of a label: from the left edge of the axes, at the height of a row."""
    return axes.get_yaxis_transform()


def _points(axes: Axes, values: Sequence[float], y: float, color: str) -> None:
    rng = random.Random(0)
    heights = [y + rng.uniform(-0.16, 0.16) for _ in values]
    axes.plot(values, heights, "o", color=color, alpha=0.55, markersize=9, markeredgewidth=0)


def _median_label(axes: Axes, values: Sequence[float], y: float, color: str) -> None:
    middle = median(values)
    axes.plot([middle, middle], [y - 0.33, y + 0.33], color=color, linewidth=4, solid_capstyle="round")
    place = (max(values), y)
    axes.annotate(_seconds(values), place, (14, 0), textcoords="offset points", va="center", color=color, weight="bold")


_STEPS = (
    ("1  Ask", 'multicast: who hosts\njob "ada-resnet"?'),
    ("2  Join", "TCP: proof of the session,\nthen rank and node"),
    ("3  GO", "every rank has reached\nthe store: torch starts"),
)
_NODES = (2.0, 1.0, 0.0)


def _draw_how_it_works(axes: Axes, results: Mapping[str, Comparison]) -> None:
    member = results["script"].extra["mingle"]
    axes.set_axis_off()
    axes.set_xlim(0, 12)
    axes.set_ylim(-1.4, 3.25)
    measured = (f"{median(member[FOUND]):.0f} ms", "", f"{median(member[FORMED]):.0f} ms")
    for step, (head, says) in enumerate(_STEPS):
        left = 4.15 * step
        axes.text(left, 2.8, head, weight="bold", fontsize=_LABEL, va="center")
        axes.text(left + 3.35, 2.8, measured[step], color=_PEER, fontsize=_SMALL, ha="right", va="center")
        axes.text(left, -0.55, says, fontsize=_SMALL, va="top")
        _node(axes, left + 0.5, 1.0, "rank 0", _OURS)
        for number, y in enumerate(_NODES, 1):
            _node(axes, left + 2.85, y, f"rank {number}", _PEER)
            _arrow(axes, (left + 2.35, y), (left + 1.03, 1.0 + 0.22 * (y - 1)), step)
        if step == 0:
            axes.plot([left + 1.75] * 2, [-0.35, 2.35], color=_GRID, linewidth=9, solid_capstyle="round", zorder=0)


def _node(axes: Axes, x: float, y: float, name: str, color: str) -> None:
    box = {"boxstyle": "round,pad=0.45", "facecolor": "none", "edgecolor": color, "linewidth": 2.5}
    axes.text(x, y, name, ha="center", va="center", fontsize=_SMALL, color=_TEXT, bbox=box)


def _arrow(axes: Axes, node: tuple[float, float], host: tuple[float, float], step: int) -> None:
    start, end = (host, node) if step == len(_STEPS) - 1 else (node, host)
    looks = {
        "arrowstyle": "-|>,head_width=0.3,head_length=0.6",
        "color": _OURS,
        "linewidth": 2.5,
        "linestyle": (0, (2, 2)) if step == 0 else "-",
        "shrinkA": 0,
        "shrinkB": 0,
    }
    axes.annotate("", end, start, arrowprops=looks)


if __name__ == "__main__":
    for drawn in draw_figures():
        print(drawn.relative_to(ROOT))
