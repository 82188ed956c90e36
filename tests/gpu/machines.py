"""What makes machines with a GPU each out of the hosts of a lab and the one GPU of this machine."""

from __future__ import annotations

from tests.lab import Host

SECONDS = 120.0
"""Far above what a step needs: each process loads CUDA and NCCL."""


def own_machine(host: Host, **more: str) -> dict[str, str]:
    """Return the environment in which NCCL takes this host for a machine of its own.

    NCCL refuses two ranks of a machine that use the same GPU. Those of two machines talk over sockets.
    """
    return {"NCCL_HOSTID": host.name, **more}
