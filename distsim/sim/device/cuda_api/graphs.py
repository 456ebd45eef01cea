"""CUDA graphs: captured kernels are launched again by one call of the host.

torch's own `torch.cuda.graph` and `make_graphed_callables` run on `CUDAGraph` here. Within a capture no kernel runs; a
replay puts all of them, in order, into the stream that it is called on, and nobody knows what they write.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from typing import Any

import torch

from distsim.errors import NotSimulated
from distsim.kernels import Cost
from distsim.sim.device.cuda_api.ranks import Patch, accelerators, with_gpus
from distsim.sim.device.gpu import Accelerators, Device
from distsim.sim.device.operators.values import KNOWLEDGE
from distsim.sim.device.streams import current_stream
from distsim.sim.isolation.process import RankTask, current_task, require_task
from distsim.sim.isolation.wraps import class_for_ranks
from distsim.torch_compat.cuda_api import HOST_EMPTY_CACHE

__all__ = ["graph_patches"]

LAUNCH_S, NODE_S = 2.5e-6, 1e-9
"""What cudaGraphLaunch takes on the host, and for each node (NVIDIA's technical blog, "Constant Time Launch for
Straight-Line CUDA Graphs and Other Performance Enhancements", September 2024)."""
_pools = itertools.count(1)


class Capture:
    """What one graph holds: kernels, storages that they write, and what they add to a step's sums."""

    def __init__(self, gpus: Accelerators) -> None:
        self._gpus = gpus
        self.kernels: list[tuple[Device, Cost, Any]] = []
        self.written: list[weakref.ref[torch.UntypedStorage]] = []
        self.ends: list[Any] = []
        """Optimizers whose step ended in it."""
        self.pool = (0, next(_pools))
        gpus.capture, gpus.values.written = self, self.written
        gpus.steps.begin_capture(self.ends)
        self.added: tuple[dict[Any, int], ...] = ()

    def close(self) -> None:
        """The capture is over."""
        self._gpus.capture = self._gpus.values.written = None
        self.added = self._gpus.steps.end_capture()

    def replay(self, task: RankTask) -> None:
        """Launch it."""
        task.process.accelerators.works_on_host(task, LAUNCH_S + NODE_S * len(self.kernels))
        for device, cost, name in self.kernels:
            device.launch(current_stream(task, device), cost, task, name)
        for reference in self.written:
            storage = reference()
            for name in KNOWLEDGE if storage is not None else ():
                storage.__dict__.pop(name, None)
        self._gpus.steps.add(self.added)
        for optimizer in self.ends:
            device = self._gpus[task.cuda_device]
            self._gpus.steps.end(optimizer, device.timeline, current_stream(task, device), task.now_s())
        traced = task.world.traced
        if traced.counts and task not in traced.apart:
            traced.saw_operator(task.process.rank, None)


class Graph:
    """What stands for torch.cuda.CUDAGraph in a rank."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._capture: Capture | None = None

    def capture_begin(
        self, pool: Any = None, capture_error_mode: str = "global", check_input_liveness: bool = False
    ) -> None:
        task = require_task()
        gpus = accelerators(task)
        if task.world.data.real:
            raise NotSimulated("torch.cuda.CUDAGraph with --data real", "simulate without --data real")
        if gpus.capture is not None:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        self._capture = Capture(gpus)

    def capture_end(self) -> None:
        if self._capture is None:
            raise RuntimeError("capture_end() called before capture_begin()")
        self._capture.close()
        if not self._capture.kernels:
            warnings.warn("The CUDA Graph is empty: nothing was captured", stacklevel=2)

    def replay(self) -> None:
        if self._capture is None:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        self._capture.replay(require_task())

    def pool(self) -> tuple[int, int]:
        if self._capture is None:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self._capture.pool

    def reset(self) -> None:
        self._capture = None

    def instantiate(self) -> None:
        """Nothing to do: a replay takes the kernels as they were captured."""

    enable_debug_mode = instantiate

    def debug_dump(self, debug_path: str) -> None:
        raise NotSimulated("CUDAGraph.debug_dump", "the report lists the operators that took longest")


def _is_capturing(task: RankTask) -> bool:
    gpus = task.process.accelerators
    return gpus is not None and gpus.capture is not None


def _graph_class(real: type) -> type:
    """torch.cuda.graph with a default stream of each process's own."""

    def __init__(self: Any, cuda_graph: Any, pool: Any = None, stream: Any = None, *args: Any, **kwargs: Any) -> None:
        task = current_task()
        if task is not None and stream is None:
            gpus = accelerators(task)
            stream = gpus.capture_stream = gpus.capture_stream or torch.cuda.Stream()
        real.__init__(self, cuda_graph, pool, stream, *args, **kwargs)  # type: ignore[misc]

    return type(real.__name__, (real,), {"__init__": __init__})


def graph_patches() -> list[Patch]:
    """(holder, attribute, replacement)."""
    graphs = torch.cuda.graphs
    ours = {
        "graph": _graph_class(graphs.graph),
        "CUDAGraph": class_for_ranks(graphs.CUDAGraph, Graph),
        "graph_pool_handle": with_gpus(graphs.graph_pool_handle, lambda task: (0, next(_pools))),
        "is_current_stream_capturing": with_gpus(graphs.is_current_stream_capturing, _is_capturing),
    }
    empty = HOST_EMPTY_CACHE.get(None)
    cache = (lambda: None) if empty is None else with_gpus(empty, lambda task: None)
    patches: list[Patch] = [(HOST_EMPTY_CACHE.holder(), HOST_EMPTY_CACHE.attribute, cache)]
    return patches + [(holder, name, value) for name, value in ours.items() for holder in (torch.cuda, graphs)]
