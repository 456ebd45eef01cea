"""All exceptions of distsim.

A `UsageError` is a mistake of the user: the command line prints its message and exits with code 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from distsim.text.ranks import some_ranks
from distsim.text.tracebacks import but_for_numbers, first_difference, others_differ

__all__ = ["CollectiveMismatch", "DistsimError", "Failure", "NotSimulated", "RankFailure", "UsageError"]


class DistsimError(Exception):
    """Base class of all exceptions that distsim defines."""


class UsageError(DistsimError):
    """A mistake of the user; the message says what was expected, what was given, and what to do."""


class NotSimulated(DistsimError, NotImplementedError):
    """A torch call that the simulator refuses because its result would be wrong.

    Attributes:
        call: Name of the call.
    """

    def __init__(self, call: str, remedy: str = "") -> None:
        self.call = call
        super().__init__(f"{call} is not simulated" + (f": {remedy}" if remedy else ""))


@dataclass(slots=True)
class Failure:
    """An exception and the ranks that raised it with the same traceback."""

    ranks: tuple[int, ...]
    type: str
    message: str
    traceback: str


class RankFailure(DistsimError):
    """One or more ranks raised an exception.

    The message shows tracebacks that differ only in their numbers once.

    Attributes:
        failures: One entry for each different traceback, with its ranks.
        report: What the diagnosis adds to the tracebacks; empty if nothing.
        outcome: The whole run, as `simulate(..., check=False)` returns it.
    """

    def __init__(self, failures: Sequence[Failure], report: str = "", outcome: Any = None) -> None:
        self.failures = list(failures)
        self.report = report
        self.outcome = outcome
        alike: dict[tuple[str, str], list[Failure]] = {}
        for failure in failures:
            alike.setdefault((failure.type, but_for_numbers(failure.traceback)), []).append(failure)
        parts = [_format_once(same) for same in alike.values()]
        if report:
            parts.append(report.rstrip())
        super().__init__("\n\n".join(parts))

    def __reduce__(self) -> tuple[Any, ...]:
        return RankFailure, (self.failures, self.report)  # to another process without what was simulated


def _format_once(failures: Sequence[Failure]) -> str:
    """Format the first of *failures* whole, and the last from its first difference on."""
    first, last, num = failures[0], failures[-1], len(failures) - 1
    text = first.traceback.rstrip()
    if not num:
        return f"{some_ranks(first.ranks)}:\n{text}"
    everyone = [rank for failure in failures for rank in failure.ranks]
    of = "of" if num == 1 else "the last of"
    difference = first_difference(first.traceback, last.traceback)
    return (
        f"{some_ranks(everyone)}, the same but for numbers; of {some_ranks(first.ranks)}:\n{text}\n"
        f"... and {others_differ(num)}, {of} {some_ranks(last.ranks)}:\n{difference}"
    )


class CollectiveMismatch(DistsimError, RuntimeError):
    """The members of a group made different calls; the strict level raises it on each before any data is sent.

    It is a `RuntimeError`, like the errors of gloo and NCCL.
    """

    def __init__(self, message: str, records: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.records = tuple(records)
        """The `CallRecord` of each rank."""
