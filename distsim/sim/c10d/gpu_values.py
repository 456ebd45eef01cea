"""The GPU of each member of a group, and the known values of a call's tensors on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from distsim.debug.evidence.guard_findings import other_gpu
from distsim.debug.records import CallRecord, CallWait, Finding
from distsim.sim.c10d.work import Arrival, CallMembers, HostSide, SimWork
from distsim.sim.device.operators.values import Values
from distsim.sim.isolation.process import RankTask, SimProcess, require_task
from distsim.torch_compat.cuda_api import PARSE_VISIBLE_DEVICES
from distsim.torch_compat.device import DISABLE_TORCH_DISPATCH

if TYPE_CHECKING:
    from distsim.sim.device.gpu import Device

# -- Each member of an NCCL communicator has a GPU of its own: NCCL refuses two on one (src/init.cc, "Duplicate GPU
# detected"). So does a program find out that forgets torch.cuda.set_device(LOCAL_RANK).


FIRST_BUS = 0x1B
"""PCI bus number of the first GPU of a node, as on a DGX H100; the other GPUs follow."""


class OneEach:
    """The GPUs that the members of a group use in their calls.

    A second GPU of a member needs a second communicator, which all members create in one call. If the others keep to
    their first GPU (objects gathered without torch.cuda.set_device), the job hangs in NCCL.
    """

    def __init__(self) -> None:
        self._brought: dict[str, list[SimProcess]] = {}
        """Processes whose first GPU it is, by the GPU's name on its node."""
        self._connected: dict[SimProcess, dict[int, CallRecord]] = {}
        """First collective of a process on each of its GPUs."""

    def connect(self, met: Sequence[Arrival]) -> Finding | None:
        """Connect the GPUs of a collective's members. Return the finding if only some members need a communicator."""
        gpus = {arrival.process: cast(Any, arrival.work).device.index for arrival in met}
        anew = [a for a in met if gpus[a.process] not in self._connected.setdefault(a.process, {})]
        earlier = [next(iter(self._connected[a.process].items()), (0, a.record)) for a in anew]
        for arrival in anew:
            self._connected[arrival.process][gpus[arrival.process]] = arrival.record
        if not 0 < len(anew) < len(met):
            return None
        return other_gpu([a.record for a in anew], gpus[anew[0].process], *earlier[0])

    def bring(self, task: RankTask, device: Device) -> None:
        """Record the first GPU of a member. Raises DistBackendError if another member on the node has it, too."""
        process = task.process
        gpu = _on_node(process, device.index)
        there = self._brought.setdefault(gpu, [])
        for other in there:
            if other.slot.host == process.slot.host:
                raise dist.DistBackendError(
                    "NCCL error in: ProcessGroupNCCL.cpp, ncclInvalidUsage\n"
                    f"Duplicate GPU detected : rank {process.rank} and rank {other.rank} both on CUDA device "
                    f"{FIRST_BUS + device.index:x}000 (GPU {gpu} of node {process.slot.host}: "
                    "torch.cuda.set_device(LOCAL_RANK) gives each rank its own, as do device_id= and device_ids=)"
                )
            if other.slot.local_rank != process.slot.local_rank:
                process.port.traced.share_gpus()
        there.append(process)


def _on_node(process: SimProcess, index: int) -> str:
    """Return the GPU's name on its node. The program may have made only some of the node's GPUs visible."""
    if b"CUDA_VISIBLE_DEVICES" not in process.interpreter.changed_environ:
        return str(index)
    visible = PARSE_VISIBLE_DEVICES.get()()
    return str(visible[index]) if index < len(visible) else str(index)


# -- What is known of the values of a call's tensors on GPUs, and what the call makes of them.

_DisableTorchDispatch = DISABLE_TORCH_DISPATCH.get()

_ROOT_ONLY = frozenset({"broadcast", "scatter", "send"})
"""Operations whose result consists of one member's values."""


def known_of(task: RankTask, op: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> HostSide:
    """Return the known values of a call. Its outputs are unknown until all members have arrived.

    They stay unknown, and are not held until then, if the operation *op* needs all inputs and one of these is unknown.
    """
    values: Values = task.process.accelerators.values
    written = list(outputs) if all(values.keeps(t.numel(), t.dtype) for t in outputs) else []
    for tensor in outputs:
        if not written:
            values.forget(tensor)
    if outputs and not written:
        return HostSide(values, None, [])
    before = tuple(values.shadow(tensor) for tensor in written)
    copies: list[Tensor] = []
    guess: bool | str = False
    for tensor in inputs:
        host = values.host(tensor) if values.keeps(tensor.numel(), tensor.dtype) else None
        if host is None and op in _ROOT_ONLY:
            return HostSide(values, None, written, guess, before)
        if host is None:
            for unknown in written:
                values.forget(unknown)
            return HostSide(values, None, [])
        guess = guess or values.guessed(tensor)
        with _DisableTorchDispatch():
            copies.append(host.clone())
    return HostSide(values, copies, written, guess, before)


def pend(side: HostSide, work: SimWork) -> None:
    """Make readers of the call's outputs wait for it."""

    def force() -> None:
        if not work.done.processed:
            require_task().wait(work.done, CallWait(work.record))
        if side.outputs:  # it ended without moving anything: it failed, or its rank looks past a mismatch
            _leave_as_is(side)

    for tensor in side.outputs:
        side.values.pend(tensor, force)


def compute(members: CallMembers, data: Callable[[CallMembers], None]) -> None:
    """Compute known values: *data* runs on copies on the host. Of equal ranks one arrival occurs many times."""
    record = members[0].record
    distinct = {id(m): m for m in members.came.values()}
    sides = {who: member.host_side for who, member in distinct.items() if member.host_side is not None}
    sides_read = list(sides.values())
    if record.op in _ROOT_ONLY:
        sides_read = [sides[id(members[0 if record.root is None else record.group.ranks.index(record.root)])]]
    known = all(side.inputs is not None for side in sides_read)
    guess = next((side.guess for side in sides_read if side.guess), False)
    twins = {}
    for who, side in sides.items():
        outputs = []
        for tensor, before in zip(side.outputs, side.before, strict=True):
            _restore(tensor, before)
            if known:
                host = side.values.host(tensor)
                outputs.append(_blank(tensor) if host is None else host.clone())
        inputs = side.inputs if side.inputs is not None else outputs
        twins[who] = twin = replace(distinct[who], inputs=inputs, outputs=outputs)
        twin.record, twin.work = distinct[who].record, distinct[who].work
    if known and all(len(twin.outputs) == len(sides[who].outputs) for who, twin in twins.items()):
        data(members.replaced(lambda member: twins[id(member)]))
    for who, side in sides.items():
        for i, tensor in enumerate(side.outputs):
            side.values.write(tensor, twins[who].outputs[i] if known else None, guess)
        side.outputs = []


def _leave_as_is(side: HostSide) -> None:
    """Keep the previous content of the outputs.

    DDP's reducer sizes its buckets by numbers that it has broadcast, and reads beyond their end if these are lost.
    """
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
