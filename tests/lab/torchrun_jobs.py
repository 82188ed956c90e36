"""Real torchrun in lab hosts: agents are forked from the zygote, their workers are fresh interpreters."""

from __future__ import annotations

import json
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from . import Host, Rank, report
from .host import MODULES
from .scenarios import report_log

SCRIPT = Path(__file__).with_name("training.py")
SECONDS = 90.0
"""Far above what a step of a scenario needs: workers are fresh interpreters, and machines are loaded."""
INSTALLED = "the entry point is not installed: `make test` installs the tree, or `pip install --no-deps -e .`"

Said = dict[str, Any]
_STORE_AT = re.compile(r"the agents' store is at (\S+):\d+,")


def torchrun(arguments: Sequence[str]) -> None:
    """What the command does."""
    from torch.distributed.run import main

    report_log()
    _report_rounds()
    assert any(point.name == "mingle" for point in entry_points(group="torchrun.handlers")), INSTALLED
    main(list(arguments))


def _report_rounds() -> None:
    """Let the test see which rounds torchrun gets, and of which session."""
    from mingle.elastic.handler import MingleRendezvousHandler

    genuine = MingleRendezvousHandler.next_rendezvous

    def next_rendezvous(handler: MingleRendezvousHandler) -> Any:
        joined = genuine(handler)
        report("round", session=os.environ["MINGLE_GENERATION"], size=joined.world_size)
        return joined

    MingleRendezvousHandler.next_rendezvous = next_rendezvous  # type: ignore[method-assign]


class Job:
    """One job: the line that every host runs, and what its workers have said."""

    def __init__(
        self,
        directory: Path,
        name: str,
        nodes: str,
        *,
        workers: int = 1,
        restarts: int = 0,
        conf: str = "last_call_timeout=3",
        script: Sequence[str] = (),
        options: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.env = {"MINGLE_PROGRESS": "off", "PYTHONPATH": MODULES, **(env or {})}
        self.stop_file = directory / f"{name}.stop"
        self.fail_file = directory / f"{name}.fail"
        self.agents: dict[Host, Rank[None]] = {}
        self.past: list[tuple[Host, Rank[None]]] = []
        self.late_seconds = 0.0
        """By how much this machine is slower than an idle one; a test that measures adds it to its bounds."""
        self.line = [
            "--rdzv-backend=mingle",
            f"--rdzv-id={name}",
            f"--nnodes={nodes}",
            f"--nproc-per-node={workers}",
            f"--max-restarts={restarts}",
            "--rdzv-conf=" + ",".join(filter(None, (f"discovery_timeout={SECONDS:g}", conf))),
            *options,
            str(SCRIPT),
            f"--until={self.stop_file}",
            f"--fail={self.fail_file}",
            *script,
        ]

    def start(self, *hosts: Host, **variables: str) -> None:
        """Run the line on each of these hosts, with further variables."""
        for host in hosts:
            agent = host.start(torchrun, self.line, env={**self.env, **variables})
            self.agents[host] = agent
            self.past.append((host, agent))

    def said(self, host: Host, event: str = "step") -> list[Said]:
        """What the workers of the agent that runs on this host have said so far."""
        return said(self.agents[host], event)

    def group(self, host: Host) -> tuple[str, ...]:
        """The hosts that took part in this one's last step; none before the first."""
        steps = self.said(host)
        return tuple(sorted(set(steps[-1]["hosts"]))) if steps else ()

    def replace_store_host(self, hosts: Sequence[Host]) -> None:
        """Kill the host with the store; the others must train again, and then all, once it has been started anew."""
        lost = self.store_host(hosts)
        lost.kill()
        at = time.monotonic()
        again = self.wait_for_group([host for host in hosts if host is not lost], since=at)
        self.start(lost)
        back = time.monotonic()
        grown = self.wait_for_group(hosts, since=back)
        print(f"trained again after {again - at:.1f} s; all again {grown - back:.1f} s after the lost one's start")

    def wait_for_group(self, hosts: Sequence[Host], since: float = 0.0, seconds: float = SECONDS) -> float:
        """Wait until each of these hosts has stepped after ``since`` with exactly these; when the last did it."""
        wanted = tuple(sorted(host.name for host in hosts))
        firsts: dict[Host, float] = {}

        def all_have() -> bool:
            for host in hosts:
                if host not in firsts:
                    for step in self.said(host):
                        if step["at"] > since and tuple(sorted(set(step["hosts"]))) == wanted:
                            firsts[host] = step["at"]
                            break
            return len(firsts) == len(hosts)

        self.until(all_have, f"{wanted} to train together", seconds)
        return max(firsts.values())

    def until(self, condition: Callable[[], bool], what: str, seconds: float = SECONDS) -> None:
        """Wait until something holds; a file gives no notice."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"{what} did not come in {seconds:g} s\n{self.describe()}")
            threading.Event().wait(0.1)

    def leave_file(self, host: Host) -> Path:
        """The file that tells the workers of one host to stop."""
        return self.stop_file.with_suffix(f".{host.name}")

    def store_host(self, hosts: Sequence[Host]) -> Host:
        """The one of these hosts that holds the agents' store."""
        return store_host({host: self.agents[host] for host in hosts})

    def finish(self, *hosts: Host, seconds: float = SECONDS) -> None:
        """Tell the workers to stop; every agent on these hosts ends well."""
        self.stop_file.touch()
        for host in hosts or self.agents:
            self.agents[host].result(seconds)
            assert self.said(host, "done")

    def groups(self, since: float = 0.0) -> list[tuple[float, frozenset[str]]]:
        """Every step that anybody made after ``since``, in order, with the hosts that took part in it."""
        steps = [step for _, agent in self.past for step in said(agent, "step") if step["at"] > since]
        return sorted((step["at"], frozenset(step["hosts"])) for step in steps)

    def rounds(self, since: float = 0.0) -> list[tuple[float, str, str]]:
        """Every round that a torchrun got after ``since``, in order: when, on which host, and in which session."""
        events = [(host, event) for host, agent in self.past for event in agent.events if event.name == "round"]
        return sorted((event.time, host.name, event["session"]) for host, event in events if event.time > since)

    def describe(self) -> str:
        """What was said last, for the message of a failed test."""
        lines = []
        for host, agent in self.past:
            steps = said(agent, "step")
            last = {key: steps[-1][key] for key in ("at", "hosts", "attempt")} if steps else "no step"
            lines.append(f"{host.name}: {agent.exit_code=}, {last}")
        return "\n".join(lines)


def store_host(agents: Mapping[Host, Rank[None]]) -> Host:
    """The host that holds the agents' store, by the last word of its agents."""
    found = [
        (event.time, match[1])
        for agent in agents.values()
        for event in agent.events
        if event.name == "log" and (match := _STORE_AT.search(event["text"]))
    ]
    _, address = max(found)
    return next(host for host in agents if host.address() == address)


def said(agent: Rank[None], event: str) -> list[Said]:
    """What the workers of an agent have said so far."""
    whole = [line for line in agent.stdout.splitlines(keepends=True) if line.startswith("{") and line.endswith("}\n")]
    lines = [json.loads(line) for line in whole]  # the last one may still be on its way to the file
    return [line for line in lines if line["event"] == event]


MakeJob = Callable[..., Job]


@contextmanager
def jobs() -> Iterator[MakeJob]:
    """Give a maker of jobs, whose files are gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="lab-torchrun-") as directory:
        yield lambda *arguments, **options: Job(Path(directory), *arguments, **options)


def never_apart(groups: Sequence[tuple[float, frozenset[str]]]) -> None:
    """Two groups that share no host never train at the same time."""
    spans: dict[frozenset[str], tuple[float, float]] = {}
    for at, group in groups:
        first, _ = spans.get(group, (at, at))
        spans[group] = first, at
    for one, (first, last) in spans.items():
        for other, (begin, end) in spans.items():
            if not one & other and first < end and begin < last:
                raise AssertionError(f"{sorted(one)} and {sorted(other)} trained at the same time: {spans}")
