"""`--fuse`: kernels of a compiled function, merged as torch's compiler would (by the rule in kernels/gpu.py).

The function's operators run one by one. Elementwise operators are held back and merged: an operator joins a kernel
that produces its input, or that reads the same tensor and has the same size, unless it needs a complete sum first.
Held kernels are launched before anything else on the device: a product, a collective, an event, the end of the
function. A result that is no longer referenced by then is never written. Neither is a result that only autograd
keeps: as under the compiler's min-cut partitioner, backward recomputes it from the kernel's inputs, which stay in
memory instead. A result that the program keeps besides the return value and the module's attributes looks the same,
and is written once code outside reads it. The memory of a product that a checkpoint keeps is freed at the function's
end if no operator of backward reads it, because the partitioner saves only what backward needs. Backward is a graph
as well, of the nodes that forward created.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Collection
from dataclasses import replace
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from distsim.kernels.cost import Cost, nbytes, tensors_in
from distsim.kernels.gpu import BACKWARD_S, FUSABLE, GRAPH_S, GUARD_S, KERNEL_S, MOST_FUSED, fused_cost
from distsim.torch_compat.device import CURRENT_AUTOGRAD_NODE, GET_SEQUENCE_NR, SAVING_HOOKS
from distsim.torch_compat.groups import CURRENT_GRAPH_TASK_ID

if TYPE_CHECKING:
    from distsim.kernels import Gpu
    from distsim.kernels.gpu import HostCpu
    from distsim.sim.device.allocator import Allocator
    from distsim.sim.device.timeline.timeline import StreamTimeline, Timeline
    from distsim.sim.isolation.process import RankTask

_current_autograd_node = CURRENT_AUTOGRAD_NODE.get()
_current_graph_task_id = CURRENT_GRAPH_TASK_ID.get()

_in_backward, _node = _current_graph_task_id, _current_autograd_node
_next_node = GET_SEQUENCE_NR.get()
_saving_hooks = SAVING_HOOKS.get(lambda _: None)
MOST_CALLS = 1 << 16
"""Calls whose backward may still come."""
NO_BACKWARD = -1
MOST_OBJECTS = 10_000
"""Objects of a result that are searched for tensors."""
LINEAR = frozenset({"aten::add", "aten::add_", "aten::sub", "aten::sub_", "aten::_to_copy", "aten::clone"})
"""Operators whose backward reads none of their inputs."""
_LEAST_REDUCED = 4
"""What is smaller than its inputs by more than this is not computed again (torch/_functorch/partitioners.py, the ban of
reductions)."""
_WITHOUT_TENSORS = (int, float, str, bytes, type, ModuleType, FunctionType, torch.dtype, torch.device)
_Place = Any
"""A weak reference to the memory of a tensor: the same for all tensors that share it."""


def _is_across(inputs: list[Tensor]) -> bool:
    """Return whether rows of the first input lie across memory, as a transpose's: no block has a row as a whole."""
    return bool(inputs) and inputs[0].dim() > 1 and inputs[0].stride(-1) > 1 < inputs[0].shape[-1]


class Launcher(Protocol):
    """gpu.Device."""

    @property
    def model(self) -> Gpu: ...

    @property
    def host(self) -> HostCpu: ...

    @property
    def timeline(self) -> Timeline: ...

    @property
    def memory(self) -> Allocator: ...

    def launch(self, stream: StreamTimeline, cost: Cost, task: RankTask, name: Any) -> None: ...


class _Kernel:
    """One that is being put together."""

    def __init__(self, size: int) -> None:
        self.size = size
        """Elements of the largest tensor that it goes through."""
        self.parts: list[Cost] = []
        self.names: dict[str, None] = {}
        self.reads: dict[_Place, int] = {}
        self.writes: dict[_Place, int] = {}
        self.needs: dict[_Place, frozenset[_Place]] = {}
        """Written tensor -> what of `reads` it is computed from."""
        self.inputs: list[Any] = []
        """Memory (gpu.Held) of `reads` in forward, which stays if backward computes a result anew; nothing in a
        checkpoint, whose hooks save none of it."""
        self.sums: set[_Place] = set()
        """Written tensors that are complete only when the whole kernel has ended."""
        self.late = 0
        """Bytes of earlier kernels that turned out to be read, and are written after all."""

    def take_in(self, other: _Kernel) -> None:
        """Compute in this kernel what *other* does, too, which reads nothing that this one writes."""
        self.parts = [*other.parts, *self.parts]
        self.names = {**other.names, **self.names}
        self.reads |= other.reads
        self.writes |= other.writes
        self.needs |= other.needs
        self.inputs += other.inputs
        self.late += other.late


class Fusion:
    """Fusion of compiled functions in one process."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}
        """Number of calls by compiled function."""
        self.kernels_before = self.kernels_after = 0
        self.gpu_saved_s = self.host_saved_s = 0.0
        self._inside: dict[RankTask, int] = {}
        """Threads that are in a compiled function, and in how many."""
        self._nodes: dict[RankTask, tuple[list[int], list[int], list[bool]]] = {}
        """Ranges of autograd node numbers of each call, and whether it is a CUDA graph, by thread."""
        self._replays = False
        """Whether operators are replayed as a CUDA graph now, without host time for each kernel."""
        self._backward_of: tuple[RankTask, int] | None = None
        self._held: list[_Kernel] = []
        self._unwritten: weakref.WeakKeyDictionary[Any, dict[_Place, int]] = weakref.WeakKeyDictionary()
        """Memory (gpu.Held) not read since its kernel -> what that kernel read, with its bytes."""
        self._inlined: weakref.WeakSet[Any] = weakref.WeakSet()
        """Those of them without a sum, which a later kernel of elementwise operators computes for itself."""
        self._recent: list[weakref.ref[Any]] = []
        """Results of the running call that were not written to memory."""
        self._steps: list[tuple[bool, Collection[_Place], Collection[_Place]]] = []
        """Operators of the running call: whether their backward reads their inputs, what they read, what they write."""
        self._alone: dict[_Place, Any] = {}
        """Results of kernels that were not fused in the running call, and how to allocate their memory (Held.due)."""
        self._known: dict[Any, list[_Place]] = {}
        """Results of the running graph, by operator and inputs."""
        self._same: dict[_Place, _Place] = {}
        """Results that would be computed again -> the earlier ones, which are read instead."""
        self._task: RankTask | None = None
        """The thread that ran compiled code last."""
        self._around = NO_BACKWARD
        """The backward that the compiled function that runs was called in: a checkpoint that computes again."""
        self._where: tuple[Launcher, StreamTimeline, RankTask] | None = None

    def run(
        self,
        call: Callable[[], Any],
        task: RankTask,
        name: str,
        parameters: int,
        replays: bool,
        module: Callable[[], torch.nn.Module | None] | None = None,
    ) -> Any:
        """Return the result of *call*, a compiled function; a function inside another is part of it.

        *module* is the module whose forward it is, if any. *replays* says that it runs as a CUDA graph.
        """
        depth = self._inside.get(task, 0)
        if depth == 0:
            self.flush()
            self._forget()
            self._task, self._around = task, _in_backward()
            self.calls[name] = self.calls.get(name, 0) + 1
            self._host(task, -(GRAPH_S + parameters * GUARD_S))
            begin, self._replays = _next_node(), replays
        self._inside[task] = depth + 1
        result = None
        try:
            result = call()
            return result
        finally:
            if depth:
                self._inside[task] = depth
            else:
                try:
                    self._end(result, begin != _next_node(), None if module is None else module())
                finally:
                    del self._inside[task]
                    self._around = NO_BACKWARD
                begins, ends, replayed = self._nodes.setdefault(task, ([], [], []))
                begins.append(begin)
                ends.append(_next_node())
                replayed.append(replays)
                if len(begins) > MOST_CALLS:
                    del begins[: MOST_CALLS // 2], ends[: MOST_CALLS // 2], replayed[: MOST_CALLS // 2]

    def compiles(self, task: RankTask) -> bool:
        """Return whether the operators of *task* are part of a compiled graph, or of its backward."""
        if task in self._inside:
            return True
        known = self._nodes.get(task)
        if known is None or _in_backward() == NO_BACKWARD:
            return False
        node = _node()
        if node is None:
            return False
        number = node._sequence_nr()
        call = bisect_right(known[0], number) - 1
        if call < 0 or number >= known[1][call]:
            return False
        which = (task, known[0][call])
        if which != self._backward_of:
            self._backward_of = which
            self.flush()
            self._forget()
            self._replays = known[2][call]
            self._host(task, -BACKWARD_S)
        return True

    def spares(self, seconds: float) -> None:
        """Count host time that is saved because the operator's graph is launched as a whole."""
        self.host_saved_s += seconds

    def _host(self, task: RankTask, saved_s: float) -> None:
        task.process.accelerators.works_on_host(task, -saved_s)
        self.host_saved_s += saved_s

    def _launches(self, task: RankTask, cost: Cost) -> None:
        if not self._replays:
            self._host(task, -KERNEL_S * cost.kernels)

    # -- kernels

    @staticmethod
    def merges(cost: Cost, func: Any) -> bool:
        """Return whether the kernels of an operator may be fused with others."""
        return cost.kind in FUSABLE and not func._schema.name.startswith("aten::_foreach")

    def launch(
        self, device: Launcher, stream: StreamTimeline, cost: Cost, task: RankTask, func: Any, given: Any, result: Any
    ) -> None:
        """Launch an operator of a compiled graph, as `Device.launch`."""
        self.spares(device.host.operator_s)
        self.kernels_before += cost.kernels
        inputs = [tensor for tensor in tensors_in(given) if tensor.is_cuda]
        if not self.merges(cost, func):
            self._launch_alone(device, stream, cost, task, func, inputs)
            ledger = device.memory.ledger
            self._note(task, func, self.read(inputs), self.read(result), (stream, ledger.kind, ledger.module))
            return
        if self._where is not None and self._where[:2] != (device, stream):
            self.flush()
        outputs = [tensor for tensor in tensors_in(result) if tensor.is_cuda] or inputs[:1]
        if self._is_known(func, given, outputs):
            return
        size = max((tensor.numel() for tensor in (*inputs, *outputs)), default=1)
        reads = [(storage, tensor) for tensor in inputs if (storage := self._at(tensor)) is not None]
        writes = [(storage, tensor) for tensor in outputs if (storage := _place(tensor)) is not None]
        self._note(task, func, [storage for storage, _ in reads], [storage for storage, _ in writes])
        kernel = self._fits(size, [storage for storage, _ in reads], [storage for storage, _ in writes])
        if kernel is None:
            kernel = _Kernel(size)
            self._held.append(kernel)
        kernel.size = max(kernel.size, size)
        kernel.parts.append(cost)
        kernel.names[str(func._schema.name).removeprefix("aten::")] = None
        settled, late = self._settled(
            {storage: nbytes(tensor) for storage, tensor in reads if storage not in kernel.writes}, self._inlined
        )
        kernel.late += late
        for storage, size in settled.items():
            kernel.reads[storage] = max(kernel.reads.get(storage, 0), size)
        if torch.is_grad_enabled() and not self._is_backward() and _saving_hooks(True) is None:
            kernel.inputs += _alive(settled)
        needs = frozenset(settled).union(*(kernel.needs.get(storage, ()) for storage, _ in reads))
        row = max((tensor.shape[-1] for tensor in inputs if tensor.dim()), default=1)
        for storage, tensor in writes:
            kernel.writes[storage] = max(kernel.writes.get(storage, 0), nbytes(tensor))
            kernel.needs[storage] = kernel.needs.get(storage, frozenset()) | needs
            if cost.kind == "reduction" and (tensor.numel() * row < size or _is_across(inputs)):
                kernel.sums.add(storage)
        if self._where is None:
            self._where = (device, stream, task)
            device.timeline.before_put = self.flush

    def read(self, given: Any) -> dict[_Place, int]:
        """Return the memory of the tensors in *given*, and the bytes of each."""
        return {
            p: nbytes(tensor) for tensor in tensors_in(given) if tensor.is_cuda and (p := self._at(tensor)) is not None
        }

    def _at(self, tensor: Tensor) -> _Place | None:
        storage = _place(tensor)
        return self._same.get(storage, storage) if self._same else storage

    def _is_known(self, func: Any, given: Any, outputs: list[Tensor]) -> bool:
        """Return whether the running graph has these results already; then the earlier ones stand for *outputs*."""
        if func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags:
            self._known.clear()  # of what was computed from the old values, too
            return False
        storages = [storage for tensor in outputs if (storage := _place(tensor)) is not None]
        try:
            known = self._known.setdefault((func, self._token(given)), storages)
        except TypeError:  # an argument that cannot be a key
            return False
        if known is storages:
            return False
        self._same |= zip(storages, known, strict=True)
        return True

    def _token(self, value: Any) -> Any:
        """Return what is equal for equal arguments."""
        if isinstance(value, Tensor):
            if not value.is_cuda:
                raise TypeError(value.device)
            layout = (value.storage_offset(), *value.shape, *value.stride())
            return self._at(value), value.dtype, layout
        if isinstance(value, list | tuple):
            return tuple(self._token(each) for each in value)
        if isinstance(value, dict):
            return tuple((key, self._token(each)) for key, each in value.items())
        return type(value), value

    def _forget(self) -> None:
        self._known.clear()
        self._same.clear()

    def _note(
        self, task: RankTask, func: Any, reads: Collection[_Place], writes: Collection[_Place], alone: Any = None
    ) -> None:
        """Remember an operator of a compiled function's forward for `_drop_unread`."""
        if task in self._inside and self._around == NO_BACKWARD == _in_backward():
            self._steps.append((func._schema.name not in LINEAR, reads, writes))
            if alone is not None:
                self._alone |= dict.fromkeys(set(writes) - set(reads), alone)

    def _drop_unread(self, kept: Collection[_Place]) -> None:
        """Free results of kernels that were not fused if backward does not read them and they are not in *kept*."""
        read: set[_Place] = set()
        needed: set[_Place] = set()
        for saves, reads, writes in reversed(self._steps):
            read.update(reads)
            if saves or not needed.isdisjoint(writes):
                needed.update(reads)
        unread = read.difference(needed, kept)
        for storage, due in self._alone.items():
            if storage in unread and (held := storage()) is not None:
                held.postpone(due)
                self._unwritten[held] = {}

    def _launch_alone(
        self, device: Launcher, stream: StreamTimeline, cost: Cost, task: RankTask, func: Any, inputs: list[Tensor]
    ) -> None:
        reads = self.read(inputs)
        self.flush(reads)
        settled, late = self._settled(reads)
        late += sum(size for storage, size in settled.items() if storage not in reads)
        cost = _plus(cost, late, device)
        self._launches(task, cost)
        self.kernels_after += cost.kernels
        device.launch(stream, cost, task, func)

    def _settled(self, reads: dict[_Place, int], inlined: Collection[Any] = ()) -> tuple[dict[_Place, int], int]:
        """Return what is read instead of *reads*, and the bytes that must be written for it.

        For results that were not written, backward reads their inputs and recomputes them, and so does forward those
        that are *inlined* (gpu.Held); forward writes others after all.
        """
        sizes: dict[_Place, int] = {}
        late = 0
        for storage, size in reads.items():
            held = storage()
            origins = None if held is None else self._unwritten.get(held)
            if origins is None:
                sizes[storage] = size
            elif self._is_backward() or held in inlined:
                sizes |= origins
            else:
                del self._unwritten[held]
                held.take()
                sizes[storage] = size
                late += size
        return sizes, late

    def _is_backward(self) -> bool:
        return bool(_in_backward() != self._around)

    def _end(self, result: Any, autograd_keeps: bool, module: torch.nn.Module | None) -> None:
        """Launch pending operators when a compiled function returns *result*, and write the result and what *module*
        keeps.

        If autograd keeps nothing of the call, the program itself keeps all live tensors, which are then written as
        well.
        """
        tensors = _results(result)
        places = self.read(tensors)
        if module is not None and (self._held or self._recent):
            for each in module.modules():
                places |= self.read(vars(each))
        all_lives = not autograd_keeps or tensors is None
        if all_lives:
            places |= {storage: held.nbytes for storage in self._recent if (held := storage()) is not None}
        self._recent.clear()
        if not all_lives:
            self._drop_unread(places)
        self._steps.clear()
        self._alone.clear()
        if self._held:
            self._held[-1].late += self._settled(places)[1]
            self.flush(None if all_lives else places)
        for storage in places:
            self._write_after_all(storage())

    def is_read(self, given: Any) -> None:
        """Write those tensors in *given* that have no memory yet, because code that is not compiled reads them."""
        for storage in self.read(given) if self._held or self._unwritten else ():
            held = storage()
            if held is not None and held.due is not None:
                self.write(held)

    def write(self, held: Any) -> None:
        """Take the memory of *held* (gpu.Held), and launch what writes it."""
        self.flush()
        self._write_after_all(held)

    def _write_after_all(self, held: Any) -> None:
        if held is None or held.due is None:
            return
        stream, task = held.due[0], self._task
        self._unwritten.pop(held, None)
        held.take()
        if task is not None and not task.finished:
            cost = Cost(0.0, 1, 0, held.nbytes, "elementwise", True)
            held.device.launch(stream, _plus(cost, held.nbytes, held.device), task, "write of an earlier fused kernel")

    def _fits(self, size: int, reads: list[_Place], writes: list[_Place]) -> _Kernel | None:
        """Return the kernel that an operator can join, or None.

        Kernels are in an order in which they could run. The operator joins none that must run before one of its
        inputs is ready.
        """
        beside = None
        for kernel in reversed(self._held):
            after = any(storage in kernel.writes for storage in reads)
            if after or any(storage in kernel.reads or storage in kernel.writes for storage in writes):
                small, large = sorted((max(1, size), max(1, kernel.size)))
                fits = large % small == 0 and len(kernel.parts) < MOST_FUSED and not kernel.sums.intersection(reads)
                return self._wider(kernel, size, reads) if fits else beside
            if beside is None and kernel.size == size and len(kernel.parts) < MOST_FUSED:
                beside = kernel if any(storage in kernel.reads for storage in reads) else None
        return beside

    def _wider(self, kernel: _Kernel, size: int, reads: list[_Place]) -> _Kernel:
        """Return *kernel*, or the one right before it that takes it in: a cast of a weight, which is multiplied with
        what that one computes, is no reason to write the product's other factor.
        """
        position = self._held.index(kernel)
        before = self._held[position - 1] if position else kernel
        if (
            kernel.size < size == before.size
            and not before.writes.keys().isdisjoint(reads)
            and before.writes.keys().isdisjoint(kernel.reads)
            and before.sums.isdisjoint(reads)
            and not kernel.sums
            and len(before.parts) + len(kernel.parts) < MOST_FUSED
        ):
            before.take_in(kernel)
            self._held.remove(kernel)
            return before
        return kernel

    def flush(self, needed: Collection[_Place] | None = None) -> None:
        """Launch pending operators. Forward writes those of their results that are *needed* now; None: all that are
        alive.
        """
        if self._where is None:
            return
        (device, stream, task), self._where = self._where, None
        device.timeline.before_put = None
        kernels, self._held = self._held, []
        if self._is_backward():
            needed = None
        between = {storage for kernel in kernels for storage in kernel.reads}
        for kernel in kernels:
            written = self._write(kernel, needed, between)
            if kernel.writes and not written:  # backward computes it
                continue
            cost = _plus(
                fused_cost(device.model, kernel.parts, sum(kernel.reads.values()), written), kernel.late, device
            )
            self._launches(task, cost)
            self.kernels_after += cost.kernels
            apart_s = sum(part.seconds for part in kernel.parts) + (len(kernel.parts) - 1) * device.model.gap_s
            self.gpu_saved_s += apart_s - cost.seconds
            device.launch(stream, cost, task, _name(kernel))

    def _write(self, kernel: _Kernel, needed: Collection[_Place] | None, between: Collection[_Place]) -> int:
        """Return the bytes that *kernel* writes. *between* is the memory read by kernels that are launched together
        with it.
        """
        written = 0
        for storage, size in kernel.writes.items():
            held = storage()
            if held is None or not held.lives:
                written += size if storage in between else 0
            elif (
                needed is None
                or held.due is None
                or storage in needed
                or storage in between
                or _LEAST_REDUCED * size < sum(kernel.reads[each] for each in kernel.needs[storage])
            ):
                held.take()
                written += size
            else:
                held.origins = _alive(kernel.needs[storage])
                self._unwritten[held] = {each: kernel.reads[each] for each in kernel.needs[storage]}
                self._recent.append(storage)
                if not kernel.sums:
                    self._inlined.add(held)
        return written


def _results(result: Any) -> list[Tensor] | None:
    """Return the tensors in *result*, in objects of any class also; None if it is too large to be searched."""
    tensors, left, seen = [], [result], set()
    while left:
        value = left.pop()
        kind = type(value)  # of an object that isinstance would run the code of, too
        if issubclass(kind, Tensor):
            if hasattr(value, "__tensor_flatten__"):  # DTensor, and others that hold tensors
                parts = (getattr(value, name) for name in value.__tensor_flatten__()[0])
                left += [part for part in parts if isinstance(part, Tensor)]
            else:
                tensors.append(value)
            continue
        if value is None or issubclass(kind, _WITHOUT_TENSORS) or id(value) in seen:
            continue
        seen.add(id(value))
        if len(seen) > MOST_OBJECTS:
            return None
        if issubclass(kind, dict):
            left += value.values()
        elif issubclass(kind, list | tuple | set | frozenset):
            left += value
        if kind.__dictoffset__:
            left += vars(value).values()
        for base in kind.__mro__:
            slots = base.__dict__.get("__slots__", ())
            left += [getattr(value, name, None) for name in ([slots] if isinstance(slots, str) else slots)]
    return tensors


def _alive(places: Collection[_Place]) -> list[Any]:
    """Return the memory (gpu.Held) of *places* that still exists."""
    return [held for storage in places if (held := storage()) is not None]


def _plus(cost: Cost, nbytes: int, device: Launcher) -> Cost:
    """Return *cost* with *nbytes* more memory traffic."""
    rate = device.model.memory_bandwidth * device.model.spec.memory.elementwise
    return replace(cost, seconds=cost.seconds + nbytes / rate) if nbytes else cost


def _place(tensor: Tensor) -> _Place:
    held = tensor.untyped_storage().__dict__.get("_distsim_held")
    return None if held is None else weakref.ref(held)


def _name(kernel: _Kernel) -> str:
    names = list(kernel.names)
    if len(kernel.parts) == 1:
        return names[0]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"fused {', '.join(names[:3])}{more}"
