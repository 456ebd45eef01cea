"""torch.Generator(device="cuda")."""

from __future__ import annotations

from typing import Any

import torch

from distsim.sim.device.cuda_api.ranks import Patch, gpu
from distsim.sim.device.generator import CudaGenerator
from distsim.sim.isolation.process import current_task

__all__ = ["generator_patches"]

_Plain = torch.Generator


class _Kind(type):
    """Whatever is a generator of torch's is an instance of what stands in for its class."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _Plain)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _Plain)

    def __call__(cls, device: Any = "cpu") -> Any:
        task = current_task()
        found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if task is None or found.type != "cuda":
            return _Plain(device)
        on = gpu(task, found.index)
        return CudaGenerator(on.index, task.process.entropy)


class Generator(metaclass=_Kind):
    """What stands for torch.Generator."""


def generator_patches() -> list[Patch]:
    """(holder, attribute, replacement) of the class of generators."""
    return [(torch, "Generator", Generator), (torch._C, "Generator", Generator)]
