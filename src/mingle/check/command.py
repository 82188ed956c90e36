"""The command line of ``mingle-check``, the further processes of this machine, and what is printed."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, cast

import click
from msgspec import structs, to_builtins

from mingle import detached, records
from mingle.check.verdicts import SLOW_FACTOR, PairReport, Report, reference
from mingle.cli import output
from mingle.cli.options import FAILED, Shared, setting_option, shared_options
from mingle.cli.output import Table
from mingle.errors import ConfigurationError, MingleError, counted, refused
from mingle.text import printable
from mingle_commands import ended_by_ctrl_c

if TYPE_CHECKING:
    from rich.console import Console

    from mingle.check.conductor import Options
    from mingle.config.settings import Arguments
    from mingle.config.values import Secret

JOB_ID = "mingle-check"
STEP_SECONDS = 20.0
MOST_STEP_SECONDS = 1e6
"""The largest --timeout: a much larger one overflows in torch, whose messages then fail at once."""
LEAVE_SECONDS = 15.0
"""How long a further process of this machine has to end after this one."""
_LOCAL = "_MINGLE_CHECK_LOCAL"
"""Set for the processes that --nproc-per-node starts."""
BROKEN = "broken"
MEMORY_FRACTION = 16
"""The largest message, as a part of the machine's memory: a collective keeps a few of them in each rank."""
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def _bytes(_context: click.Context, _parameter: click.Parameter, text: str) -> int:
    found = re.fullmatch(r"(\d+)\s*([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    size = int(found[1]) * _UNITS[found[2].upper()] if found else 0
    if size < 4:
        raise click.BadParameter(f"{text!r} is not a size of at least 4 bytes; write 64M, 512K or 4096.")
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size > memory // MEMORY_FRACTION:
        raise click.BadParameter(
            f"{text!r} is more than 1/{MEMORY_FRACTION} of this machine's memory ({memory >> 20} MiB): "
            "a rank holds several messages at once. Give a smaller size."
        )
    return size


class _Terminated(KeyboardInterrupt):
    """SIGTERM, which ends the check as Ctrl-C does: the other machines learn of it."""


class _Check(click.Command):
    def invoke(self, ctx: click.Context) -> object:
        """Run the command; its status after a signal is that of shells, 128 and the signal's number."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            number = signal.SIGTERM if isinstance(error, _Terminated) else signal.SIGINT
            output.say(f"mingle-check: interrupted by {number.name}.")
            ctx.exit(128 + number)


@click.command(
    "check",
    cls=_Check,
    epilog="Example: mingle-check --nnodes 4 --nproc-per-node 8",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.option("--nnodes", type=click.IntRange(1), metavar="N", help="Machines. Default: what the launcher says.")
@click.option(
    "--nproc-per-node",
    type=click.IntRange(1),
    default=1,
    metavar="K",
    help="Processes on this machine. Default: 1, or what the launcher starts.",
)
@setting_option("node_rank")
@click.option("--backend", type=click.Choice(["auto", "gloo", "nccl"]), default="auto", help="Backend. Default: auto.")
@click.option("--max-size", callback=_bytes, default="64M", metavar="SIZE", help="Largest message. Default: 64M.")
@click.option("--job-id", metavar="ID", help="Job id. Default: MINGLE_JOB_ID, else mingle-check-USER.")
@setting_option("mesh")
@shared_options(timeout=f"Time limit of each step. Default: {STEP_SECONDS:g}.")
def check(
    shared: Shared,
    nnodes: int | None,
    nproc_per_node: int,
    node_rank: int | None,
    backend: str,
    max_size: int,
    job_id: str | None,
    mesh: str | None,
) -> None:
    """Check torch between machines: run the same command on each, or start it by torchrun or a launcher.

    Three questions: do the collectives give the right results, how fast is all_reduce, and which machine, pair or
    direction is at fault? Bandwidths are defined as in nccl-tests: ALGBW is bytes divided by time, and BUSBW is ALGBW
    times 2(n-1)/n for n ranks.

    --timeout bounds each step (default: 20 s, and at least 60 s for loading a GPU's driver; for finding the others
    MINGLE_TIMEOUT, else 300 s).

    Exit status: 0 healthy, 1 a fault was named, 2 wrong usage.
    """
    with ended_by_ctrl_c():  # it imports torch
        from mingle.check.conductor import Options
    from mingle.config.placement import argued_node_rank, asked_node_rank
    from mingle.config.settings import check_job_id

    given = os.environ.get("MINGLE_JOB_ID") if job_id is None else job_id
    if given is not None:
        check_job_id(given, "MINGLE_JOB_ID" if job_id is None else "--job-id")
    place = _place(nnodes, nproc_per_node)
    if "world_size" in place:  # else the rank decides
        asked_node_rank(os.environ, argued_node_rank(node_rank, "--node-rank"), nodes=nnodes)
    network = shared.network()
    seconds = STEP_SECONDS if shared.timeout is None else shared.timeout
    if not 1 <= seconds <= MOST_STEP_SECONDS:
        raise ConfigurationError.explain(
            f"--timeout={seconds:g} is not between 1 and {MOST_STEP_SECONDS:,.0f} seconds.",
            cause="--timeout bounds each step: a healthy step can take a second, and torch's timeouts are bounded",
            remedy="give at least 1, or leave --timeout out.",
        )
    if backend == "nccl":
        _require_gpu(seconds)
    by_hand = "world_size" in place
    if by_hand and given is None and _LOCAL not in os.environ:
        output.say(f"mingle-check: the job id is {place['job_id']}; where the users differ, give all the same --job-id")
    further: list[subprocess.Popen[bytes]] = []
    try:
        if by_hand and _LOCAL not in os.environ:
            _start_further(nproc_per_node - 1, network.secret, further)
        status = run(
            structs.replace(
                shared.arguments,
                job_id=given or place["job_id"],
                mesh=mesh,
                world_size=place.get("world_size"),
                node_rank=node_rank,
                secret=network.secret,  # it counts before the file, which can be a pipe and has been read
            ),
            Options(backend=backend, max_size=max_size, seconds=seconds),
            as_json=shared.json,
            nnodes=nnodes,
            per_node=1 if by_hand else nproc_per_node,
            each_machine=by_hand,  # under a launcher the output of all ranks comes to one terminal
        )
    except KeyboardInterrupt:
        for process in further:
            process.terminate()
        raise
    except MingleError as error:
        if _LOCAL not in os.environ:
            raise
        output.complain(error, "mingle-check", as_json=False)  # the process that started this one prints the JSON
        status = FAILED
    finally:
        for process in further:
            try:
                process.wait(LEAVE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    click.get_current_context().exit(status)


def _place(nnodes: int | None, nproc_per_node: int) -> dict[str, Any]:
    """Return the job id to use and, if neither a launcher nor a variable gives this process a rank, the world size.

    Raises:
        ConfigurationError: nothing says how many ranks there are.
    """
    from mingle.config import launchers, placement, values

    if launchers.seen(os.environ) is not None or values.text_of(os.environ, "MINGLE_RANK", "RANK") is not None:
        return {"job_id": f"{JOB_ID}-{placement.resolve_placement(os.environ).job_id or _user()}"}
    if nnodes is None:
        raise ConfigurationError.explain(
            "--nnodes is missing.",
            cause="no launcher says how many ranks there are",
            remedy="run `mingle-check --nnodes N` on each of the N machines.",
        )
    return {"job_id": f"{JOB_ID}-{_user()}", "world_size": nnodes * nproc_per_node}


def _require_gpu(seconds: float) -> None:
    """Refuse NCCL where this process has no GPU, or where its driver hangs: Ctrl-C could not end torch's own call.

    Args:
        seconds: how long to wait for the driver, unless that is too short for any.
    """
    from mingle.check import probes
    from mingle.check.conductor import GPU_SECONDS

    seconds = max(seconds, GPU_SECONDS)
    deadline = time.monotonic() + seconds
    try:
        detached.run(probes.load_driver, "check-driver", lambda: time.monotonic() > deadline)
    except detached.AbandonedError:
        raise ConfigurationError.explain(
            f"--backend=nccl needs a GPU, and the GPU driver of this machine has not answered in {seconds:g} s.",
            cause="a GPU that has failed (`dmesg` shows an Xid), or many GPUs without persistence mode",
            remedy="look at `nvidia-smi`; `nvidia-smi -pm 1` keeps the driver loaded. Or give all --backend gloo.",
        ) from None
    if not probes.has_gpu():
        raise ConfigurationError.explain(
            "--backend=nccl needs a GPU, and this process sees none that NCCL can use.",
            cause="a machine without a GPU, a hidden one (CUDA_VISIBLE_DEVICES), or a build of torch without CUDA",
            remedy="compare `python -m torch.utils.collect_env` with the other machines, or give --backend gloo.",
        )


def _user() -> str:
    """Return the name of this process's user; `USER` is unset in many containers, and that of another user after su."""
    import pwd  # not on Windows, where nothing runs and everything can be imported

    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # as in a container that runs under a number
        return str(os.geteuid())


def _start_further(count: int, secret: Secret | None, started: list[subprocess.Popen[bytes]]) -> None:
    """Start the other ranks of this machine; each is in the list at once, for a signal that comes before the last one.

    Raises:
        MingleError: the system refuses to start one; those that run have been told to end.
    """
    try:
        for _ in range(count):
            _start_one(secret, started)
    except OSError as error:
        for process in started:
            process.terminate()
        raise refused("the other ranks of this machine can't be started", error) from error


def _start_one(secret: Secret | None, started: list[subprocess.Popen[bytes]]) -> None:
    line = [sys.executable, "-m", "mingle.check.command", *sys.argv[1:]]
    environ = {**os.environ, _LOCAL: "1"}
    if secret is None:
        started.append(subprocess.Popen(line, env=environ))
        return
    # Its file can be a pipe, which holds it once, and `<(…)` is closed in a child.
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb"), os.fdopen(writer, "wb", 0) as pipe:
        further = [*line, "--secret-file", f"/dev/fd/{reader}"]
        started.append(subprocess.Popen(further, env=environ, pass_fds=(reader,)))
        with contextlib.suppress(BrokenPipeError):  # it has ended, and says why
            pipe.write(bytes(secret))


def run(
    arguments: Arguments,
    options: Options,
    *,
    as_json: bool = False,
    nnodes: int | None = None,
    per_node: int = 1,
    each_machine: bool = True,
    before: Callable[[str], None] = lambda _step: None,
) -> int:
    """Run the check on this rank, print the report, and return the exit status.

    Args:
        arguments: by which the ranks find each other.
        options: the same on every rank.
        as_json: whether the report is printed as JSON.
        nnodes: the machines that the user expects; None: any number.
        per_node: the processes on each machine that the user asks for; 1: as many as there are.
        each_machine: whether the first rank of each machine prints the report, or rank 0 alone.
        before: called on rank 0 with the name of each step, before the step.
    """
    from rich.console import Console

    from mingle.check import control, session
    from mingle.distributed import rendezvous

    with rendezvous.discover(arguments) as job, contextlib.closing(control.Server(job.rank)) as server:
        shows = job.local_rank == 0 and (each_machine or job.rank == 0)
        with contextlib.ExitStack() as live:
            stderr = cast("TextIO", records.ConsoleFile(sys.stderr))
            show = live.enter_context(steps(Console(file=stderr, highlight=False))) if shows else lambda _step: None
            machines = counted(job.num_nodes, "machine")
            show(f"rank {job.rank} of {job.world_size}: job {job.job_id} has formed on {machines}")
            if nnodes not in (None, job.num_nodes):
                show(f"warning: --nnodes {nnodes} was given, and the ranks are on {machines}")
            if per_node not in (1, job.local_world_size):
                here = counted(job.local_world_size, "rank")
                show(f"warning: --nproc-per-node {per_node} was given, and the launcher has started {here} here")
            report = session.take_part(job, server, options, show, before)
        cut_off = "cut" in report.lost.values()
        if not cut_off:
            server.close()  # a process without a free descriptor needs one in order to print
        # A rank that has lost rank 0 does not rely on it to print.
        if shows or (job.local_rank == 0 and {0, job.rank} & report.lost.keys()):
            if as_json:
                output.answer_json("check", {"job_id": job.job_id, **to_builtins(report, str_keys=True)})
            else:
                show_report(report)
        if cut_off:
            time.sleep(control.LINGER_SECONDS)
    return 0 if report.healthy else FAILED


# --- what is printed -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def steps(console: Console) -> Iterator[Callable[[str], None]]:
    """Yield the function that shows the name of the step that begins: on a terminal a line with a clock that runs.

    A second colon in a name separates what replaces the last line from what both have in common.
    """
    if not console.is_terminal:
        yield output.say
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(finished_text=" "), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, refresh_per_second=4) as progress:

        def end() -> None:
            for task in progress.tasks:
                progress.update(task.id, total=1, completed=1)

        def show(step: str) -> None:
            step = printable(step)  # a rank can have written a part of it
            last = progress.tasks[-1] if progress.tasks else None
            what = step.rpartition(": ")[0]
            if last is not None and ": " in what and last.description.rpartition(": ")[0] == what:
                progress.update(last.id, description=step)
            else:
                end()
                progress.add_task(step, total=None)

        yield show
        end()


def sizes(report: Report) -> Table:
    """Return a row for each size of all_reduce, by the terms of nccl-tests."""
    rows = []
    for each in report.all_reduce:
        figures = (f"{each.seconds * 1e6:.0f}", f"{each.algbw / 1e6:.2f}", f"{each.busbw / 1e6:.2f}")
        rows.append(("all_reduce", each.device, str(each.size), *figures))
    return Table(("COLLECTIVE", "DEVICE", "BYTES", "TIME us", "ALGBW MB/s", "BUSBW MB/s"), rows)


def pair_lines(report: Report) -> Table:
    """Return what a pipe gets: a row for each directed pair."""
    rows = []
    for each in report.pairs:
        one, other = report.places[each.one].name, report.places[each.other].name
        rows.append(("pair", one, other, "-" if each.rtt is None else f"{each.rtt * 1e6:.0f}", _rate(each)))
    return Table(("LINK", "FROM", "TO", "RTT us", "MB/s"), rows)


def matrix(report: Report) -> Table:
    """Return the rates of all directed pairs in MB/s: a row sends, a column receives."""
    names = [place.name for place in report.places]
    cells = {(each.one, each.other): _rate(each) for each in report.pairs}
    usual = reference({(each.one, each.other): each.rate for each in report.pairs if each.rate}) / 1e6

    def style(cell: str) -> str:
        rate = 0.0 if cell == BROKEN else usual if cell in ("-", *names) else float(cell)
        return "bold red" if rate < usual / SLOW_FACTOR else "yellow" if rate < usual / 2 else "green"

    rows = [[name, *(cells.get((row, column), "-") for column in range(len(names)))] for row, name in enumerate(names)]
    return Table(("MB/s from ↓ to →", *names), rows, wide=True, styles=dict.fromkeys(names, style))


def _rate(pair: PairReport) -> str:
    return BROKEN if pair.fault else "-" if pair.rate is None else f"{pair.rate / 1e6:.0f}"


def verdict_lines(report: Report) -> Iterator[str]:
    """Yield the verdict, in the three parts of every error of mingle."""
    if report.healthy:
        yield "healthy: all collectives are right, every pair answers, and no link and no rank is far below the others"
    for verdict in report.verdicts:
        yield f"FAULT: {verdict.observation}"
        yield f"  likely cause: {verdict.cause}"
        yield f"  fix: {verdict.fix}"


def show_report(report: Report) -> None:
    """Print the report on stdout: tables with headings on a terminal, else lines with tabs below the columns' names."""
    for heading, table, lines in (
        ("bandwidth of all_reduce on all ranks, by size (ALGBW and BUSBW as in nccl-tests)", sizes(report), None),
        (
            "links between the machines: the rate from the machine of a row to that of a column",
            matrix(report),
            pair_lines(report),
        ),
    ):
        if table.rows:
            if output.is_terminal():
                output.answer(heading)
            output.show(table, lines, header=True)
            if output.is_terminal():
                output.answer("")
    for line in verdict_lines(report):
        output.answer(line)


def _terminate(_number: int, _frame: FrameType | None) -> NoReturn:
    raise _Terminated


def main() -> None:
    """Run the command; SIGTERM ends it as Ctrl-C does."""
    signal.signal(signal.SIGTERM, _terminate)
    output.leave_with(check, "mingle-check")


if __name__ == "__main__":
    main()
