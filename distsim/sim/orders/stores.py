"""Store operations in an exploration: what each of them accesses, and when it is possible."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from distsim.debug.records import StoreWait
from distsim.sim.kernel.clocks import START, joined
from distsim.sim.kernel.steps import Access
from distsim.sim.kernel.turns import TurnRequest

if TYPE_CHECKING:
    from distsim.sim.isolation.process import RankTask
    from distsim.sim.kernel.shared import KeyValues
    from distsim.sim.kernel.turns import Caller, TurnQueue

Limit = tuple[float, bool]
"""Seconds that a wait may take, and whether the program set them."""
StoreCall = tuple[str, tuple[str, ...], Access]
"""Name of the operation, its keys, and how it accesses them."""


def take_turn(
    turns: TurnQueue, task: RankTask, caller: Caller, values: KeyValues, call: StoreCall, limit: Limit | None
) -> bool:
    """Wait until an operation on a store has its turn, with a *limit* only when its keys are there.

    Args:
        turns: The operations of the run.
        task: The thread that makes the operation.
        caller: Its line.
        values: The store.
        call: The operation.
        limit: How long it may wait for its keys; None for an operation that does not wait.

    Returns:
        Whether it has its turn; False if the wait has reached its limit.
    """
    method, keys, access = call
    objects: dict[Hashable, Access] = {(values.name, key): access for key in keys}
    whole = Access.USE if keys and access is Access.READ else Access.ADD if keys else Access.READ
    objects[values.name] = whole

    def is_there(key: str) -> bool:
        return bool(values.queues.get(key)) or (key in values.data and method != "queue_pop")

    def is_possible() -> bool:
        return values.lost.triggered or limit is None or all(map(is_there, keys))

    def enablers() -> frozenset[int]:
        if limit is None:
            return frozenset()
        born = {values.born[key] for key in keys if key in values.born}
        return frozenset(born | {values.pushed[key][0] for key in keys if values.pushed.get(key)})

    named = [f'"{key}"' for key in _named(caller, keys)]
    operation = TurnRequest(
        " ".join([method, ", ".join(named)]).strip(),
        caller.line,
        objects,
        is_possible,
        enablers,
        is_look=access is Access.READ and limit is None,
    )
    seconds, explicit = limit or (None, False)
    why = None
    if limit is not None:
        why = StoreWait(keys, "queue") if method == "queue_pop" else StoreWait(keys)
    elif method == "check":
        why = StoreWait(keys, method)
    step = turns.ask(task, operation, why, seconds, explicit)
    if step is None:
        return False
    for key in keys if access is Access.WRITE else ():
        if method == "queue_push":
            values.pushed.setdefault(key, deque()).append(step.index)
        elif method == "queue_pop":
            if values.pushed.get(key):
                values.pushed[key].popleft()
        elif key not in values.data:
            values.born[key] = step.index
    return True


def _named(caller: Caller, keys: Sequence[str]) -> Sequence[str]:
    """Return *keys* as the program named them, without the prefixes of its groups."""
    named = caller.arguments.get("keys", caller.arguments.get("key"))
    if isinstance(named, str):
        return [named]
    return [str(key) for key in named] if isinstance(named, list | tuple) else keys


def meet_own(task: RankTask, values: KeyValues, keys: Sequence[str], access: Access) -> None:
    """Join the clocks of torch's own operations on *keys*, whose order is no choice."""
    for key in keys:
        clock = values.clocks.get(key, START)
        if access is Access.WRITE:
            values.clocks[key] = joined(clock, task.clock)
        if clock:
            task.clock = joined(task.clock, clock)
