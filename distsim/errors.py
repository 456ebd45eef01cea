"""All exceptions of distsim, in one place.

A `UsageError` is a user's mistake: the command line prints its one line and exits with 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distsim.text.ranks import of_ranks

__all__ = ["DistsimError", "Failure", "NotSimulated", "RankFailure", "UsageError"]


class DistsimError(Exception):
    """Base of everything distsim raises on its own account."""


class UsageError(DistsimError):
    """A user's mistake: one line that says what was expected, what came, and what to do."""


class NotSimulated(DistsimError, NotImplementedError):
    """A torch call the simulator refuses by name rather than answer wrongly."""

    def __init__(self, call: str, remedy: str = "") -> None:
        self.call = call
        super().__init__(f"{call} is not simulated" + (f": {remedy}" if remedy else ""))


@dataclass(slots=True)
class Failure:
    """An exception, and every rank that raised it."""

    ranks: tuple[int, ...]
    type: str
    message: str
    traceback: str


class RankFailure(DistsimError):
    """One or more ranks raised. *failures* has one entry for each different traceback, with its ranks;
    *report*, what the diagnosis says beyond them, stands at the end of the message."""

    def __init__(self, failures: Sequence[Failure], report: str = "") -> None:
        self.failures = list(failures)
        self.report = report
        parts = []
        for failure in failures:
            parts.append(f"{of_ranks(failure.ranks)}:\n{failure.traceback.rstrip()}")
        if report:
            parts.append(report.rstrip())
        super().__init__("\n\n".join(parts))
