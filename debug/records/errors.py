"""What the strict level raises."""

from __future__ import annotations

from collections.abc import Sequence

from distsim.debug.records import CallRecord, State
from distsim.errors import DistsimError

__all__ = ["CollectiveMismatch", "was_refused"]


class CollectiveMismatch(DistsimError, RuntimeError):
    """The members of a group called different things; raised on each before any byte went out.

    It is a `RuntimeError`, as gloo's and NCCL's own errors are.
    """

    def __init__(self, message: str, records: Sequence[CallRecord] = ()) -> None:
        super().__init__(message)
        self.records = tuple(records)
        """What each rank called."""


def was_refused(call: CallRecord) -> bool:
    """Whether strict did not let *call* go out."""
    return call.state is State.FAILED and (call.error or "").startswith(f"{CollectiveMismatch.__name__}: ")
