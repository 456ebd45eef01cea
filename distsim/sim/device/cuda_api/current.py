"""The current device and the current stream: what torch.cuda and torch.accelerator ask of C++.

torch's Python classes stand on two of C++ (`torch._C._CudaStreamBase`, `_CudaEventBase`), which derive from
torch.Stream and torch.Event. Ours stand in their place, and torch's own `torch/cuda/streams.py` is run once more on top
of them.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from distsim.sim.device.cuda_api.events import CALL_S, CudaEventBase, Event
from distsim.sim.device.cuda_api.ranks import (
    Patch,
    accelerator_function,
    accelerators,
    cuda_function,
    gpu,
    visible_devices,
)  # fmt: skip
from distsim.sim.device.cuda_api.streams import CUDA, CudaStreamBase, Stream, handle, make_current
from distsim.sim.device.gpu import invalid_ordinal
from distsim.sim.device.streams import accelerators_of, current_device, current_stream, set_current_device
from distsim.sim.isolation.process import RankTask
from distsim.torch_compat.cuda_api import (
    CUDA_EVENT_BASE,
    CUDA_STREAM_BASE,
    EVENT,
    EXCHANGE_DEVICE,
    MAYBE_EXCHANGE_DEVICE,
    STREAM,
)

__all__ = ["current_patches"]

_PlainStream: Any = torch.Stream


def _set_stream(task: RankTask, stream_id: int, device_index: int, device_type: int) -> None:
    make_current(task, device_index, gpu(task, device_index).streams[stream_id])


def _get_stream(task: RankTask, index: int) -> tuple[int, int, int]:
    on = gpu(task, index)
    return current_stream(task, on).number, on.index, CUDA


def _get_default(task: RankTask, index: int) -> tuple[int, int, int]:
    return 0, gpu(task, index).index, CUDA


def _raw(task: RankTask, index: int) -> int:
    on = gpu(task, index)
    return handle(_PlainStream(stream_id=current_stream(task, on).number, device_index=on.index, device_type=CUDA))


def _accelerator_stream(task: RankTask, index: int) -> Stream:
    number, found, kind = _get_stream(task, index)
    made: Stream = Stream(stream_id=number, device_index=found, device_type=kind)
    return made


def _accelerator_set_stream(task: RankTask, stream: Any) -> None:
    _set_stream(task, stream.stream_id, stream.device_index, stream.device_type)


def _exchange(task: RankTask, index: int) -> int:
    """The old one; a negative number changes nothing."""
    if index < 0:
        return -1
    old = current_device(task)
    if index != old:
        if index >= visible_devices(task):
            accelerators_of(task.process)
            raise invalid_ordinal()
        set_current_device(task, index)
    return old


def _set_device(task: RankTask, index: int) -> None:
    if not 0 <= index < visible_devices(task):
        accelerators_of(task.process)  # says so where the cluster has none
        raise invalid_ordinal()
    accelerators(task).begin_work()
    set_current_device(task, index)


def _synchronize(task: RankTask, index: int | None = None) -> None:
    on = gpu(task, index)
    task.debt_s += CALL_S
    on.synchronize_all(task)


@functools.cache
def _on_top() -> ModuleType:
    """torch/cuda/streams.py, its classes derived from ours."""
    spec = importlib.util.find_spec("torch.cuda.streams")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = [(name, name.get()) for name in (CUDA_STREAM_BASE, CUDA_EVENT_BASE)]
    for (name, _), ours in zip(before, (CudaStreamBase, CudaEventBase), strict=True):
        setattr(name.holder(), name.attribute, ours)
    try:
        spec.loader.exec_module(module)
    finally:
        for name, real in before:
            setattr(name.holder(), name.attribute, real)
    return module


def current_patches() -> list[Patch]:
    """(holder, attribute, replacement) of streams, events and the current device."""
    ours = _on_top()
    patches: list[Patch] = [
        *CUDA_STREAM_BASE.replaced_by(CudaStreamBase),
        *CUDA_EVENT_BASE.replaced_by(CudaEventBase),
        *STREAM.replaced_by(Stream),
        *EVENT.replaced_by(Event),
        (torch, "Stream", Stream),
        (torch, "Event", Event),
    ]
    for holder in (torch.cuda, torch.cuda.streams):
        patches += [(holder, name, getattr(ours, name)) for name in ("Stream", "ExternalStream", "Event")]
    answers: tuple[tuple[str, Callable[..., Any]], ...] = (
        ("getDevice", lambda task: (accelerators(task), current_device(task))[1]),
        ("setDevice", _set_device),
        ("exchangeDevice", _exchange),
        ("maybeExchangeDevice", _exchange),
        ("getDeviceCount", visible_devices),
        ("getCurrentStream", _get_stream),
        ("getDefaultStream", _get_default),
        ("setStream", _set_stream),
        ("getCurrentRawStream", _raw),
        ("synchronize", _synchronize),
    )
    called = {short: cuda_function(short, ask) for short, ask in answers}
    patches += called.values()
    accelerator_answers: tuple[tuple[str, Callable[..., Any]], ...] = (
        ("getDeviceIndex", lambda task: current_device(task)),
        ("setDeviceIndex", lambda task, index: _set_device(task, index) if index >= 0 else None),
        ("exchangeDevice", _exchange),
        ("maybeExchangeDevice", _exchange),
        ("getStream", _accelerator_stream),
        ("setStream", _accelerator_set_stream),
        ("synchronizeDevice", _synchronize),
    )
    for name, answer in accelerator_answers:
        patches += accelerator_function(name, answer)
    patches += EXCHANGE_DEVICE.replaced_by(called["exchangeDevice"][2])
    patches += MAYBE_EXCHANGE_DEVICE.replaced_by(called["maybeExchangeDevice"][2])
    return patches
