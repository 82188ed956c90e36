"""mingle: the ranks of a PyTorch job find each other, by UDP multicast on a group made from the job id.

Every machine runs the same command, without an address::

    import mingle

    with mingle.init(job_id="resnet") as job:
        print(job.rank, job.master_addr)

Entry points: :func:`init`, :func:`discover`, ``init_method="mingle://JOB"``, ``torchrun --rdzv-backend=mingle``, and
the commands ``mingle-run``, ``mingle-check`` and ``mingle-discover``.

A map of the package, from the inside out (``docs/architecture.md`` says what each module is for):

===============  ======================================================================
``wire``         bytes to typed messages and back: the wire format, the proofs, the multicast groups
``config``       what the user, the launcher and the machine say; one table of launchers
``diagnostics``  what is wrong with a machine, and the command that fixes it
``network``      interfaces, the choice among them, sockets
``protocol``     the pure state machines: member, host with its registrar, election
``engine``       the driver: where machines, sockets, clock and the TCPStore meet
``observe``      observers: list, watch, find, ping
``distributed``  from a call to a :class:`Job`: rendezvous, environment, process group
``elastic``      elastic jobs: quorum, leases, and the backend of ``torchrun --rdzv-backend=mingle``
``lightning``    the plug-in for Lightning
``cli``          ``mingle-discover``
``check``        ``mingle-check``
``run``          ``mingle-run``
===============  ======================================================================

The modules at the top, ``errors``, ``text``, ``job``, ``records``, ``collector``, ``forksafe``, ``detached`` and
``token_bucket``, serve all sub-packages.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from mingle._version import __version__
from mingle.distributed import url_scheme
from mingle.errors import (
    AuthenticationError,
    ConfigurationError,
    ConflictError,
    ConnectivityError,
    DiscoveryTimeoutError,
    InterfaceError,
    LauncherError,
    MingleError,
    cut_frames,
    opening,
)
from mingle.job import Job, Member

if TYPE_CHECKING:
    from typing import Literal

__all__ = [
    "AuthenticationError",
    "ConfigurationError",
    "ConflictError",
    "ConnectivityError",
    "DiscoveryTimeoutError",
    "InterfaceError",
    "Job",
    "LauncherError",
    "Member",
    "MingleError",
    "__version__",
    "discover",
    "init",
]

logging.getLogger("mingle").addHandler(logging.NullHandler())


def init(
    job_id: str | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    backend: str | None = None,
    discovery_timeout: float | timedelta | None = None,
    interface: str | Sequence[str] | None = None,
    peers: str | Sequence[str] | None = None,
    secret: str | bytes | None = None,
    port: int | None = None,
    master_port: int | None = None,
    ttl: int | None = None,
    family: Literal["auto", "4", "6"] | None = None,
    advertise: str | None = None,
    node_rank: int | None = None,
    mesh: Literal["on", "warn", "off"] | None = None,
    **process_group_options: Any,
) -> Job:
    """Find rank 0, wait until every rank has joined, and make torch's process group.

    It replaces ``torch.distributed.init_process_group``. An argument that is not given is read from a variable:
    ``MINGLE_PORT`` for ``port``, and so on.

    Args:
        job_id: the job's name, 1 to 256 bytes in UTF-8, the same on every rank. Default: the launcher's job id.
        rank: this process's rank. Default: the launcher's, then ``RANK``.
        world_size: the number of ranks. Default: the launcher's, then ``WORLD_SIZE``.
        backend: as torch takes it (``"gloo"``, ``"nccl"``, ``"cpu:gloo,cuda:nccl"``). Default: torch's choice.
        discovery_timeout: seconds (or a timedelta) until an incomplete job is an error. Default:
            ``MINGLE_TIMEOUT``, then 300.
        interface: names or addresses of the interfaces to use. Default: mingle's choice.
        peers: for networks without multicast: hosts to ask by unicast, ``host`` or ``host:port``, directories that all
            machines mount, ``dir:/path``, or buckets, ``s3://bucket/prefix``.
        secret: a secret that the job's members share; a process without it is rejected.
        port: the UDP port. Default: 29499.
        master_port: the TCP port of rank 0's store. Default: any free one.
        ttl: the hop limit of multicasts. Default: 1, the local network only.
        family: the IP versions to use. Default: ``auto``.
        advertise: the address to announce where NAT hides this host's own.
        node_rank: the rank that this node asks for where ranks are assigned, the same in all ranks of the node.
            Default: ``MINGLE_NODE_RANK``, then host names decide.
        mesh: whether the job forms only if all its nodes can open TCP connections to each other: ``on``; ``warn``
            shows a warning if not, and ``off`` tries none. Default: ``MINGLE_MESH``, then ``on``.
        **process_group_options: passed on to ``init_process_group``; checked before the first packet.

    Returns:
        The job. Its ``close()`` and the end of its ``with`` block destroy the process group.

    Raises:
        DiscoveryTimeoutError: the job did not form in time; names the missing ranks and what was heard.
        ConflictError: two rank 0s, one rank twice, different world sizes, or the job is already running.
        AuthenticationError: some ranks have the secret and some don't.
        ConnectivityError: nodes of the job can't open TCP connections to each other; names them.
        InterfaceError: no usable interface, or no network that all ranks share.
        LauncherError: a launcher's variables are incomplete.
        ConfigurationError: an argument or a variable is wrong; raised before any packet.
    """
    try:
        with opening("the modules of mingle"):
            from mingle.config.settings import Arguments

            arguments = Arguments(
                job_id=job_id,
                rank=rank,
                world_size=world_size,
                discovery_timeout=discovery_timeout,
                interface=interface,
                peers=peers,
                secret=secret,
                port=port,
                master_port=master_port,
                ttl=ttl,
                family=family,
                advertise=advertise,
                node_rank=node_rank,
                mesh=mesh,
            )
            del secret  # a traceback that shows local variables must not show it
            from mingle.distributed import rendezvous
            from mingle.distributed.process_group import GroupArguments

        return rendezvous.discover(arguments, GroupArguments(backend=backend, options=process_group_options))
    except (MingleError, KeyboardInterrupt) as error:
        cut_frames(error)
        raise error


def discover(
    job_id: str | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    discovery_timeout: float | timedelta | None = None,
    interface: str | Sequence[str] | None = None,
    peers: str | Sequence[str] | None = None,
    secret: str | bytes | None = None,
    port: int | None = None,
    master_port: int | None = None,
    ttl: int | None = None,
    family: Literal["auto", "4", "6"] | None = None,
    advertise: str | None = None,
    node_rank: int | None = None,
    mesh: Literal["on", "warn", "off"] | None = None,
) -> Job:
    """Find rank 0, wait until every rank has joined, and export what torch and the frameworks read.

    The process group is left to the next caller in this process: ``init_process_group()`` with ``env://``, Lightning,
    Accelerate, DeepSpeed.

    Arguments, result and errors are those of :func:`init`.
    """
    try:
        with opening("the modules of mingle"):
            from mingle.config.settings import Arguments

            arguments = Arguments(
                job_id=job_id,
                rank=rank,
                world_size=world_size,
                discovery_timeout=discovery_timeout,
                interface=interface,
                peers=peers,
                secret=secret,
                port=port,
                master_port=master_port,
                ttl=ttl,
                family=family,
                advertise=advertise,
                node_rank=node_rank,
                mesh=mesh,
            )
            del secret  # as in `init`
            from mingle.distributed import rendezvous

        return rendezvous.discover(arguments)
    except (MingleError, KeyboardInterrupt) as error:
        cut_frames(error)
        raise error


def __dir__() -> list[str]:
    return sorted(__all__)


url_scheme.install()
