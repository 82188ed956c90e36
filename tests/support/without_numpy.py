"""A Python that has all that this one has but numpy, which mingle does not require and torch can do without."""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
from pathlib import Path

_TORCHRUN = "from torch.distributed.run import main\nmain()\n"


@functools.cache
def python() -> str:
    """Return the interpreter of such an environment, with a ``torchrun`` beside it; both last as long as the tests.

    Its packages are links to this one's. mingle is not among them if it is installed as editable: set PYTHONPATH.
    """
    environment = Path(_folder().name)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    folders = [folder for folder in map(Path, sys.path) if folder.name in ("site-packages", "dist-packages")]
    for entry in (entry for folder in folders for entry in folder.iterdir()):
        link = packages / entry.name
        if not entry.name.startswith("numpy") and entry.suffix != ".pth" and not link.exists():
            link.symlink_to(entry)
    interpreter = environment / "bin" / "python"
    torchrun = environment / "bin" / "torchrun"
    torchrun.write_text(f"#!{interpreter}\n{_TORCHRUN}", encoding="utf-8")
    torchrun.chmod(0o755)
    return str(interpreter)


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Held until the interpreter ends, which removes it."""
    return tempfile.TemporaryDirectory(prefix="without-numpy-")
