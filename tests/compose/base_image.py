"""A base image for machines that reach no image registry: Debian with its own Python, made by debootstrap(8).

It stands in for the python:3.11-slim-bookworm that the Dockerfile names, together with a wheel of torch from wherever
pip on this machine takes it. Making them takes most of a minute, so they are kept in this user's cache.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

from .commands import provide, run
from .engine import Engine

ROOT = Path(__file__).parents[2]
BASE_IMAGE = "mingle-test/python:3.11-slim-bookworm"
MAKE_SECONDS = 600.0

_SUITE = "bookworm"
_PYTHON = "3.11"  # the one in this suite
_PACKAGES = ("ca-certificates", "python3", "python3-venv")
_LEFT_OUT = ("dev", "usr/share/doc", "usr/share/locale", "usr/share/man", "var/cache/apt", "var/lib/apt/lists")
# Those of this machine, without which pip in a build would not get through a proxy that opens TLS.
_CERTIFICATES = Path("/usr/local/share/ca-certificates")


def import_base_image(engine: Engine) -> None:
    """Make `BASE_IMAGE` known to the engine.

    Raises:
        EngineError: debootstrap is missing and can't be installed, or failed; with what it said.
    """
    recipe = hashlib.sha256(Path(__file__).read_bytes())
    for certificate in sorted(_CERTIFICATES.glob("*.crt")):
        recipe.update(certificate.read_bytes())
    archive = _cache() / f"base-{recipe.hexdigest()[:16]}.tar"
    if not archive.exists():
        _make(archive)
    engine.docker("import", "--change", 'CMD ["python3"]', str(archive), BASE_IMAGE, timeout=MAKE_SECONDS)


def torch_wheel() -> Path:
    """Return the wheel of torch, in the version of constraints.txt, for the Python of the base image."""
    constraints = ROOT / "constraints.txt"
    stamp = hashlib.sha256(constraints.read_bytes()).hexdigest()[:16]
    wheels = _cache() / f"wheels-{stamp}"
    if not list(wheels.glob("torch-*.whl")):
        run(
            *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"),
            *("--only-binary=:all:", "--python-version", _PYTHON, "--constraint", str(constraints)),
            *("--dest", str(wheels), "torch"),
            timeout=MAKE_SECONDS,
        )
    (wheel,) = wheels.glob("torch-*.whl")
    return wheel


def _cache() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mingle-tests"
    cache.mkdir(parents=True, exist_ok=True)
    return cache


def _make(archive: Path) -> None:
    provide(["debootstrap"])
    with tempfile.TemporaryDirectory(prefix="mingle-base-") as directory:
        root = Path(directory, "root")
        run(
            *("debootstrap", "--variant=minbase", f"--include={','.join(_PACKAGES)}", _SUITE, str(root)),
            timeout=MAKE_SECONDS,
        )
        shutil.copytree(_CERTIFICATES, root / _CERTIFICATES.relative_to("/"), dirs_exist_ok=True)
        run("chroot", str(root), "update-ca-certificates", timeout=60)
        # Whole or not at all, also when two make it at once.
        partial = archive.with_suffix(f".{os.getpid()}")
        try:
            excluded = [f"--exclude=./{path}" for path in _LEFT_OUT]
            run("tar", "-C", str(root), *excluded, "-cf", str(partial), ".", timeout=MAKE_SECONDS)
            partial.replace(archive)
        finally:
            partial.unlink(missing_ok=True)
