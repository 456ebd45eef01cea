"""Prices CPU operators: flops and bytes at the rates of the cluster's CPU.

The speed of the simulating machine plays no role. An operator on CPU tensors takes the larger of its flops over the
rank's share of flop/s and its bytes over the rank's share of memory bandwidth (the roofline model, Williams et al.
2009), and at least the modelled overhead of its launch from Python. Flops come from torch's own formulas
(torch.utils.flop_counter).
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from distsim.sim.device.operators.special import drawn_once
from distsim.sim.isolation.process import RankTask
from distsim.torch_compat.device import OpOverload, is_unobserved

_bytes_of = attrgetter("nbytes")
_FREE = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "profiler")
"""Collectives take the network's time, marks of the profiler none."""


class CpuRates:
    """One rank's share of its node's CPU: runs operators on CPU tensors, and charges them."""

    def __init__(
        self,
        flops_per_s: float,
        memory_bytes_per_s: float,
        op_overhead_s: float,
        slowed: Callable[[Any, float, float], float] | None = None,
        keeps_slices: bool = False,
    ) -> None:
        """Args:
        flops_per_s: Flop/s of the rank's share of the CPU.
        memory_bytes_per_s: Memory bandwidth of that share.
        op_overhead_s: Host time of each operator.
        slowed: Applies injected faults to a time (see `Fault.compute_s`).
        keeps_slices: Whether to keep the times of operators for a trace.
        """
        self._flops_per_s = flops_per_s
        self._bytes_per_s = memory_bytes_per_s
        self._overhead_s = op_overhead_s
        self._slowed = slowed
        self._keeps_slices = keeps_slices

    def run(self, task: RankTask, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        known = _kinds.get(id(func))
        if known is None:
            known = _kinds[id(func)] = _classify(func)
        _, call, free, flop_formula, name = known
        port, process, observers = task.port, task.process, task.process.observers
        if free:
            port.ticks += 1
            result = call(*args, **kwargs)
            if port.memory is not None:
                port.memory.saw(process, (args, result))
            if observers.recorder is not None and name.startswith(_OBSERVED_IF_FREE) and not is_unobserved(func):
                observers.recorder.operator(name, task.now_s(), 0.0, args)
            if observers.execution_trace is not None and not is_unobserved(func):
                observers.execution_trace.ran(func, args, kwargs, result)
            return result
        port.in_operator = True
        try:
            result = call(*args, **kwargs)
        finally:
            port.in_operator = False
            port.ticks += 1
        if port.memory is not None:
            port.memory.saw(process, (args, result))
        task.quiet_polls = task.time_queries = 0  # as `task.compute` does
        try:
            if isinstance(result, Tensor):
                if result.is_meta:  # looks only: nothing is computed
                    task.debt_s += self._overhead_s
                    return result
                moved = result.nbytes
            else:
                moved = _nbytes(result)
            for value in args:
                if isinstance(value, Tensor):
                    moved += value.nbytes
                elif isinstance(value, (list, tuple)):
                    moved += _nbytes(value)
        except RuntimeError:  # a sparse one has none
            moved = _logical_bytes(result) + sum(map(_logical_bytes, args))
        seconds = moved / self._bytes_per_s
        if seconds < self._overhead_s:
            seconds = self._overhead_s
        if flop_formula is not None:
            seconds = max(seconds, _flops(func, flop_formula, args, kwargs, result) / self._flops_per_s)
        if self._slowed is not None:
            seconds = self._slowed(process, task.now_s(), seconds)
        process.times.compute_s += seconds
        if self._keeps_slices:
            process.times.add_slice(task.now_s(), seconds, name)
        if observers.recorder is not None and not is_unobserved(func):
            observers.recorder.operator(name, task.now_s(), seconds, args)
        if observers.execution_trace is not None and not is_unobserved(func):
            observers.execution_trace.ran(func, args, kwargs, result)
        task.debt_s += seconds
        if port.traced.counts:
            port.traced.computed(process)
        return result


_OBSERVED_IF_FREE = ("aten::", "_c10d_functional::")

_kinds: dict[int, tuple[Any, Callable[..., Any], bool, Callable[..., int] | None, str]] = {}
"""(operator, function that runs it, whether it is free, flop formula, name) by the identity of the operator, kept
alive here.
"""

_counted: dict[Any, int] = {}
"""Flops of an operator on arguments of these shapes: torch's formulas take longer than small operators."""


def _classify(func: Any) -> tuple[Any, Callable[..., Any], bool, Callable[..., int] | None, str]:
    packet = getattr(func, "_overloadpacket", func)
    namespace = getattr(func, "namespace", "")
    view = bool(getattr(func, "is_view", False))
    free = view or namespace in _FREE or func is torch.ops.aten.detach.default
    call = func._op if type(func) is OpOverload else func  # its `__call__` does nothing else
    call = drawn_once(func, call)
    return func, call, free, flop_registry.get(packet), f"{namespace}::{getattr(packet, '__name__', packet)}"


def _flops(func: Any, formula: Callable[..., int], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    try:
        key = (id(func), *[arg.shape if isinstance(arg, Tensor) else arg for arg in args])
        known = None if kwargs else _counted.get(key)
    except TypeError:  # an argument that is a list
        return int(formula(*args, **kwargs, out_val=result))
    if known is None:
        known = int(formula(*args, **kwargs, out_val=result))
        if not kwargs and len(_counted) < 100_000:
            _counted[key] = known
    return known


def _nbytes(values: Any) -> int:
    """Return the bytes of the tensors in nested lists. Raises RuntimeError for a sparse tensor."""
    total = 0
    if isinstance(values, (tuple, list)):
        if values and isinstance(values[0], Tensor):
            try:
                return sum(map(_bytes_of, values))
            except AttributeError:  # other things among them: an index may have None
                pass
        for value in values:
            if isinstance(value, Tensor):
                total += value.nbytes
            elif isinstance(value, (tuple, list)):
                total += _nbytes(value)
    return total


def _logical_bytes(values: Any) -> int:
    """Return the bytes of one tensor or a list; a sparse tensor counts as if it were dense."""
    if isinstance(values, Tensor):
        return int(values.numel() * values.element_size())
    return sum(map(_logical_bytes, values)) if isinstance(values, (tuple, list)) else 0
