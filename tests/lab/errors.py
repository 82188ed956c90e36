"""What goes wrong in a lab, apart from what a test means to provoke."""

from __future__ import annotations


class LabError(Exception):
    """The lab could not do what it was asked to."""


class LabTimeoutError(LabError, TimeoutError):
    """A process of the lab did not do in time what the test waited for."""


class EndedError(LabError):
    """A signal was for a process of the lab that has ended."""


class RankFailedError(LabError):
    """The function of a rank raised, or its process ended before the function returned."""
