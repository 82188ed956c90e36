"""Makes ``mingle://`` known to torch, whichever of the two is imported first.

``import mingle`` must not load torch (it takes seconds). So when torch is there already the scheme is registered at
once, else a finder waits in ``sys.meta_path`` for ``torch.distributed.rendezvous`` to be imported; right after that the
scheme is registered and the finder gone.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_MODULE = "torch.distributed.rendezvous"


def install() -> None:
    """Registers the scheme now or as soon as torch comes."""
    if _MODULE in sys.modules:
        _register()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _register() -> None:
    from mingle.distributed import process_group

    process_group.register()


class _Finder:
    """Waits for one module until it has been loaded; a mere look for it, or a failed import, changes nothing.

    It and its loader have the methods of importlib.abc's classes and not these as bases: they bring importlib.resources
    along, and with it tempfile and zipfile, a quarter of all that `import mingle` takes.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        others = (finder for finder in list(sys.meta_path) if finder is not self)
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = cast("Loader", _Loader(spec.loader, self))
        return spec


class _Loader:
    """Loads the module as its own loader does, then registers the scheme and takes the finder away."""

    def __init__(self, loader: Loader, finder: _Finder) -> None:
        self._loader = loader
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # get_source and its like, for who only looks

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        with contextlib.suppress(ValueError):  # another thread was quicker
            sys.meta_path.remove(self._finder)
        _register()
