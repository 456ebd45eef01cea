"""What is known of the values of a call's tensors on GPUs, and what the call makes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from distsim.debug.records import CallWait
from distsim.sim.c10d.arrival import Arrival, HostSide
from distsim.sim.c10d.work import SimWork
from distsim.sim.device.operators.values import Values
from distsim.sim.isolation.process import RankTask, require_task

__all__ = ["compute", "known_of", "pend"]

_ROOT_ONLY = frozenset({"broadcast", "scatter", "send"})
"""Operations whose values are those of one member."""


def known_of(task: RankTask, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> HostSide:
    """What is known of the call's values; what it writes is not known before it has met the others."""
    values: Values = task.process.accelerators.values
    written = [t for t in outputs if values.keeps(t.numel(), t.dtype)] if _all_kept(values, outputs) else []
    for tensor in outputs:
        if not written:
            values.forget(tensor)
    if outputs and not written:
        return HostSide(values, None, [])
    before = tuple(values.shadow(tensor) for tensor in written)
    copies: list[Tensor] = []
    guess = False
    for tensor in inputs:
        host = values.host(tensor) if values.keeps(tensor.numel(), tensor.dtype) else None
        if host is None:
            return HostSide(values, None, written, guess, before)
        guess = guess or values.guessed(tensor)
        copies.append(host.clone())
    return HostSide(values, copies, written, guess, before)


def _all_kept(values: Values, tensors: Sequence[Tensor]) -> bool:
    return all(values.keeps(t.numel(), t.dtype) for t in tensors)


def pend(side: HostSide, work: SimWork) -> None:
    """Who looks at what the call writes, waits for it."""

    def force() -> None:
        if not work.done.processed:
            require_task().wait(work.done, CallWait(work.record))
        if side.outputs:  # it ended without moving anything: it failed, or its rank looks past a mismatch
            _leave_as_is(side)

    for tensor in side.outputs:
        side.values.pend(tensor, force)


def compute(members: Sequence[Arrival], data: Callable[[list[Any]], None]) -> None:
    """What a call does to values that are known: *data*, on copies that lie on the host. Of equal ranks, one arrival
    is there many times."""
    record = members[0].record
    needed = members
    if record.op in _ROOT_ONLY:
        needed = [members[0 if record.root is None else record.group.ranks.index(record.root)]]
    distinct = {id(m): m for m in members}
    sides = {who: member.host_side for who, member in distinct.items() if member.host_side is not None}
    asked = [sides[who] for who in {id(m): None for m in needed}]
    known = all(side.inputs is not None for side in asked)
    guess = any(side.guess for side in asked)
    twins = {}
    for who, side in sides.items():
        outputs = []
        for tensor, before in zip(side.outputs, side.before, strict=True):
            _restore(tensor, before)
            if known:
                host = side.values.host(tensor)
                outputs.append(_blank(tensor) if host is None else host.clone())
        inputs = side.inputs if side.inputs is not None else outputs
        twins[who] = Arrival(distinct[who].process, distinct[who].record, distinct[who].work, inputs, outputs)
    if known and all(len(twin.outputs) == len(sides[who].outputs) for who, twin in twins.items()):
        data([twins[id(m)] for m in members])
    for who, side in sides.items():
        for place, tensor in enumerate(side.outputs):
            side.values.write(tensor, twins[who].outputs[place] if known else None, guess)
        side.outputs = []


def _leave_as_is(side: HostSide) -> None:
    """The outputs hold what they held before the call. DDP's reducer divides its buckets anew by numbers that it has
    broadcast, and reads past their end where these are gone."""
    for tensor, before in zip(side.outputs, side.before, strict=True):
        _restore(tensor, before)
    side.outputs = []


def _restore(tensor: Tensor, before: Any) -> None:
    storage = tensor.untyped_storage()
    if before is None:
        storage.__dict__.pop("_distsim_shadow", None)
    else:
        storage._distsim_shadow = before


def _blank(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
