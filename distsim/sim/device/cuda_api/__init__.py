"""torch.cuda and torch.accelerator on simulated GPUs."""

from __future__ import annotations

from typing import Any

import torch

from distsim.sim.device.streams import accelerators_of, current_device, set_current_device
from distsim.sim.isolation.process import current_task

__all__ = ["cuda_patches"]


def cuda_patches() -> list[tuple[Any, str, Any]]:
    def rank(real: Any, ours: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            task = current_task()
            return real(*args, **kwargs) if task is None else ours(task, *args, **kwargs)
        return call

    def count(task: Any) -> int:
        found = task.process.accelerators
        return 0 if found is None else found.count

    def index(device: Any) -> int | None:
        return device if isinstance(device, int) or device is None else torch.device(device).index

    def set_device(task: Any, device: Any) -> None:
        set_current_device(task, index(device))

    def synchronize(task: Any, device: Any = None) -> None:
        found = index(device)
        accelerators_of(task.process)[task.cuda_device if found is None else found].synchronize_all(task)

    c = torch.cuda
    return [
        (c, "is_available", rank(c.is_available, lambda task: count(task) > 0)),
        (c, "device_count", rank(c.device_count, count)),
        (c, "current_device", rank(c.current_device, current_device)),
        (c, "set_device", rank(c.set_device, set_device)),
        (c, "synchronize", rank(c.synchronize, synchronize)),
        (c, "_lazy_init", rank(c._lazy_init, lambda task: accelerators_of(task.process)[task.cuda_device] and None)),
    ]
