"""One member's part in a call of its group: its device, its tensors, and the writing of its results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from distsim.debug.records import CallRecord, CallWait, State
from distsim.sim.c10d.work import SimWork
from distsim.sim.device.operators.values import Values
from distsim.sim.isolation.process import RankTask, require_task
from distsim.torch_compat.cuda_api import PARSE_VISIBLE_DEVICES
from distsim.torch_compat.device import DISABLE_TORCH_DISPATCH, FOREACH_COPY

if TYPE_CHECKING:
    from distsim.sim.device.gpu import Device
    from distsim.sim.isolation.process import SimProcess

__all__ = [
    "Arrival",
    "HostSide",
    "OneEach",
    "Reduction",
    "Tensors",
    "compute",
    "copy_into",
    "copy_into_all",
    "known_of",
    "pend",
    "reduce_tensors",
]

# -- What a collective does to CPU tensors: exactly what torch's backends compute.
#
# Pure functions over the tensors of all members, in group order. Writes go through `.data`, as a
# real backend writes memory: no autograd, no version bump.

_foreach_copy_ = FOREACH_COPY.get()

Tensors = Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class Reduction:
    """A reduction of the members' tensors in two steps, so that a guard looks at one tensor between them. Members are
    `arrival.Arrival`s."""

    fold: Callable[[list[Any]], list[Tensor]]
    """Sum of the members' inputs before any output is written, to check for NaN. Empty if they have no plain memory."""
    write: Callable[[list[Any], list[Tensor]], None]

    def __call__(self, members: list[Any]) -> None:
        self.write(members, self.fold(members))


def copy_into(target: Tensor, source: Tensor) -> None:
    """Write *source* (same number of elements) into *target*'s memory."""
    if target.numel() == 0:
        return
    source = source.detach()
    if source.shape != target.shape:
        source = source.reshape(target.shape)
    if target.is_inference() or torch.is_inference_mode_enabled():
        with torch.inference_mode(target.is_inference()), torch.no_grad():
            target.data.copy_(source)
    else:  # neither side asks for a gradient: no mode to enter, which takes longer than a small copy
        target.data.copy_(source)


def copy_into_all(targets: Tensors, source: Tensor) -> None:
    """Copy *source* into each of *targets*, in one step if they are plain tensors."""
    if torch.is_inference_mode_enabled() or not source.numel() or not all(_is_like(t, source) for t in targets):
        for target in targets:
            copy_into(target, source)
        return
    _foreach_copy_([target.data for target in targets], [source.detach()] * len(targets))


def _is_like(target: Tensor, source: Tensor) -> bool:
    return (
        target.shape == source.shape
        and target.layout is torch.strided
        and not (target.is_inference() or target.is_conj() or target.is_neg())
    )


def _minimum(a: Tensor, b: Tensor) -> Tensor:
    return torch.minimum(a, b, out=a)


def _maximum(a: Tensor, b: Tensor) -> Tensor:
    return torch.maximum(a, b, out=a)


_FOLD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": Tensor.add_,
    "AVG": Tensor.add_,
    "PRODUCT": Tensor.mul_,
    "MIN": _minimum,
    "MAX": _maximum,
    "BAND": Tensor.bitwise_and_,
    "BOR": Tensor.bitwise_or_,
    "BXOR": Tensor.bitwise_xor_,
}


@torch.no_grad()
def reduce_tensors(tensors: Tensors, op: str) -> Tensor:
    """Return the reduction of equal-sized *tensors* by *op*, folded in group order into a new tensor."""
    first = tensors[0].detach()
    total = first.clone(memory_format=torch.contiguous_format)
    shape = total.shape
    others = [t if t.shape == shape else t.reshape(shape) for t in [t.detach() for t in tensors[1:]]]
    total = functools.reduce(_FOLD[op], others, total)
    if op == "AVG":
        total = (
            total.div_(len(tensors))
            if total.is_floating_point() or total.is_complex()
            else total.floor_divide_(len(tensors))
        )
    return total


@dataclass(slots=True)
class HostSide:
    """Known values of a member's GPU tensors, which have no data themselves."""

    values: Values
    """Known values of the tensors on the process's simulated GPUs."""
    inputs: list[Tensor] | None
    """Copies of the inputs at the time of the call; None if their values are unknown."""
    outputs: list[Tensor]
    """Output tensors whose values may become known; empty if there are none."""
    guess: bool = False
    before: tuple[Any, ...] = ()
    """Known values of each output's storage before the call."""


@dataclass(slots=True)
class Arrival:
    """One member's part in a collective."""

    process: SimProcess
    record: CallRecord
    work: SimWork
    inputs: Tensors = ()
    outputs: Tensors = ()
    host_side: HostSide | None = None
    """For a call on a GPU: the known values of its tensors."""
    sums: list[tuple[int | None, int | None]] | None = None
    """Checksums of the inputs when the call was made, and how often torch had counted a write to each (guards.py)."""
    on_start: Callable[[], None] | None = None
    """Called when all members have arrived, before bytes move."""

    def start(self, now_s: float) -> None:
        """Note that all members have arrived at *now_s*."""
        self.record.started_s, self.record.state = now_s, State.STARTED
        if self.on_start is not None:
            self.on_start()


# -- Each member of an NCCL communicator has a GPU of its own: NCCL refuses two on one (src/init.cc, "Duplicate GPU
# detected"). So does a program find out that forgets torch.cuda.set_device(LOCAL_RANK).

_parse_visible_devices = PARSE_VISIBLE_DEVICES.get()

FIRST_BUS = 0x1B
"""PCI bus number of the first GPU of a node, as on a DGX H100; the other GPUs follow."""


class OneEach:
    """The GPUs that the members of a group use in their calls.

    A second GPU of a member needs a second communicator. If that GPU is used by another member (objects gathered
    without torch.cuda.set_device), the job hangs in NCCL.
    """

    def __init__(self) -> None:
        self._brought: dict[str, list[SimProcess]] = {}
        """Processes that work on a GPU, by the GPU's name on its node."""

    def bring(self, task: RankTask, device: Device) -> None:
        """Record the GPU of a member. Raises DistBackendError if another member on the node uses the same GPU."""
        process = task.process
        gpu = _on_node(process, device.index)
        there = self._brought.setdefault(gpu, [])
        for other in there:
            if other.slot.host == process.slot.host:
                version = ".".join(map(str, torch.cuda.nccl.version()))
                raise dist.DistBackendError(
                    "NCCL error in: ProcessGroupNCCL.cpp, invalid usage (run with NCCL_DEBUG=WARN for details), NCCL "
                    f"version {version}\n"
                    "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
                    f"Duplicate GPU detected : rank {process.rank} and rank {other.rank} both on CUDA device "
                    f"{FIRST_BUS + device.index:x}000 (GPU {gpu} of node {process.slot.host}: "
                    "torch.cuda.set_device(LOCAL_RANK) gives each rank its own)"
                )
            if other.slot.local_rank != process.slot.local_rank:
                process.world.traced.share_gpus()
        there.append(process)


def _on_node(process: SimProcess, index: int) -> str:
    """Return the GPU's name on its node. The program may have made only some of the node's GPUs visible."""
    if b"CUDA_VISIBLE_DEVICES" not in process.changed_environ:
        return str(index)
    visible = _parse_visible_devices()
    return str(visible[index]) if index < len(visible) else str(index)


# -- What is known of the values of a call's tensors on GPUs, and what the call makes of them.

_DisableTorchDispatch = DISABLE_TORCH_DISPATCH.get()

_ROOT_ONLY = frozenset({"broadcast", "scatter", "send"})
"""Operations whose result consists of one member's values."""


def known_of(task: RankTask, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> HostSide:
    """Return the known values of a call. Its outputs are unknown until all members have arrived."""
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
        with _DisableTorchDispatch():
            copies.append(host.clone())
    return HostSide(values, copies, written, guess, before)


def _all_kept(values: Values, tensors: Sequence[Tensor]) -> bool:
    return all(values.keeps(t.numel(), t.dtype) for t in tensors)


def pend(side: HostSide, work: SimWork) -> None:
    """Make readers of the call's outputs wait for it."""

    def force() -> None:
        if not work.done.processed:
            require_task().wait(work.done, CallWait(work.record))
        if side.outputs:  # it ended without moving anything: it failed, or its rank looks past a mismatch
            _leave_as_is(side)

    for tensor in side.outputs:
        side.values.pend(tensor, force)


def compute(members: Sequence[Arrival], data: Callable[[list[Any]], None]) -> None:
    """Compute known values: *data* runs on copies on the host. Of equal ranks one arrival occurs many times."""
    record = members[0].record
    needed = members
    if record.op in _ROOT_ONLY:
        needed = [members[0 if record.root is None else record.group.ranks.index(record.root)]]
    distinct = {id(m): m for m in members}
    sides = {who: member.host_side for who, member in distinct.items() if member.host_side is not None}
    sides_read = [sides[who] for who in {id(m): None for m in needed}]
    known = all(side.inputs is not None for side in sides_read)
    guess = any(side.guess for side in sides_read)
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
