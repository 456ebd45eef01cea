"""Store operations in an exploration: what each of them accesses, and when it is possible."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from distsim.debug.records import StoreWait
from distsim.sim.kernel.clocks import START, joined
from distsim.sim.kernel.steps import Access
from distsim.sim.kernel.turns import Operation

if TYPE_CHECKING:
    from distsim.sim.isolation.process import RankTask
    from distsim.sim.kernel.shared import KeyValues
    from distsim.sim.kernel.turns import Place, Turns

Limit = tuple[float, bool]
"""Seconds that a wait may take, and whether the program set them."""
Asked = tuple[str, tuple[str, ...], Access]
"""Name of the operation, its keys, and how it accesses them."""


def take_turn(turns: Turns, task: RankTask, place: Place, values: KeyValues, asked: Asked, limit: Limit | None) -> bool:
    """Wait until an operation on a store has its turn, with a *limit* only when its keys are there.

    Args:
        turns: The operations of the run.
        task: The thread that makes the operation.
        place: Its line.
        values: The store.
        asked: The operation.
        limit: How long it may wait for its keys; None for an operation that does not wait.

    Returns:
        Whether it has its turn; False if the wait has reached its limit.
    """
    what, keys, access = asked
    objects: dict[Hashable, Access] = {(values.name, key): access for key in keys}
    whole = Access.USE if keys and access is Access.READ else Access.ADD if keys else Access.READ
    objects[values.name] = whole

    def is_there(key: str) -> bool:
        return bool(values.queues.get(key)) or (key in values.data and what != "queue_pop")

    def is_possible() -> bool:
        return values.lost.triggered or limit is None or all(map(is_there, keys))

    def enablers() -> frozenset[int]:
        if limit is None:
            return frozenset()
        born = {values.born[key] for key in keys if key in values.born}
        return frozenset(born | {values.pushed[key][0] for key in keys if values.pushed.get(key)})

    named = [repr_of(key) for key in _named(place, keys)]
    operation = Operation(
        " ".join([what, ", ".join(named)]).strip(),
        place.line,
        objects,
        is_possible,
        enablers,
        is_look=access is Access.READ and limit is None,
    )
    seconds, explicit = limit or (None, False)
    why = None
    if limit is not None:
        why = StoreWait(keys, "queue") if what == "queue_pop" else StoreWait(keys)
    elif what == "check":
        why = StoreWait(keys, what)
    step = turns.ask(task, operation, why, seconds, explicit)
    if step is None:
        return False
    for key in keys if access is Access.WRITE else ():
        if what == "queue_push":
            values.pushed.setdefault(key, deque()).append(step.index)
        elif what == "queue_pop":
            if values.pushed.get(key):
                values.pushed[key].popleft()
        elif key not in values.data:
            values.born[key] = step.index
    return True


def take_turn_to_end(turns: Turns, task: RankTask, stores: Sequence[Hashable]) -> None:
    """Wait until a process that serves *stores* may end, and with it its stores."""
    objects = dict.fromkeys(stores, Access.WRITE)
    turns.ask(task, Operation("ends, and with it its store", "", objects), None, None, explicit=False)


def repr_of(key: str) -> str:
    """Return a key in double quotes."""
    return f'"{key}"'


def _named(place: Place, keys: Sequence[str]) -> Sequence[str]:
    """Return *keys* as the program named them, without the prefixes of its groups."""
    named = place.arguments.get("keys", place.arguments.get("key"))
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
