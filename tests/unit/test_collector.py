"""The pause of the garbage collector; its part in a call is tested in tests/unit/distributed/test_rendezvous.py."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from mingle.collector import collector_paused
from tests.support.children import in_child

CODE = """
import gc, torch.distributed
seen, enable = [], gc.enable
gc.{switch}()
gc.callbacks.append(lambda phase, about: phase == "start" and seen.append(about["generation"]))
gc.enable = lambda: (gc.callbacks.clear(), enable())  # what follows the pause does not count
import mingle
print(2 in seen, gc.isenabled())
"""


def test_a_forked_child_collects_garbage_whatever_another_thread_does() -> None:
    with collector_paused():
        assert not gc.isenabled()
        assert in_child(lambda: str(gc.isenabled())) == "True"


@pytest.mark.parametrize("switch", ["enable", "disable"])
def test_the_import_beside_torch_makes_no_full_collection_and_leaves_the_collector_as_it_was(switch: str) -> None:
    """One is due there, and walks over all objects of torch."""
    command = [sys.executable, "-c", CODE.format(switch=switch)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["False", str(switch == "enable")]
