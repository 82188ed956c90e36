"""The door for ``torchrun --rdzv-backend=mingle``: what torch finds under the entry point group ``torchrun.handlers``.

Torch loads it (from 2.6 on, pytorch#132633) while its own rendezvous package is half imported, so nothing here, nor
what it imports, may need torch before a handler is really asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters


def backend() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Returns what makes a handler; torch registers it under the entry point's name."""
    return create


def create(params: RendezvousParameters) -> RendezvousHandler:
    """Returns the handler for one run of torchrun; not a packet has been sent by then.

    Raises:
        ConfigurationError: a torchrun option or a ``MINGLE_*`` variable can't be used.
    """
    from mingle.distributed.environment import process_environment
    from mingle.elastic import settings as agent_settings
    from mingle.elastic.gathering import Gathering, Nodes
    from mingle.elastic.handler import AgentHandler
    from mingle.engine import progress

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
    gathering = Gathering(
        wanted.settings,
        Nodes(minimum=wanted.minimum, maximum=wanted.maximum),
        last_call=wanted.last_call,
        allow_minority=wanted.allow_minority,
    )
    return AgentHandler(wanted, gathering)
