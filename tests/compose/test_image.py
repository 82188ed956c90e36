"""The image by itself."""

from __future__ import annotations

import re

from .engine import Engine


def test_its_user_is_nobody_special_and_it_has_no_compiler(engine: Engine, image: str) -> None:
    script = """
        id --user
        command -v gcc || command -v cc || command -v clang || echo no compiler
        touch "$(python -c 'import mingle; print(mingle.__file__)')" 2>/dev/null || echo read-only
        mingle-discover --version
    """
    user, compiler, written, version = engine.docker(
        "run", "--rm", "--network=none", image, "sh", "-c", script
    ).splitlines()
    assert int(user) > 0
    assert compiler == "no compiler"
    assert written == "read-only"
    assert re.fullmatch(r"mingle-discover \d+\.\d+\.\d+.*", version)


def test_half_of_what_is_installed_is_the_libraries_of_torch(engine: Engine, image: str) -> None:
    """That is as small as it gets: what only developers of torch need is gone."""
    script = "cd /opt/venv/lib/python3*/site-packages && du -sb . && du -sb torch/lib"
    sizes = engine.docker("run", "--rm", "--network=none", image, "sh", "-c", script).splitlines()
    everything, libraries = (int(line.split()[0]) for line in sizes)
    assert libraries > everything / 2
