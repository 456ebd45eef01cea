"""Training steps of a device: marks, autograd's events, and buffers in flight."""

from __future__ import annotations

import ctypes
import itertools
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from distsim.kernels.cost import tensors_in
from distsim.kernels.pricing import math_dtype
from distsim.sim.device.allocator.allocator import ACTIVATIONS, OTHER, Ledger, Tag
from distsim.sim.device.allocator.claims import claim_of_optimizer, tag_of
from distsim.sim.device.timeline.timeline import Comm, Mark, StreamTimeline, Timeline
from distsim.sim.isolation.process import RankTask, current_task
from distsim.torch_compat.groups import CURRENT_GRAPH_TASK_ID

if TYPE_CHECKING:
    from distsim.debug.records import CallRecord
    from distsim.kernels import Cost
    from distsim.sim.device.timeline.account import Account

# -- Buffers of collectives that nothing has waited for yet: a kernel that uses one races with the collective.
#
# Told is only what the streams' order proves: the program launched the kernel in a stream that has waited for nothing
# since the collective was launched, whose stream it is not, and the collective had not ended by then. Whoever waits for
# anything, stream or host, is taken to have waited for this.

Tell = Callable[[bool, bool], None]
"""Function called with two flags: whether the kernel writes, and whether any stream has waited since the call."""
Bytes = tuple[Any, int, int]
"""A range of a storage's memory: storage, start, end."""


@dataclass(slots=True)
class _Open:
    comm: Comm
    stream: StreamTimeline
    buffers: list[Bytes]
    outputs: list[Bytes]
    """Ranges in `buffers` that the collective writes to."""
    tell: Tell
    ordered: set[int] = field(default_factory=set)
    """Streams that have waited for something since the call."""


class InFlight:
    """Calls in flight on one GPU, and the buffers that they use."""

    def __init__(self) -> None:
        self.open: list[_Open] = []

    def began(
        self, comm: Comm, stream: StreamTimeline, tensors: Iterable[Tensor], outputs: Iterable[Tensor], tell: Tell
    ) -> None:
        """Watch the *tensors* of *comm*, which was launched on *stream*.

        *tell* is called once if a kernel writes to one of them, or reads one of *outputs*, before the call has
        ended.
        """
        buffers = _all_bytes(tensors)
        if buffers:
            self.open.append(_Open(comm, stream, buffers, _all_bytes(outputs), tell))

    def stream_waits(self, stream: StreamTimeline) -> None:
        for one in self.open:
            one.ordered.add(stream.number)

    def host_waits(self) -> None:
        self.open.clear()

    def forget(self, record: Any) -> None:
        """Stop watching the call's buffers, because the program has its future and may wait for it unseen."""
        self.open = [one for one in self.open if record not in one.comm.records]

    def used(self, stream: StreamTimeline, written: Sequence[Tensor], read: Sequence[Tensor]) -> None:
        """Check a kernel on *stream* that writes to *written* and reads *read* against the watched buffers."""
        self.open = [one for one in self.open if one.comm.ended_s is None]
        for one in list(self.open):
            if stream is one.stream or stream.number in one.ordered:
                continue
            writes = _meet(_all_bytes(written), one.buffers)
            if writes or _meet(_all_bytes(read), one.outputs):
                one.tell(writes, bool(one.ordered))
                self.open.remove(one)


def _all_bytes(tensors: Iterable[Tensor]) -> list[Bytes]:
    return [held for tensor in tensors if tensor.is_cuda and (held := _bytes(tensor)) is not None]


def _meet(some: Sequence[Bytes], others: Sequence[Bytes]) -> bool:
    return any(_overlap(one, other) for one in some for other in others)


def _bytes(tensor: Tensor) -> Bytes | None:
    held = tensor.untyped_storage().__dict__.get("_distsim_held")
    if held is None or not tensor.numel():
        return None
    size = tensor.element_size()
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.storage_offset() * size
    return weakref.ref(held), begin, begin + (last + 1) * size


def _overlap(one: Bytes, other: Bytes) -> bool:
    return one[0] == other[0] and one[1] < other[2] and other[1] < one[2]


# -- The events that autograd records and waits for in C++, where backward goes from one stream to another.
#
# The device guard's functions for events (c10/core/impl/DeviceGuardImplInterface.h) in Python. C++ calls them in the
# rank's own thread, from torch/csrc/autograd/input_buffer.cpp and engine.cpp; an exception cannot pass through them.

_DESTROY, _RECORD, _BLOCK = 11, 12, 13
"""Indices of these functions in torch's table of event functions."""

_Word = ctypes.c_void_p


class _Stream(ctypes.Structure):
    """Layout of `c10::Stream`."""

    _fields_ = (("device_type", ctypes.c_int8), ("device_index", ctypes.c_int8), ("stream_id", ctypes.c_int64))


_marks: dict[int, Mark] = {}
_numbers = itertools.count(1)


@ctypes.CFUNCTYPE(None, _Word, ctypes.POINTER(_Word), ctypes.POINTER(_Stream), ctypes.c_int8, ctypes.c_int32)
def _record(_: int, event: ctypes._Pointer[_Word], stream: ctypes._Pointer[_Stream], index: int, flag: int) -> None:
    task = current_task()
    if task is None or task.process.accelerators is None:
        return
    device = task.process.accelerators[stream[0].device_index]
    number = event[0] or next(_numbers)
    _marks[number] = device.timeline.mark(device.streams[stream[0].stream_id], task.now_s())
    event[0] = number


@ctypes.CFUNCTYPE(None, _Word, _Word, ctypes.POINTER(_Stream))
def _block(_: int, event: int | None, stream: ctypes._Pointer[_Stream]) -> None:
    task, mark = current_task(), _marks.get(event or 0)
    if task is None or mark is None:
        return
    device = task.process.accelerators[stream[0].device_index]
    device.wait_for(device.streams[stream[0].stream_id], mark, task.now_s())


@ctypes.CFUNCTYPE(None, _Word, _Word, ctypes.c_int8)
def _destroy(_: int, event: int | None, index: int) -> None:
    _marks.pop(event or 0, None)


EVENT_FUNCTIONS = {_DESTROY: _destroy, _RECORD: _record, _BLOCK: _block}
"""Functions of events by their position in the guard's table."""


# -- The training steps of one process: what it had launched, and what its GPU had done, when each ended.
#
# A step ends where an optimizer's `step` does: a mark is put into the current stream then, and its moment on the device
# is the step's end. Counts are of the host's order (what was launched before), times of the device's.

aten = torch.ops.aten
PRODUCTS = frozenset({"gemm", "attention", "conv"})
"""Kinds of operators whose flops are counted. All others have few flops, and published figures leave them out."""
TWICE, ATTENTION_BACKWARD = 4, 5
"""Number of products in attention's backward pass, for two in its forward pass: without and with the product that
the kernel recomputes (kernels/pricing.py).
"""
SAME_TOKENS_BYTES = 1 << 16
"""A reduction of more bytes than this in forward sums activations. All members of its group have processed the same
tokens.
"""
_REDUCTIONS = frozenset(
    {"all_reduce", "all_reduce_coalesced", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single",
     "reduce_scatter_tensor_coalesced"}
)  # fmt: skip

_UPDATES = frozenset(
    f"aten::{name}"
    for name in ("add_", "sub_", "addcmul_", "addcdiv_", "_foreach_add_", "_foreach_sub_", "_foreach_addcdiv_")
)
"""Operators by which programs without an optimizer update their parameters."""
_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))) + os.sep
_in_backward = CURRENT_GRAPH_TASK_ID.get()


@dataclass(slots=True)
class Counted:
    """Counts that one call of an operator adds."""

    dtype: str = ""
    """Data type in which a product is computed: fp64, fp32, tf32, fp16, bf16, fp8."""
    flops: int = 0
    model_flops: int = 0
    """Flops without those that an attention kernel recomputes for its backward."""
    table: tuple[int, ...] = ()
    """Shape of an embedding's table; empty for other operators."""
    tokens: int = 0
    sequences: int = 0
    """Number of sequences that the tokens form; 0 if unknown."""


def counted(func: Any, args: tuple[Any, ...], cost: Cost) -> Counted | None:
    """Return the counts of a call of *func*; None if nothing is counted."""
    if func is aten.embedding.default:
        looked_up = args[1]
        sequences = looked_up.shape[0] if looked_up.dim() == 2 else 0
        return Counted(table=tuple(args[0].shape), tokens=looked_up.numel(), sequences=sequences)
    if not cost.flops or cost.kind not in PRODUCTS:
        return None
    dtype = next((tensor.dtype for tensor in tensors_in(args)), torch.float32)
    model = cost.flops
    if cost.kind == "attention" and "backward" in func._schema.name:
        model = model * TWICE // ATTENTION_BACKWARD
    return Counted(math_dtype(dtype, cost.kind), cost.flops, model)


def main_table(tokens: Mapping[tuple[int, ...], float]) -> tuple[int, ...]:
    """Return the embedding that most of *tokens* went through (`Steps.tokens`).

    One with gradients comes first: what a reference model or an evaluation looks up is not trained on.
    """
    return max(tokens, key=lambda table: (table[0] and tokens[table] > 0, tokens[table]))


def _identity(tensor: torch.Tensor) -> tuple[Any, int, torch.Size]:
    return weakref.ref(tensor.untyped_storage()), tensor.storage_offset(), tensor.shape


@dataclass(slots=True)
class StepEnd:
    """Sums from the start of the process to the end of a step."""

    mark: Mark
    model_flops: dict[str, int]
    flops: dict[str, int]
    tokens: dict[tuple[int, ...], int]
    host_s: float = 0.0
    """Seconds that the host spent on launching work."""
    account: Account | None = None
    """Account of the device when it reached the end of the step; None until then."""


@dataclass(slots=True)
class Steps:
    """Training steps of one process."""

    model_flops: dict[str, int] = field(default_factory=dict)
    """Flops by data type, without those that backward recomputes."""
    flops: dict[str, int] = field(default_factory=dict)
    recomputes: bool = False
    """Whether the program recomputes parts of its forward pass in backward."""
    tokens: dict[tuple[int, ...], int] = field(default_factory=dict)
    """Number of tokens looked up outside backward, by whether gradients were enabled and the shape of the embedding's
    table.
    """
    sequences: dict[tuple[int, ...], int] = field(default_factory=dict)
    """Number of sequences in the last look-up, likewise."""
    lengths: dict[tuple[int, ...], int] = field(default_factory=dict)
    """Tokens of a sequence in the last look-up, likewise; 0 if unknown."""
    same_tokens: dict[tuple[int, ...], str] = field(default_factory=dict)
    """Ranks that reduced activations in forward, with their group's label."""
    _looked_up: dict[tuple[int, ...], tuple[Any, set[Any]]] = field(default_factory=dict)
    """Ids of the last look-up in this forward pass, and the tables in which they were looked up, by shape of the
    table.
    """
    ends: weakref.WeakKeyDictionary[Any, list[StepEnd]] = field(default_factory=weakref.WeakKeyDictionary)
    _updated: weakref.WeakKeyDictionary[Any, set[int]] = field(default_factory=weakref.WeakKeyDictionary)
    """Ids of the first parameters of the groups that each optimizer has updated in its current step."""
    _has_gradients: bool = False
    """Whether backward has computed products since the last update by an optimizer."""
    by_hand: list[StepEnd] = field(default_factory=list)
    """Steps of a program that updates its parameters without an optimizer: the first update after each backward."""
    memory: deque[int] = field(default_factory=lambda: deque(maxlen=16))
    """Bytes in use at the ends of the last steps."""
    has_optimizer: bool = False
    """Whether an optimizer has begun a step."""
    awaits_update: bool = False
    """Whether backward has run since the last update, and no optimizer has begun a step."""
    _weights: set[Tag] = field(default_factory=set)
    """Parameters that forward passes have read, while no optimizer has begun a step."""
    _last: list[list[StepEnd]] = field(default_factory=list)
    """The values of `ends`, which outlive their optimizers."""
    ledgers: list[Ledger] = field(default_factory=list)
    """Ledgers of the memory of the process's GPUs."""
    host_s: float = 0.0
    """Seconds that the host spent on launching work so far."""
    modules: Any = None
    """Tracker that attributes memory to modules in the second step (allocator/claims.py); None if not used."""
    _captured_ends: list[Any] | None = None
    _before_capture: tuple[dict[Any, int], ...] = ()
    _backward_begun: bool = False
    """Whether backward has started since the last token look-up, so that reductions belong to backward or an
    optimizer.
    """

    def count(self, counted: Counted, args: tuple[Any, ...] = ()) -> None:
        """Add the counts of an operator that was launched with *args*."""
        if not self.tokens_or_flops:
            self.allocates(ACTIVATIONS)
        backward = _in_backward() != -1
        if not self.has_optimizer:
            if backward:
                self.awaits_update = True
            else:
                self._weights.update(tag for tensor in tensors_in(args) if (tag := _parameter(tensor)) is not None)
        if counted.flops:
            self.flops[counted.dtype] = self.flops.get(counted.dtype, 0) + counted.flops
            if backward:
                self._backward_begun = self._has_gradients = True
                self._looked_up.clear()
            if backward and torch.is_grad_enabled() and _is_forward_again():
                self.recomputes = True
            else:
                self.model_flops[counted.dtype] = self.model_flops.get(counted.dtype, 0) + counted.model_flops
        if counted.tokens and not backward:
            self._backward_begun = False
        table = torch.is_grad_enabled(), *counted.table
        if counted.tokens and not backward and (not args or self._are_new(table, *args[:2])):
            self.tokens[table] = self.tokens.get(table, 0) + counted.tokens
            self.sequences[table] = counted.sequences
            self.lengths[table] = counted.tokens // counted.sequences if counted.sequences else 0

    def _are_new(self, shape: tuple[int, ...], table: torch.Tensor, ids: torch.Tensor) -> bool:
        """Return whether *ids* are new tokens, and were not just looked up in another table of this *shape*, a key of
        `tokens` (value embeddings).
        """
        version = 0 if ids.is_inference() else ids._version
        batch, tables = (_identity(ids), version), self._looked_up.get(shape)
        if tables is None or tables[0] != batch or _identity(table) in tables[1]:
            self._looked_up[shape] = batch, {_identity(table)}
            return True
        tables[1].add(_identity(table))
        return False

    @property
    def micro_batch(self) -> int:
        """Return the number of sequences in the last micro-batch, by the embedding with most tokens; 0 if unknown."""
        return self.sequences[main_table(self.tokens)] if self.tokens else 0

    @property
    def sequence_length(self) -> int:
        """Return the tokens of a sequence of the last micro-batch, likewise."""
        return self.lengths[main_table(self.tokens)] if self.tokens else 0

    def allocates(self, kind: str) -> None:
        """Set the purpose of later allocations."""
        for ledger in self.ledgers:
            ledger.kind = kind

    def called(self, record: CallRecord) -> None:
        """Note that a collective was launched."""
        if (
            record.op in _REDUCTIONS
            and record.nbytes > SAME_TOKENS_BYTES
            and not self._backward_begun
            and self.tokens_or_flops
            and _in_backward() == -1
        ):
            self.same_tokens[record.group.ranks] = record.group.label

    @property
    def tokens_or_flops(self) -> bool:
        """Return whether a forward pass has started. Before that, parameters are created and compared."""
        return bool(self.tokens or self.model_flops)

    def begin_capture(self, ends: list[Any]) -> None:
        """Begin a capture: later launches are recorded and do not run; optimizers whose step ends meanwhile are added
        to *ends*."""
        self._captured_ends = ends
        self._before_capture = tuple(dict(sums) for sums in self._sums)

    def end_capture(self) -> tuple[dict[Any, int], ...]:
        """End a capture: restore the sums, and return what the capture would add to them."""
        self._captured_ends = None
        added = []
        for sums, before in zip(self._sums, self._before_capture, strict=True):
            added.append({key: count - before.get(key, 0) for key, count in sums.items()})
            sums.clear()
            sums.update(before)
        return tuple(added)

    def add(self, added: tuple[dict[Any, int], ...]) -> None:
        """Add the counts of a captured graph that is replayed."""
        if not self.tokens_or_flops:
            self.allocates(ACTIVATIONS)
        for sums, more in zip(self._sums, added, strict=True):
            for key, count in more.items():
                sums[key] = sums.get(key, 0) + count

    @property
    def _sums(self) -> tuple[dict[Any, int], ...]:
        return self.model_flops, self.flops, self.tokens

    def end(self, optimizer: Any, timeline: Timeline, stream: StreamTimeline, now_s: float) -> None:
        """Mark the end of a step: *optimizer* has launched its last kernel."""
        if self._captured_ends is not None:
            self._captured_ends.append(optimizer)
            return
        self._looked_up.clear()
        self.allocates(ACTIVATIONS)
        if any(ledger.has_risen for ledger in self.ledgers):
            claim_of_optimizer(optimizer)
        for ledger in self.ledgers:
            ledger.settle()
        known = self.ends.get(optimizer)
        if known is None:
            known = self.ends[optimizer] = []
            self._last.append(known)
        if self._updates_others(optimizer) and known:
            known.pop()
        self._mark(known, timeline, stream, now_s)

    def _updates_others(self, optimizer: Any) -> bool:
        """Return whether *optimizer* has updated other parameters than so far in this training step.

        DeepSpeed's ZeRO calls `step` once for each group of parameters (stage_1_and_2.py, `_optimizer_step`).
        """
        updated = {id(group["params"][0]) for group in optimizer.param_groups if group["params"]}
        before = self._updated.setdefault(optimizer, set())
        is_same_step = before.isdisjoint(updated) and not self._has_gradients
        self._has_gradients = False
        if not is_same_step:
            before.clear()
        before.update(updated)
        return is_same_step

    def _mark(self, ends: list[StepEnd], timeline: Timeline, stream: StreamTimeline, now_s: float) -> None:
        account = timeline.account
        end = StepEnd(Mark(now_s), {**self.model_flops}, {**self.flops}, {**self.tokens}, self.host_s)

        def reached(_: Mark) -> None:
            end.account = account.snapshot()

        end.mark.on_reach = reached
        ends.append(end)
        timeline.put(stream, end.mark)

    def update(
        self, func: Any, args: tuple[Any, ...], timeline: Timeline, stream: StreamTimeline, now_s: float
    ) -> bool:
        """Mark the end of a step if *func* updates a parameter that existed before the first forward pass; return
        whether it does.

        A sum of losses existed then, too, but requires no gradient, and no forward pass reads it.
        """
        target = next(iter(tensors_in(args[:1])), None)
        if (
            func._schema.name not in _UPDATES
            or target is None
            or _in_backward() != -1
            or self._captured_ends is not None
        ):
            return False
        if _parameter(target) is None and tag_of(target) not in self._weights:
            return False
        self.awaits_update = False
        self._looked_up.clear()
        self._mark(self.by_hand, timeline, stream, now_s)
        return True

    @property
    def num_ended(self) -> int:
        """Return the number of steps that have ended on the host."""
        return max((len(ends) for ends in self._last), default=len(self.by_hand))

    def chosen(self) -> list[StepEnd]:
        """Return the steps of the optimizer with most steps, or the latest of several; without one, those by hand."""
        result: list[StepEnd] = []
        for ends in self._last:
            reached = [end for end in ends if end.account is not None]
            if len(reached) > len(result) or (result and len(reached) == len(result) and _later(reached, result)):
                result = reached
        return result if self._last else [end for end in self.by_hand if end.account is not None]


def _parameter(tensor: Tensor) -> Tag | None:
    """Return the tag of a tensor that requires a gradient and existed before the first forward pass."""
    tag = tag_of(tensor) if tensor.requires_grad else None
    return tag if tag is not None and tag.kind == OTHER else None


def _is_forward_again() -> bool:
    """Return whether a forward pass is being recomputed (checkpointing) inside a backward pass that keeps its graph.

    Recomputation runs Python code. What torch's engine itself computes belongs to the backward of a backward
    (`create_graph`).
    """
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_OURS) and not file.endswith("torch/_ops.py"):
            return not file.endswith("torch/autograd/graph.py")
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _later(ends: list[StepEnd], others: list[StepEnd]) -> bool:
    mine, other_mark = ends[-1].mark, others[-1].mark
    return (mine.reached_s or 0.0, mine.launched_s) >= (other_mark.reached_s or 0.0, other_mark.launched_s)


def ended_step(task: RankTask) -> None:
    """Report the end of a step of *task*, and end the program after the last step that is wanted."""
    accelerators = task.process.accelerators
    task.port.traced.ended_step(task.process)
    if accelerators is not None and accelerators.works and accelerators.steps.num_ended == task.port.facts.last_step:
        for device in accelerators.devices:
            device.synchronize_all(task)
        task.port.ended_last_step(task)


def works_on(optimizer: Any, current: int) -> int:
    """Return the GPU of an optimizer's parameters, or *current* if some parameters are on that GPU."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    device_counts = dict.fromkeys(p.device.index for p in parameters if p.is_cuda)
    return current if current in device_counts else next(iter(device_counts), current)
