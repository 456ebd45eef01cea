"""Operators with a rule of their own on a simulated GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from distsim.sim.device.operators import host_cells
from distsim.sim.device.operators.handler import Handler, Mode
from distsim.torch_compat.device import aten

__all__ = ["SPECIAL"]

_CUDA = 1
"""c10::DeviceType::CUDA."""


def _unscale(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """GradScaler: gradients that nobody knows are finite, so `found_inf` keeps its value; known ones are looked at."""
    gradients, found_inf, inverse_scale = args
    scale = mode.values.host(inverse_scale)
    found = mode.values.host(found_inf)
    for gradient in gradients:
        known = mode.values.host(gradient)
        if known is not None and scale is not None and found is not None and not mode.values.guessed(gradient):
            func([known], found, scale)
    mode.launch_plain(found_inf.device, 2 * sum(t.numel() * t.element_size() for t in gradients))


def _batch_norm_stats(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """SyncBatchNorm's statistics: (mean, inverse deviation) of each channel, float32 for half precision."""
    x: Tensor = args[0]
    return tuple(_channels(mode, x, 2, _wide(x.dtype)))


def _batch_norm_gather(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, mean = args[0], args[1]
    for running in args[3:5]:
        if isinstance(running, Tensor) and not mode.values.everything:
            mode.values.write(running, None)
    return tuple(_channels(mode, x, 2, mean.dtype))


def _batch_norm_elemt(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x: Tensor = args[0]
    made = mode.carry(tuple(x.shape), x.stride(), x.dtype, x.device)
    mode.launch_plain(x.device, 2 * x.numel() * x.element_size())
    return made


def _batch_norm_backward_reduce(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[1]
    return tuple(_channels(mode, x, 4, _wide(x.dtype)))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _channels(mode: Mode, x: Tensor, count: int, dtype: torch.dtype) -> list[Tensor]:
    made = [mode.carry((x.shape[1],), (1,), dtype, x.device) for _ in range(count)]
    mode.launch_plain(x.device, x.numel() * x.element_size())
    return made


def _record_stream(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Tensor.record_stream: its memory is not free before that stream has come so far."""
    held = args[0].untyped_storage().__dict__.get("_distsim_held")
    stream = args[1]
    if held is not None and stream.device_type == _CUDA:
        held.streams = [*(held.streams or ()), held.device.streams[stream.stream_id]]


def _gru_cell(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """aten._thnn_fused_gru_cell: (state, workspace of five gates)."""
    state: Tensor = args[2]
    rows, width = state.shape
    made = mode.carry((rows, width), (width, 1), state.dtype, state.device)
    workspace = mode.carry((rows, 5 * width), (5 * width, 1), state.dtype, state.device)
    mode.launch_plain(state.device, 13 * state.numel() * state.element_size())
    return made, workspace


def _gru_cell_backward(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    gradient, has_bias = args[0], args[2]
    rows, width = gradient.shape

    def make(count: int) -> Tensor:
        return mode.carry((rows, count * width), (count * width, 1), gradient.dtype, gradient.device)

    gates, hidden, state = make(3), make(3), make(1)
    mode.launch_plain(gradient.device, 13 * gradient.numel() * gradient.element_size())
    if not has_bias:
        return gates, hidden, state, None, None
    biases = [mode.carry((3 * width,), (1,), gradient.dtype, gradient.device) for _ in range(2)]
    return gates, hidden, state, *biases


def _drawn(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of each element one: draws that torch has no meta kernel for, and their derivatives."""
    x: Tensor = args[0]
    hosts = [mode.values.host(value) if isinstance(value, Tensor) else value for value in args]
    made = mode.carry(tuple(x.shape), x.stride(), x.dtype, x.device)
    mode.launch_plain(x.device, 2 * x.numel() * x.element_size())
    if not any(host is None and value is not None for host, value in zip(hosts, args, strict=True)):
        if mode.values.keeps(x.numel(), x.dtype):
            mode.values.know(made, func(*hosts))
    return made


def _with_values(handler: Handler, formula: Callable[..., list[Tensor | None]]) -> Handler:
    """*handler*, and where all values are known, those of what it makes."""

    def call(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not mode.values.everything:  # few values that are known are not followed through these
            return handler(mode, func, args, kwargs)
        hosts = [mode.values.host(value) if isinstance(value, Tensor) else value for value in args]
        made = handler(mode, func, args, kwargs)
        parts = made if isinstance(made, tuple) else (made,)
        for part, value in zip(parts, formula(*hosts), strict=True):
            if isinstance(part, Tensor) and value is not None:
                mode.values.know(part, value.to(part.dtype, copy=True))
        return made

    return call


SPECIAL: dict[Any, Handler] = {
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
    aten.batch_norm_stats.default: _with_values(_batch_norm_stats, host_cells.batch_norm_stats),
    aten.batch_norm_gather_stats_with_counts.default: _with_values(_batch_norm_gather, host_cells.batch_norm_gather),
    aten.batch_norm_elemt.default: _with_values(_batch_norm_elemt, host_cells.batch_norm_elemt),
    aten.batch_norm_backward_reduce.default: _with_values(
        _batch_norm_backward_reduce, host_cells.batch_norm_backward_reduce
    ),
    aten.batch_norm_backward_elemt.default: _with_values(
        lambda mode, func, args, kwargs: _batch_norm_elemt(mode, func, (args[1],), {}),
        host_cells.batch_norm_backward_elemt,
    ),
    aten.record_stream.default: _record_stream,
    aten._sample_dirichlet.default: _drawn,
    aten._dirichlet_grad.default: _drawn,
    aten._thnn_fused_gru_cell.default: _with_values(_gru_cell, host_cells.gru_cell),
    aten._thnn_fused_gru_cell_backward.default: _with_values(_gru_cell_backward, host_cells.gru_cell_backward),
}
