"""What goes wrong around the containers, apart from what a test means to provoke."""

from __future__ import annotations


class EngineError(Exception):
    """Docker, or what is needed to run it, could not do what it was asked to."""
