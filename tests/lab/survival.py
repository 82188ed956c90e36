"""Draws docs/pictures/survives.svg: ``python -m tests.lab.survival`` (as root, a minute or two).

Three hosts train. The one that holds the store loses its network and all its processes. The others continue.
The picture is an animation in real time of what the hosts printed.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from html import escape
from pathlib import Path

from . import Host, Lab
from .process import Process

PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "survives.svg"
SCRIPT = """\
import os, sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
steps, checkpoint = torch.zeros(1), sys.argv[1]
if os.path.exists(checkpoint):
    steps += int(open(checkpoint).read())
while True:
    dist.all_reduce(torch.ones(1))
    steps += 1
    if rank == 0:
        open(checkpoint + ".new", "w").write(str(int(steps)))
        os.replace(checkpoint + ".new", checkpoint)
    print(f"step {int(steps):3d}  rank {rank} of {size}", flush=True)
    time.sleep(1)
"""
COMMAND = """\
torchrun --rdzv-backend=mingle --rdzv-id=ada-resnet --nnodes=2:3 \\
    --nproc-per-node=1 --max-restarts=3 train.py"""
STEPS_BEFORE = 4
STEPS_AFTER = 5
SECONDS = 120.0
_KILLED = "# kill -9 of everything on node0, which holds the store, and its cable is pulled"

Line = tuple[float, str, str]
"""When it was printed, in seconds since the start; who printed it; the text."""


def record() -> list[Line]:
    """Run the job and return what was printed, in the order of time."""
    with tempfile.TemporaryDirectory() as directory, Lab() as lab:
        script = Path(directory, "train.py")
        script.write_text(SCRIPT, encoding="utf-8")
        lan = lab.network(link_local=False)
        hosts = [lab.host(lan, name=f"node{number}") for number in range(3)]
        words = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            *COMMAND.replace("\\", "").split()[1:-1],
            str(script),
            f"{directory}/step",
        ]
        environment = {"MINGLE_PROGRESS": "off"}
        began = time.monotonic()
        # The first agent alone elects itself, so node0 holds the store.
        running: dict[Host, Process] = {hosts[0]: hosts[0].run(words, env=environment)}
        time.sleep(1.5)
        running |= {host: host.run(words, env=environment) for host in hosts[1:]}
        printed: list[Line] = []
        counts = dict.fromkeys(hosts, 0)

        def read() -> None:
            for number, host in enumerate(hosts):
                lines = running[host].stdout.splitlines()
                printed.extend((time.monotonic() - began, f"node{number}", text) for text in lines[counts[host] :])
                counts[host] = len(lines)

        def until(steps: int, who: str) -> None:
            before, deadline = len(printed), time.monotonic() + SECONDS
            while sum(1 for _, name, _ in printed[before:] if name == who) < steps:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{who} did not train: {running[hosts[int(who[-1])]].stderr[-2000:]}")
                time.sleep(0.02)
                read()

        until(STEPS_BEFORE, "node1")
        printed.append((time.monotonic() - began, "", _KILLED))
        hosts[0].cut()
        hosts[0].kill()
        until(STEPS_AFTER, "node1")
        return printed


_ROW, _LEFT, _TOP, _WIDTH = 19, 18, 52, 860
_END_SECONDS = 6.0
_COLORS = {"$": "#e6edf3", " ": "#e6edf3", "": "#ff7b72", "node0": "#d2a8ff", "node1": "#79c0ff", "node2": "#7ee787"}
_SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">
<style>
.line {{
  font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; white-space: pre;
  animation-duration: {total:.1f}s; animation-iteration-count: infinite; animation-timing-function: step-end;
}}
@media (prefers-reduced-motion: reduce) {{ .line {{ animation: none }} }}
{rules}
</style>
<rect width="{width}" height="{height}" rx="9" fill="#161b22"/>
<circle cx="22" cy="20" r="6" fill="#ff5f57"/>
<circle cx="42" cy="20" r="6" fill="#febc2e"/>
<circle cx="62" cy="20" r="6" fill="#28c840"/>
<text x="{middle}" y="25" text-anchor="middle" fill="#8b949e" font-family="sans-serif" font-size="13">{title}</text>
{rows}
</svg>
"""


def draw(printed: list[Line]) -> str:
    """Return the lines as an SVG terminal in which each appears when it was printed."""
    prompts = [(0.0, prompt, text) for prompt, text in zip("$ ", COMMAND.splitlines(), strict=True)]
    began = printed[0][0] - 1.0
    shown: list[Line] = [*prompts, *((at - began, who, text) for at, who, text in printed)]
    total = shown[-1][0] + _END_SECONDS
    killed = next(at for at, who, _ in shown if not who)
    again = next(at for at, who, _ in shown if who.startswith("node") and at > killed + 2)
    later = f"{again - killed:.0f} s later"
    rules, rows = [], []
    for number, (at, who, text) in enumerate(shown):
        start = 100 * at / total
        rules.append(f"@keyframes l{number} {{ 0% {{ opacity: 0 }} {start:.2f}%, 100% {{ opacity: 1 }} }}")
        mark = f'<tspan fill="#ffa657">  ← {later}</tspan>' if at == again else ""
        rows.append(
            f'<text xml:space="preserve" class="line" style="animation-name: l{number}" x="{_LEFT}" '
            f'y="{_TOP + _ROW * (number + 1)}" fill="{_COLORS[who]}">{who:{5 if who.startswith("node") else 0}} '
            f"{escape(text)}{mark}</text>"
        )
    return _SVG.format(
        width=_WIDTH,
        middle=_WIDTH // 2,
        height=_TOP + _ROW * (len(shown) + 1) + 12,
        label=f"Three nodes train. The node that holds the store is killed; {later} the two others train again.",
        title="the same command on node0, node1 and node2",
        total=total,
        rules="\n".join(rules),
        rows="\n".join(rows),
    )


def main() -> None:
    """Record and draw."""
    PICTURE.write_text(draw(record()), encoding="utf-8")
    print(os.path.relpath(PICTURE))


if __name__ == "__main__":
    main()
