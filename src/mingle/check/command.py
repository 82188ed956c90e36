"""The command line of ``mingle-check``, and the further processes of this machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import click

from mingle.cli.options import Shared, shared_options
from mingle.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

JOB_ID = "mingle-check"
STEP_SECONDS = 20.0
INTERRUPTED = 130
"""The exit status after Ctrl-C, as shells give it: 128 and the number of SIGINT."""
LEAVE_SECONDS = 10.0
_LOCAL = "_MINGLE_CHECK_LOCAL"
"""Set for the processes that --nproc-per-node starts."""
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def _bytes(_context: click.Context, _parameter: click.Parameter, text: str) -> int:
    found = re.fullmatch(r"(\d+)\s*([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    size = int(found[1]) * _UNITS[found[2].upper()] if found else 0
    if size < 4:
        raise click.BadParameter(f"{text!r} is not a size of at least 4 bytes; write 64M, 512K or 4096.")
    return size


@click.command(
    "check",
    epilog="Example: mingle-check --nnodes 4 --nproc-per-node 8",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.option("--nnodes", type=click.IntRange(1), metavar="N", help="Machines. Default: what the launcher says.")
@click.option("--nproc-per-node", type=click.IntRange(1), default=1, metavar="K", help="Processes to start here.")
@click.option("--backend", type=click.Choice(["auto", "gloo", "nccl"]), default="auto", help="Backend. Default: auto.")
@click.option("--max-size", callback=_bytes, default="64M", metavar="SIZE", help="Largest message. Default: 64M.")
@click.option("--job-id", metavar="ID", help="Job id. Default: MINGLE_JOB_ID, else one of this command's own.")
@shared_options(timeout=f"Time limit of each step. Default: {STEP_SECONDS:g}.")
def check(
    shared: Shared, nnodes: int | None, nproc_per_node: int, backend: str, max_size: int, job_id: str | None
) -> None:
    """Check torch between machines: type the same line on each, or start it by torchrun or a launcher.

    Three questions: do the collectives give the right results, how fast is all_reduce, and which machine, pair or
    direction is at fault? Bandwidths are those of nccl-tests: ALGBW is bytes by time, and BUSBW is ALGBW times
    2(n-1)/n for n ranks.

    --timeout bounds each step (default: 20 s; for finding the others MINGLE_TIMEOUT, else 300 s).

    Exit status: 0 healthy, 1 a fault was named, 2 wrong usage.
    """
    from mingle.check import session

    place = _place(nnodes, nproc_per_node)
    network = shared.network()
    own_job = place.pop("job_id")
    further = _start_further(nproc_per_node - 1) if "world_size" in place else []
    try:
        status = session.run(
            job_id or os.environ.get("MINGLE_JOB_ID") or own_job,
            session.Options(
                backend=backend,
                max_size=max_size,
                seconds=STEP_SECONDS if shared.timeout is None else shared.timeout,
                as_json=shared.json,
                nnodes=nnodes,
                # Under a launcher the output of all ranks comes to one terminal.
                each_machine="world_size" in place,
            ),
            discovery_timeout=network.discovery_timeout,
            interface=shared.interface or None,
            peers=shared.peers or None,
            secret=network.secret,
            port=shared.port,
            ttl=shared.ttl,
            family=shared.family,
            **place,
        )
    except KeyboardInterrupt:
        status = INTERRUPTED
        for process in further:
            process.terminate()
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
    from mingle.config import launchers, placement

    if launchers.seen(os.environ) is not None or {"MINGLE_RANK", "RANK"} & os.environ.keys():
        job_id = placement.place(os.environ).job_id
        return {"job_id": f"{JOB_ID}-{job_id}" if job_id else JOB_ID}
    if nnodes is None:
        raise ConfigurationError.explain(
            "--nnodes is missing.",
            cause="no launcher says how many ranks there are",
            remedy="type `mingle-check --nnodes N` on each of the N machines.",
        )
    return {"job_id": JOB_ID, "world_size": nnodes * nproc_per_node}


def _start_further(count: int) -> Sequence[subprocess.Popen[bytes]]:
    if _LOCAL in os.environ:
        return []
    line = [sys.executable, "-m", "mingle.check.command", *sys.argv[1:]]
    return [subprocess.Popen(line, env={**os.environ, _LOCAL: "1"}) for _ in range(count)]


def main() -> None:
    """Run the command, and exit without waiting for calls that were given up."""
    try:
        check(prog_name="mingle-check")
    except SystemExit as end:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code if isinstance(end.code, int) else 1)


if __name__ == "__main__":
    main()
