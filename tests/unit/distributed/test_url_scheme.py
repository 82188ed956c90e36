"""``mingle://`` is known to torch without ``import mingle``, or in either order; no import breaks because of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).parents[3] / "src"
# As small a torch as the scheme can be registered with: the real one takes seconds to import.
SMALL_TORCH = {
    "torch/__init__.py": "",
    "torch/distributed/__init__.py": "from torch.distributed import rendezvous",
    "torch/distributed/rendezvous.py": (
        "_rendezvous_handlers = {}\n"
        "def register_rendezvous_handler(scheme, handler):\n"
        "    if scheme in _rendezvous_handlers:\n"
        "        raise RuntimeError('registered twice')\n"
        "    _rendezvous_handlers[scheme] = handler\n"
    ),
}
LOOK = """
import inspect, json, sys, torch.distributed
rendezvous = sys.modules["torch.distributed.rendezvous"]  # torch's package has a function of that name
print(json.dumps({
    "handlers": {
        scheme: f"{handler.__module__}.{handler.__name__}"
        for scheme, handler in rendezvous._rendezvous_handlers.items()
    },
    "finders": [type(finder).__module__ for finder in sys.meta_path if "mingle" in type(finder).__module__],
    "loaders": [type(each).__name__ for each in (rendezvous.__spec__.loader, rendezvous.__loader__)],
    "source": "def register_rendezvous_handler" in inspect.getsource(rendezvous),
}))
"""
REGISTERED = {
    "mingle": "mingle.distributed.url_scheme.rendezvous_handler",
    "mingle+formed": "mingle.distributed.url_scheme.formed_handler",
}


@pytest.fixture
def small_torch(tmp_path: Path) -> Path:
    for name, text in SMALL_TORCH.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def run(code: str, *path: Path, **environment: str) -> Any:
    """Run the code with these folders before the installed torch, and return the last line that it printed, as JSON."""
    done = subprocess.run(
        [sys.executable, "-W", "error::ImportWarning", "-c", code],
        env={
            "PYTHONPATH": os.pathsep.join(map(str, (*path, SOURCE))),
            "PATH": os.environ["PATH"],
            "MINGLE_INTERFACE": "lo",
            **environment,
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def registers(code: str, *path: Path, **environment: str) -> dict[str, str]:
    """Return the handlers that there are after the code has run; all else is as Python and torch left it."""
    seen = run(code + LOOK, *path, **environment)
    assert seen["finders"] == []
    assert seen["loaders"] == ["SourceFileLoader", "SourceFileLoader"]
    assert seen["source"]
    return dict(seen["handlers"])


@pytest.mark.parametrize(
    "imports",
    [
        "import torch.distributed; import mingle",
        "import mingle; import torch.distributed",
        "import torch; import mingle",
        "import mingle; from torch.distributed.rendezvous import register_rendezvous_handler",
        "import mingle; from mingle.distributed import url_scheme; url_scheme.install(); url_scheme.install()",
        "import mingle; import torch.distributed; from mingle.distributed import url_scheme; url_scheme.install()",
        # Somebody looks whether torch has the module, and does not load it.
        "import mingle, importlib.util; assert importlib.util.find_spec('torch.distributed.rendezvous')",
    ],
)
def test_the_scheme_is_known_in_any_order(small_torch: Path, imports: str) -> None:
    assert registers(imports, small_torch) == REGISTERED


def test_without_torch_one_finder_waits_and_is_in_nobodys_way(small_torch: Path) -> None:
    seen = run(
        "import json, sys, importlib, mingle; from mingle.distributed import url_scheme; url_scheme.install()\n"
        "import csv, xml.dom\n"
        "finders = [type(finder).__module__ for finder in sys.meta_path]\n"
        "print(json.dumps(finders.count('mingle.distributed.url_scheme')))",
        small_torch,
    )
    assert seen == 1


def test_a_torch_without_the_module_fails_as_it_would_without_us(small_torch: Path) -> None:
    (small_torch / "torch/distributed/rendezvous.py").unlink()
    (small_torch / "torch/distributed/__init__.py").write_text("")
    seen = run(
        "import json, mingle\n"
        "try:\n"
        "    import torch.distributed.rendezvous\n"
        "except ModuleNotFoundError as error:\n"
        "    print(json.dumps([error.name, str(error)]))",
        small_torch,
    )
    assert seen == ["torch.distributed.rendezvous", "No module named 'torch.distributed.rendezvous'"]


def test_a_torch_whose_import_fails_at_first_is_waited_for(small_torch: Path) -> None:
    module = small_torch / "torch/distributed/rendezvous.py"
    broken = "import os\nif os.environ.pop('BROKEN', ''):\n    raise ImportError('libtorch.so')\n"
    module.write_text(broken + module.read_text())
    code = (
        "import os, mingle; os.environ['BROKEN'] = '1'\n"
        "try:\n"
        "    import torch.distributed\n"
        "except ImportError as error:\n"
        "    assert str(error) == 'libtorch.so', error\n"
    )
    assert registers(code, small_torch) == REGISTERED


def test_a_scheme_that_somebody_else_has_registered_stays_theirs(small_torch: Path) -> None:
    code = (
        "import torch.distributed.rendezvous as theirs\n"
        "def handler(url): ...\n"
        "theirs.register_rendezvous_handler('mingle', handler)\n"
        "import mingle\n"
    )
    assert registers(code, small_torch) == {**REGISTERED, "mingle": "__main__.handler"}


# --- without `import mingle`: torch calls mingle_autoload ------------------------------------------------------------


def test_scheme_works_in_a_program_that_never_imports_mingle() -> None:
    seen = run(
        "import json, sys, torch.distributed as dist\n"
        "before = 'mingle' in sys.modules\n"
        f"dist.init_process_group('gloo', init_method='mingle://autoload-{uuid.uuid4().hex}', rank=0, world_size=1)\n"
        "print(json.dumps([before, dist.is_initialized(), 'mingle' in sys.modules]))\n"
        "dist.destroy_process_group()"
    )
    assert seen == [False, True, True]


def test_broken_mingle_breaks_the_call_and_not_the_import_of_torch(small_torch: Path) -> None:
    (small_torch / "mingle").mkdir()
    (small_torch / "mingle/__init__.py").write_text("import a_dependency_that_is_gone")
    seen = run(
        "import json, torch.distributed, mingle_autoload\n"
        "mingle_autoload.register()\n"
        "try:\n"
        "    torch.distributed.rendezvous._rendezvous_handlers['mingle']('mingle://job', rank=0, world_size=1)\n"
        "except ModuleNotFoundError as error:\n"
        "    print(json.dumps(error.name))",
        small_torch,
    )
    assert seen == "a_dependency_that_is_gone"


@pytest.mark.slow
def test_import_of_mingle_registers_with_torch_where_autoload_is_off() -> None:
    handlers = registers("import mingle, torch", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert handlers.items() >= REGISTERED.items()
    assert handlers.keys() >= {"env", "tcp", "file"}


@pytest.mark.parametrize(
    "order", ["mingle_autoload.register(); import mingle", "import mingle; mingle_autoload.register()"]
)
def test_hook_and_import_register_side_by_side(small_torch: Path, order: str) -> None:
    assert registers(f"import torch.distributed, mingle_autoload; {order}", small_torch).keys() == REGISTERED.keys()


@pytest.mark.parametrize(
    "torch",
    [
        "",  # not imported, or built without torch.distributed
        "import torch.distributed; del torch.distributed.rendezvous._rendezvous_handlers; ",
        "import torch.distributed; torch.distributed.rendezvous.register_rendezvous_handler = None; ",
    ],
)
def test_hook_raises_nothing_whatever_torch_is_like(small_torch: Path, torch: str) -> None:
    code = f"{torch}import json, mingle_autoload; print(json.dumps(mingle_autoload.register()))"
    assert run(code, small_torch) is None


def test_hook_imports_only_the_standard_library(small_torch: Path) -> None:
    seen = run(
        "from __future__ import annotations\n"
        "import json, logging, sys, typing, torch.distributed\n"
        "before = set(sys.modules)\n"
        "import mingle_autoload; mingle_autoload.register()\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))",
        small_torch,
    )
    assert seen == ["mingle_autoload"]
