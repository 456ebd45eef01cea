"""What a Python function travels in, with the number of the call's record: the callee says by it which call it serves.

Only to workers that are under guard, too (they say so in the store of `init_rpc`): others could not unpickle it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from distsim.torch_compat.rpc import ASYNC_EXECUTION

__all__ = ["Udf", "answers_later"]


class Udf(NamedTuple):
    """torch's PythonUDF, and the rank and index of the caller's record."""

    func: Any
    args: Any
    kwargs: Any
    request: tuple[int, int]


def answers_later(function: Any) -> bool:
    """Whether its future is the answer (`@rpc.functions.async_execution`)."""
    return hasattr(function, ASYNC_EXECUTION)
