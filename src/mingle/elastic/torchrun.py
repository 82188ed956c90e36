"""The entry point of ``torchrun --rdzv-backend=mingle``, in the group ``torchrun.handlers``.

Every torchrun loads this module, whatever its backend, while torch's rendezvous package is half imported (from torch
2.6 on, pytorch#132633). So it imports neither torch nor the rest of mingle before a handler is requested.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters


def backend() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return the function that makes a handler; torch registers it under the entry point's name."""
    return create


def create(params: RendezvousParameters) -> RendezvousHandler:
    """Return the handler for one run of torchrun; it has not sent a packet yet.

    Raises:
        ConfigurationError: a torchrun option, a ``MINGLE_*`` variable or this machine's host name can't be used.
    """
    from mingle.distributed.environment import process_environment
    from mingle.elastic import settings as agent_settings
    from mingle.elastic.gathering import Gathering
    from mingle.elastic.handler import MingleRendezvousHandler
    from mingle.engine import progress

    agent_settings.check_host_name(socket.gethostname())
    environ = process_environment.visible()
    progress.point_out_mistyped(environ)
    wanted = agent_settings.resolve(
        environ,
        run_id=params.run_id,
        endpoint=params.endpoint,
        minimum=params.min_nodes,
        maximum=params.max_nodes,
        local_addr=params.local_addr,
        config=params.config,
    )
    return MingleRendezvousHandler(wanted, Gathering(wanted.settings, wanted.policy))
