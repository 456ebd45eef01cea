"""`--fuse`: what a compiled function launches, merged as torch's compiler would (the rule is kernels/gpu.py's).

Its operators are met one by one, as they are run. Those that only pass numbers through are held back and merged: one
joins a kernel that makes what it reads, or that reads the same and is as large, unless it has to see all of a sum
first. They are launched when anything else is put on the device: a product, a collective, an event, the function's end.
What has died by then was never written. What autograd keeps for backward counts as written, though the compiler would
compute part of it again: the saving is a lower bound. Backward is a graph as well: of the nodes that forward made.
"""

from __future__ import annotations

import contextlib
import weakref
from bisect import bisect_right
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from distsim.kernels.cost import nbytes, tensors_in
from distsim.kernels.gpu import BACKWARD_S, FUSABLE, GRAPH_S, GUARD_S, KERNEL_S, MOST_FUSED, fused_cost
from distsim.torch_compat.device import CURRENT_AUTOGRAD_NODE, GET_SEQUENCE_NR
from distsim.torch_compat.works import CURRENT_GRAPH_TASK_ID

if TYPE_CHECKING:
    from distsim.kernels import Cost, Gpu
    from distsim.kernels.gpu import Host
    from distsim.sim.device.timeline.timeline import Stream, Timeline
    from distsim.sim.isolation.process import RankTask

__all__ = ["Fusion"]

_current_autograd_node = CURRENT_AUTOGRAD_NODE.get()
_current_graph_task_id = CURRENT_GRAPH_TASK_ID.get()

_in_backward, _node = _current_graph_task_id, _current_autograd_node
_next_node = GET_SEQUENCE_NR.get()
MOST_CALLS = 1 << 16
"""Calls whose backward may still come."""
_Place = Any
"""A weak reference to the memory of a tensor: the same for all tensors that share it."""


class Launcher(Protocol):
    """gpu.Device."""

    @property
    def model(self) -> Gpu: ...

    @property
    def host(self) -> Host: ...

    @property
    def timeline(self) -> Timeline: ...

    def launch(self, stream: Stream, cost: Cost, task: RankTask, name: Any) -> None: ...


class _Kernel:
    """One that is being put together."""

    def __init__(self, size: int) -> None:
        self.size = size
        """Elements of the largest tensor that it goes through."""
        self.parts: list[Cost] = []
        self.names: dict[str, None] = {}
        self.reads: dict[_Place, int] = {}
        self.writes: dict[_Place, int] = {}
        self.sums: set[_Place] = set()
        """Written ones that are there only when the whole kernel has ended."""


class Fusion:
    """Of one process."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}
        """By compiled function."""
        self.kernels_before = self.kernels_after = 0
        self.gpu_saved_s = self.host_saved_s = 0.0
        self._inside: dict[RankTask, int] = {}
        """Threads that are in a compiled function, and in how many."""
        self._nodes: dict[RankTask, tuple[list[int], list[int], list[bool]]] = {}
        """Where the numbers of the nodes of each call begin and end, and whether it is a CUDA graph, by thread."""
        self._replays = False
        """Whether what is met now is replayed as a CUDA graph, which costs the host nothing for each kernel."""
        self._backward_of: tuple[RankTask, int] | None = None
        self._held: list[_Kernel] = []
        self.late: list[weakref.ref[Any]] = []
        """Memory of what they make (gpu.Held), taken when they are launched."""
        self._where: tuple[Launcher, Stream, RankTask] | None = None

    @contextlib.contextmanager
    def graph(self, task: RankTask, name: str, parameters: int, replays: bool) -> Iterator[None]:
        """A compiled function runs; one within another is part of it. *replays*: in mode "reduce-overhead"."""
        depth = self._inside.get(task, 0)
        if depth == 0:
            self.calls[name] = self.calls.get(name, 0) + 1
            self._host(task, -(GRAPH_S + parameters * GUARD_S))
            begin, self._replays = _next_node(), replays
        self._inside[task] = depth + 1
        try:
            yield
        finally:
            if depth:
                self._inside[task] = depth
            else:
                del self._inside[task]
                self.flush()
                begins, ends, replayed = self._nodes.setdefault(task, ([], [], []))
                begins.append(begin)
                ends.append(_next_node())
                replayed.append(replays)
                if len(begins) > MOST_CALLS:
                    del begins[: MOST_CALLS // 2], ends[: MOST_CALLS // 2], replayed[: MOST_CALLS // 2]

    def compiles(self, task: RankTask) -> bool:
        """Whether what *task* launches is part of a compiled graph, or of its backward."""
        if task in self._inside:
            return True
        known = self._nodes.get(task)
        if known is None or _in_backward() == -1:
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
            self._replays = known[2][call]
            self._host(task, -BACKWARD_S)
        return True

    def spares(self, seconds: float) -> None:
        """The host does not spend that on an operator: its graph is launched as a whole."""
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
        """Whether the kernels of an operator may become a part of others."""
        return cost.kind in FUSABLE and not func._schema.name.startswith(("aten::_foreach", "aten::_fused"))

    def launch(
        self, device: Launcher, stream: Stream, cost: Cost, task: RankTask, func: Any, given: Any, made: Any
    ) -> None:
        """As `Device.launch`, of an operator of a compiled graph."""
        self.spares(device.host.operator_s)
        self.kernels_before += cost.kernels
        if not self.merges(cost, func):
            self.flush()
            self._launches(task, cost)
            self.kernels_after += cost.kernels
            device.launch(stream, cost, task, func)
            return
        if self._where is not None and self._where[:2] != (device, stream):
            self.flush()
        inputs = [tensor for tensor in tensors_in(given) if tensor.is_cuda]
        outputs = [tensor for tensor in tensors_in(made) if tensor.is_cuda] or inputs[:1]
        size = max((tensor.numel() for tensor in (*inputs, *outputs)), default=1)
        reads = [(place, tensor) for tensor in inputs if (place := _place(tensor)) is not None]
        writes = [(place, tensor) for tensor in outputs if (place := _place(tensor)) is not None]
        kernel = self._fits(size, [place for place, _ in reads], [place for place, _ in writes])
        if kernel is None:
            kernel = _Kernel(size)
            self._held.append(kernel)
        kernel.size = max(kernel.size, size)
        kernel.parts.append(cost)
        kernel.names[str(func._schema.name).removeprefix("aten::")] = None
        for place, tensor in reads:
            if place not in kernel.writes:
                kernel.reads[place] = max(kernel.reads.get(place, 0), nbytes(tensor))
        row = max((tensor.shape[-1] for tensor in inputs if tensor.dim()), default=1)
        for place, tensor in writes:
            kernel.writes[place] = max(kernel.writes.get(place, 0), nbytes(tensor))
            if cost.kind == "reduction" and tensor.numel() * row < size:
                kernel.sums.add(place)
        if self._where is None:
            self._where = (device, stream, task)
            device.timeline.before_put = self.flush

    def _fits(self, size: int, reads: list[_Place], writes: list[_Place]) -> _Kernel | None:
        """The kernel that an operator joins. They are in an order in which they could run, and stay so: it joins none
        before one that it has to come after."""
        beside = None
        for kernel in reversed(self._held):
            after = any(place in kernel.writes for place in reads)
            if after or any(place in kernel.reads or place in kernel.writes for place in writes):
                small, large = sorted((max(1, size), max(1, kernel.size)))
                fits = large % small == 0 and len(kernel.parts) < MOST_FUSED and not kernel.sums.intersection(reads)
                return kernel if fits else beside
            if beside is None and kernel.size == size and len(kernel.parts) < MOST_FUSED:
                beside = kernel if any(place in kernel.reads for place in reads) else None
        return beside

    def flush(self) -> None:
        """Launch what is held back."""
        if self._where is None:
            return
        (device, stream, task), self._where = self._where, None
        device.timeline.before_put = None
        kernels, self._held = self._held, []
        for due in self.late:
            if (held := due()) is not None:
                held.take()
        self.late.clear()
        for kernel in kernels:
            written = sum(size for place, size in kernel.writes.items() if _lives(place))
            cost = fused_cost(device.model, kernel.parts, sum(kernel.reads.values()), written)
            self._launches(task, cost)
            self.kernels_after += cost.kernels
            apart_s = sum(part.seconds for part in kernel.parts) + (len(kernel.parts) - 1) * device.model.gap_s
            self.gpu_saved_s += apart_s - cost.seconds
            device.launch(stream, cost, task, _name(kernel))


def _place(tensor: Tensor) -> _Place:
    held = tensor.untyped_storage().__dict__.get("_distsim_held")
    return None if held is None else weakref.ref(held)


def _lives(place: _Place) -> bool:
    held = place()
    return held is not None and held.lives


def _name(kernel: _Kernel) -> str:
    names = list(kernel.names)
    if len(kernel.parts) == 1:
        return names[0]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"fused {', '.join(names[:3])}{more}"
