"""The command line of ``mingle-run``."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shlex
import time
from ipaddress import ip_address
from typing import TYPE_CHECKING

import click
from msgspec import structs

from mingle.cli import output
from mingle.cli.options import FAILED, Shared, setting_option, shared_options
from mingle.errors import ConfigurationError, MingleError
from mingle.run import placeholders
from mingle.run.program import Interrupted, Program, check_exists

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from mingle.config.settings import Mesh, Settings
    from mingle.config.values import Peer
    from mingle.protocol.machine import Formation
    from mingle.run.session import NodeSession

NAME = "mingle-run"
MESH: Mesh = "warn"
"""The default of ``--mesh``: most programs need no connections between all machines."""
SAY_SECONDS = 2.0
"""How long node 0 waits for the commands of the others in silence, once its own has ended."""
OWN_ADDRESS = ("VLLM_HOST_IP", "SGLANG_HOST_IP", "HOST_IP")
"""The variables from which programs read their own machine's address; else they take that of the default route."""
logger = logging.getLogger("mingle")


@click.command(
    NAME,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 110,
        "allow_interspersed_args": False,
    },
    options_metavar="--nnodes N [OPTIONS] --",
    epilog="Example: mingle-run --nnodes 3 -- ./serve --join {master_addr}:{master_port} --rank {node_rank}",
)
@click.option("--nnodes", type=click.IntRange(1, 1_000_000), required=True, metavar="N", help="Number of machines.")
@click.option(
    "--job-id",
    metavar="ID",
    help="Default: mingle-run- and MINGLE_JOB_ID or the launcher's, else one of the command line.",
)
@setting_option("node_rank")
@click.option("--head", metavar="COMMAND", help="The command of node 0, where it differs, as one argument.")
@click.option("--mlx", is_flag=True, help="Set MLX_RANK and MLX_HOSTFILE, for the ring of mlx.distributed.")
@click.option("--keep-going", is_flag=True, help="Do not end the commands of the other machines when one fails.")
@click.option(
    "--master-port",
    type=click.IntRange(1, 65535),
    metavar="PORT",
    help="MASTER_PORT. Default: MINGLE_MASTER_PORT, else a port that is free on node 0.",
)
@setting_option("mesh", MESH)
@shared_options(timeout="Time limit for finding the others. Default: MINGLE_TIMEOUT, else 300.", answers=False)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="COMMAND [ARG]...")
def run(
    shared: Shared,
    nnodes: int,
    job_id: str | None,
    node_rank: int | None,
    head: str | None,
    mlx: bool,
    keep_going: bool,
    master_port: int | None,
    mesh: str | None,
    command: tuple[str, ...],
) -> None:
    """Start a program on every machine: run the same command on each.

    The machines find each other and agree on node ranks; then each starts COMMAND. The program finds MASTER_ADDR,
    MASTER_PORT, NODE_RANK and NNODES in its environment. In its arguments {master_addr}, {master_port}, {node_rank},
    {nnodes}, {address} and {interface} are replaced by their values, {hosts} by the
    addresses of all machines, {hostfile} by the name of a file of them, {my_port} by a free port of this machine, and
    {hostports} by all addresses with these ports. Write {{address}} for the text {address}.

    Signals go to the program, and the exit status is the program's. If a program fails or a machine is lost, the
    programs of the other machines are ended.

    Exit status before the start: 1 the machines did not find each other, 2 wrong usage.
    """
    if mlx and nnodes < 2:
        raise ConfigurationError.explain(
            "--mlx needs --nnodes 2 or more.",
            cause="a ring of one machine would wait for a connection to itself",
            remedy="leave out --mlx: without it, a program that uses mlx.distributed runs alone.",
        )
    words = {False: list(command), True: _split(head) if head is not None else list(command)}
    for each in words.values():
        placeholders.check(each)
    wanted = _settings(shared, nnodes, job_id, node_rank, master_port, mesh, [head or "", *command])
    asked = None if wanted.placement.node_rank_launched else wanted.placement.node_rank
    for at_node_0, each in words.items():
        if (asked is None or (asked == 0) is at_node_0) and not placeholders.used_in(each[0]):
            check_exists(each[0])
    program = Program()
    status = FAILED
    try:
        with program.signals():
            status = _meet_and_run(wanted, program, words, mlx=mlx, keep_going=keep_going)
    except Interrupted as interrupted:
        status = 128 + interrupted.number
    click.get_current_context().exit(status)


def _split(head: str) -> list[str]:
    try:
        words = shlex.split(head)
    except ValueError as error:
        raise ConfigurationError.explain(
            f"--head={head!r} can't be split into words: {error}.",
            cause="an unbalanced quotation mark",
            remedy="quote the command as a shell would need it.",
        ) from error
    if not words:
        raise ConfigurationError.explain(
            "--head is empty.", cause="a variable that is not set", remedy="give the command of node 0, or no --head."
        )
    return words


def _settings(
    shared: Shared,
    nnodes: int,
    job_id: str | None,
    node_rank: int | None,
    master_port: int | None,
    mesh: str | None,
    line: Sequence[str],
) -> Settings:
    """Return what the machine needs to find the others; warn of variables that look mistyped.

    Raises:
        ConfigurationError: a value can't be used, or the port of the program is taken.
    """
    from mingle.config import placement, settings
    from mingle.config.launchers import Placement
    from mingle.engine import progress
    from mingle.run import port

    progress.point_out_mistyped(os.environ)
    asked = placement.asked_node_rank(os.environ, placement.argued_node_rank(node_rank, "--node-rank"), nodes=nnodes)
    network = shared.network()
    if job_id is None:
        chosen = settings.check_job_id(*_default_job_id(nnodes, line))
    else:
        chosen = settings.check_job_id(job_id, "--job-id")
    arguments = structs.replace(shared.arguments, master_port=master_port, mesh=mesh)
    fixed = settings.resolve_store_port(os.environ, arguments)
    if fixed is not None and (asked is None or asked.launched or asked.value == 0):
        port.reserve(fixed).close()
    return settings.Settings(
        **structs.asdict(network),
        job_id=chosen,
        placement=placement.with_node_rank(Placement(rank=None, world_size=nnodes), asked),
        master_port=fixed,
        mesh=settings.resolve_mesh(os.environ, arguments, default=MESH),
    )


def _default_job_id(nnodes: int, line: Sequence[str]) -> tuple[str, str]:
    """Return a job id that no rank of the program has, and that another command line has not by chance.

    Its source comes with it, for an error. Machines whose users start different programs at the same time must not
    meet.
    """
    from mingle.config import placement, settings
    from mingle.protocol.explain.ladder import LINE_JOB_ID

    given, source = os.environ.get("MINGLE_JOB_ID"), "MINGLE_JOB_ID"
    if given is not None:
        settings.check_job_id(given, source)
    with contextlib.suppress(MingleError):  # a launcher that says too little for a rank says enough for this
        if not given:
            placed = placement.resolve_placement(os.environ)
            given, source = placed.job_id, f"{placed.launcher}'s id"
    if given:
        return f"{NAME}-{given}", f"{NAME}- with {source}"
    text = "\0".join([str(nnodes), *line])
    return f"{LINE_JOB_ID}{hashlib.sha256(text.encode(errors='surrogateescape')).hexdigest()[:8]}", "the command line"


def _meet_and_run(
    wanted: Settings, program: Program, words: dict[bool, list[str]], *, mlx: bool, keep_going: bool
) -> int:
    """Find the other machines, run the program, and return the exit status."""
    from mingle.run import addresses
    from mingle.run import session as sessions

    session: NodeSession | None = None
    with contextlib.ExitStack() as stack:
        with program.held_back():
            directory = stack.enter_context(addresses.private_directory())
        if wanted.placement.world_size == 1:
            formation, places = sessions.form_alone(wanted)
        else:
            session = sessions.NodeSession(wanted)
            formation = session.run()
            stack.callback(session.close, "its command has ended")
        at_node_0 = formation.place.rank == 0
        try:
            if session is not None:
                places = session.places()
            values, environment = _told(wanted, formation, places, directory, mlx=mlx)
            _check_machine(wanted, formation)
            logger.info("job %s: node %s, started with %s", wanted.job_id, formation.place.rank, values)
            program.start(placeholders.fill(words[at_node_0], values), environment)
        except (MingleError, Interrupted) as error:
            if session is not None and not keep_going:
                session.fail(f"did not start: {error}".split("\n", maxsplit=1)[0])
            raise
        try:
            status = _attend(program, session, keep_going=keep_going)
        except MingleError:
            program.end()
            raise
    if at_node_0 and status:
        _look_at_port(formation.store_port)
    return status


def _check_machine(wanted: Settings, formation: Formation) -> None:
    """Warn if several nodes are on this machine, unless the whole job keeps to its loopback."""
    place = formation.place
    if place.local_world_size > 1 and place.local_rank == 0 and not ip_address(formation.address).is_loopback:
        logger.warning(
            "job %r: %d of its %d nodes are on this machine; fix: start %s once on each machine, unless they are meant "
            "to share it",
            wanted.job_id,
            place.local_world_size,
            place.world_size,
            NAME,
        )


def _told(
    wanted: Settings, formation: Formation, places: Sequence[Peer], directory: Path, *, mlx: bool
) -> tuple[dict[str, object], dict[str, str]]:
    """Return the values of the placeholders, and the environment of the program."""
    from mingle.config.settings import HOSTFILE, HOSTS
    from mingle.distributed.environment import SOCKET_INTERFACES, socket_interfaces
    from mingle.run import addresses

    node_rank = formation.place.rank
    values: dict[str, object] = {
        "master_addr": formation.store_address,
        "master_port": formation.store_port,
        "node_rank": node_rank,
        "nnodes": wanted.placement.world_size,
        "address": formation.address,
        "interface": formation.interface,
        "my_port": places[node_rank].port,
        "hosts": addresses.hosts(places),
        "hostports": addresses.hostports(places),
        "hostfile": addresses.write_hostfile(directory, places),
    }
    told = {name.upper(): str(values[name]) for name in ("master_addr", "master_port", "node_rank", "nnodes")}
    told |= {HOSTS: str(values["hosts"]), HOSTFILE: str(values["hostfile"])}
    if mlx:
        told |= {"MLX_RANK": str(node_rank), "MLX_HOSTFILE": str(addresses.write_mlx_hostfile(directory, places))}
    unless_set = socket_interfaces(formation.interface, named=wanted.interface_was_named)
    unless_set |= dict.fromkeys(OWN_ADDRESS, formation.address)
    kept = {name: value for name in (*SOCKET_INTERFACES, *OWN_ADDRESS) if (value := os.environ.get(name))}
    return values, {**os.environ, **told, **unless_set, **kept}


def _attend(program: Program, session: NodeSession | None, *, keep_going: bool) -> int:
    """Wait for the end of the program and, on node 0, of the others; return the exit status."""
    if session is None:
        status = program.wait()
        return program.end() if status or program.interrupted_by is not None else status
    warned = False
    while (ended := program.status) is None:
        session.turn()
        trouble = session.trouble
        if trouble is not None and not keep_going:
            output.say(f"{NAME}: ending the command: {trouble}")
            session.pass_on()
            return program.end() or FAILED
        if trouble is not None and not warned:
            warned = True
            output.say(f"{NAME}: the command runs on (--keep-going): {trouble.observation}")
    if ended or program.interrupted_by is not None:
        if not keep_going:
            try:
                output.say(f"{NAME}: the command {program.how_ended()}; those of the other machines are ended, too.")
                session.fail(program.how_ended())
            except Interrupted as interrupted:
                with contextlib.suppress(Interrupted):
                    session.fail(program.how_ended(), waits=False)
                    output.say(f"{NAME}: {interrupted} ended the wait for an answer from node 0.")
            except MingleError as error:
                output.complain(error, NAME, as_json=False)
            return program.end()
        program.end()
    return _stay(session, keep_going=keep_going) or ended


def _stay(session: NodeSession, *, keep_going: bool) -> int:
    """Keep the other machines together until all have left; return a failure among them as an exit status."""
    known = session.trouble is not None
    if not session.leave() and not known:
        output.say(f"{NAME}: the command has ended; node 0 does not answer, and can take this node for lost.")
    say_at: float | None = time.monotonic() + SAY_SECONDS
    while not session.others_left:
        try:
            session.turn(say_at)
        except Interrupted as interrupted:
            if not keep_going:
                session.fail(f"has ended, and {interrupted} ended the wait for the others")
            raise
        if session.trouble is not None and not keep_going:
            output.say(f"{NAME}: {session.trouble.observation}")
            session.pass_on()
            return FAILED
        if say_at is not None and time.monotonic() >= say_at:
            say_at = None
            output.say(f"{NAME}: the command of node 0 has ended; waiting for those of the other machines.")
    return 0


def _look_at_port(number: int) -> None:
    """Say so if the program of node 0 has failed and another program holds its port."""
    from mingle.run import port

    if port.is_taken(number):
        output.say(f"{NAME}: {port.taken(number, 'it is in use')}")


def main() -> None:
    """Run the command."""
    output.leave_with(run, NAME)


if __name__ == "__main__":
    main()
