"""Frameworks with their real packages, on the CPU: only when asked for, as by ``make test-frameworks``."""

from __future__ import annotations

from pathlib import Path

import pytest

_HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line("markers", "frameworks: needs Lightning and Accelerate; only when asked for")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark every test of this directory, and leave them out of a run that does not ask for them."""
    ours = [item for item in items if _HERE in item.path.parents]
    for item in ours:
        item.add_marker(pytest.mark.frameworks)
    named = any(
        _HERE in (path := config.invocation_params.dir / argument.partition("::")[0]).parents or path == _HERE
        for argument in config.args
    )
    if ours and not named and "frameworks" not in config.option.markexpr:
        items[:] = [item for item in items if item not in ours]
        config.hook.pytest_deselected(items=ours)
