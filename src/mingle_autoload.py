"""The hook that ``import torch`` calls: it makes ``init_method="mingle://JOB"`` known without ``import mingle``.

Torch 2.5 and newer load every entry point of the group ``torch.backends`` at the end of ``import torch``, and an entry
point that fails makes that import raise, for every program of the environment (``torch._import_device_backends``). So
the hook stands outside the package ``mingle``, whose import could fail, needs nothing beyond the standard library, and
raises nothing. mingle itself is imported when torch first meets a URL of the scheme.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

SCHEME = "mingle"


def register() -> None:
    """Register the scheme with torch's rendezvous, unless that is missing or has it already."""
    try:
        rendezvous = sys.modules.get("torch.distributed.rendezvous")  # absent from a torch built without distributed
        if rendezvous is not None:
            rendezvous.register_rendezvous_handler(SCHEME, handler)
    except RuntimeError:  # torch has the scheme already
        return
    except Exception:  # whatever happens here must not end `import torch`; `import mingle` registers as well
        logging.getLogger(SCHEME).debug("%s:// could not be registered with torch", SCHEME, exc_info=True)


def handler(url: str, **options: Any) -> Any:
    """Import mingle, and return what its own handler of ``mingle://JOB`` returns; torch calls this function."""
    from mingle.distributed.url_scheme import rendezvous_handler

    return rendezvous_handler(url, **options)
