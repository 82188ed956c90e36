"""What the tests of the engine share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from mingle.config.settings import Network
from tests.support.noting_driver import Noting
from tests.support.ports import free_udp_port


@pytest.fixture
def driver() -> Iterator[Noting]:
    """A driver on `lo`, of a machine that notes what it is told."""
    with contextlib.ExitStack() as stack:
        yield Noting(Network(interfaces=("lo",), port=free_udp_port()), stack)
