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


def test_torch_is_the_build_for_the_cpu_and_whole(engine: Engine, image: str) -> None:
    """A custom kernel, and torch.compile, are compiled against torch's headers."""
    script = """
        cd /opt/venv/lib/python3*/site-packages
        ls torch/include/torch/extension.h torch/include/ATen/ATen.h torch/share/cmake/Torch/TorchConfig.cmake
        ls -d nvidia* 2>/dev/null || echo no CUDA
        python -c 'import torch; print(torch.__version__)'
    """
    *_, cuda, version = engine.docker("run", "--rm", "--network=none", image, "sh", "-ec", script).splitlines()
    assert cuda == "no CUDA"
    assert version.endswith("+cpu")
