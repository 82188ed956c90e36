"""How long the services of a project train, as a change to the compose file."""

from __future__ import annotations

from typing import Any

SERVICES = ("trainer", "rank0", "rank1", "rank2", "rank3")


def epochs(number: int, **trainer: Any) -> dict[str, Any]:
    """Train for so many epochs, and change more in the service `trainer`."""
    command = ["python", "ddp_train.py", "--epochs", str(number)]
    services: dict[str, dict[str, Any]] = {service: {"command": command} for service in SERVICES}
    services["trainer"] |= trainer
    return {"services": services}


BRIEFLY = epochs(1)
FOREVER = epochs(100_000)
