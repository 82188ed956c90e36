"""Makes ``mingle://`` known to torch, whichever of the two is imported first.

``import mingle`` must not load torch (it takes seconds). So when torch is there already the scheme is registered at
once, else a finder waits in ``sys.meta_path`` for ``torch.distributed.rendezvous`` to be imported, registers the scheme
right after, and takes itself away.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

_MODULE = "torch.distributed.rendezvous"


def install() -> None:
    """Registers the scheme now or as soon as torch comes."""
    if _MODULE in sys.modules:
        _register()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _register() -> None:
    from mingle import process_group

    process_group.register()


class _Finder(importlib.abc.MetaPathFinder):
    """Waits for one module, once."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """Loads the module as its own loader does, then registers the scheme."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        _register()
