"""What a call between two workers of torch.distributed.rpc says beyond what every call says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from distsim.debug.evidence.typed import MOST_RANKS, number, text, whole, wholes

__all__ = ["REMOTE_CALLS", "SERVE", "Remote"]

REMOTE_CALLS = frozenset({"rpc_sync", "rpc_async", "remote", "to_here"})
"""Operations of a caller, by torch.distributed.rpc's public names."""
SERVE = "rpc_serve"
"""The callee's end: a thread of its pool runs the function."""
MOST_THREADS = 1 << 20


@dataclass(frozen=True, slots=True)
class Remote:
    """A remote call, or the serving of one."""

    function: str
    """`train.step`; of to_here empty."""
    caller: str
    callee: str
    """Names of the workers."""
    threads: int = 0
    """How many threads the worker has whose record this is: they serve, and take replies. 0: not known."""
    gives_up_s: float | None = None
    """The call raises after that long; None: the program has set no limit of its own."""
    request: tuple[int, int] | None = None
    """Of what is served: rank and index of the caller's record."""
    rref: tuple[int, int] | None = None
    """torch's RRefId, of a value that is made (`remote`) or fetched (`to_here`): who asked for it, and a number."""

    def to_json(self) -> list[Any]:
        """All fields in their order."""
        request, rref = (None if pair is None else list(pair) for pair in (self.request, self.rref))
        return [self.function, self.caller, self.callee, self.threads, self.gives_up_s, request, rref]

    @classmethod
    def from_json(cls, said: Sequence[Any]) -> Remote:
        """The inverse of `to_json`; ValueError where that is none."""
        function, caller, callee, threads, gives_up_s, *pairs = said
        request, rref = (None if pair is None else _pair(pair) for pair in pairs)
        return cls(
            text(function, "function", 400),
            text(caller, "worker", 200),
            text(callee, "worker", 200),
            whole(threads, "threads", 0, MOST_THREADS),
            None if gives_up_s is None else number(gives_up_s, "gives_up_s"),
            request,
            rref,
        )


def _pair(said: object) -> tuple[int, int]:
    rank, number = wholes(said, "a remote call's number")
    return whole(rank, "a rank", 0, MOST_RANKS), number
