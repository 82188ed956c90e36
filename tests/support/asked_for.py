"""Groups of tests that run only when they are asked for: by their directory, or by ``-m``."""

from __future__ import annotations

from pathlib import Path

import pytest


def leave_out_unless_asked_for(
    config: pytest.Config, items: list[pytest.Item], directory: Path, marker: str, seconds: float
) -> None:
    """Mark every test below a directory, give it so much time, and leave it out of a run that does not ask for it."""
    below = {path for path in {item.path for item in items} if directory in path.parents}
    ours = [item for item in items if item.path in below]
    for item in ours:
        item.add_marker(marker)
        item.add_marker(pytest.mark.timeout(seconds))
    named = any(
        directory in (path := config.invocation_params.dir / argument.partition("::")[0]).parents or path == directory
        for argument in config.args
    )
    if ours and not named and marker not in config.option.markexpr:
        items[:] = [item for item in items if item not in ours]
        config.hook.pytest_deselected(items=ours)
