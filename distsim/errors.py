"""All exceptions of distsim, in one place.

A `UsageError` is a user's mistake: the command line prints its one line and exits with 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from distsim.text.ranks import some_ranks
from distsim.text.tracebacks import but_for_numbers, first_difference, others_differ

__all__ = ["CollectiveMismatch", "DistsimError", "Failure", "NotSimulated", "RankFailure", "UsageError"]


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
    """One or more ranks raised. *failures* has one entry for each different traceback, with all its ranks; in the
    message those that differ only in the numbers that they say are one, and of very many ranks the first are named.
    *report*, what the diagnosis says beyond them, stands at its end. *outcome* is the whole of the run, as
    `simulate(..., check=False)` returns it."""

    def __init__(self, failures: Sequence[Failure], report: str = "", outcome: Any = None) -> None:
        self.failures = list(failures)
        self.report = report
        self.outcome = outcome
        alike: dict[tuple[str, str], list[Failure]] = {}
        for failure in failures:
            alike.setdefault((failure.type, but_for_numbers(failure.traceback)), []).append(failure)
        parts = [_told_once(same) for same in alike.values()]
        if report:
            parts.append(report.rstrip())
        super().__init__("\n\n".join(parts))

    def __reduce__(self) -> tuple[Any, ...]:
        return RankFailure, (self.failures, self.report)  # to another process without what was simulated


def _told_once(alike: Sequence[Failure]) -> str:
    """The first of *alike* whole, and of the last where it begins to differ."""
    first, last, num = alike[0], alike[-1], len(alike) - 1
    text = first.traceback.rstrip()
    if not num:
        return f"{some_ranks(first.ranks)}:\n{text}"
    everyone = [rank for failure in alike for rank in failure.ranks]
    of = "of" if num == 1 else "the last of"
    said = first_difference(first.traceback, last.traceback)
    return (
        f"{some_ranks(everyone)}, alike but for numbers; of {some_ranks(first.ranks)}:\n{text}\n"
        f"... and {others_differ(num)}, {of} {some_ranks(last.ranks)}:\n{said}"
    )


class CollectiveMismatch(DistsimError, RuntimeError):
    """The members of a group called different things; the strict level raises it on each before any byte goes out.

    It is a `RuntimeError`, as gloo's and NCCL's own errors are.
    """

    def __init__(self, message: str, records: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.records = tuple(records)
        """The `CallRecord` of each rank."""
