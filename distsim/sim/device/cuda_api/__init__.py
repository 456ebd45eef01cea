"""torch.cuda, torch.accelerator and related modules on simulated GPUs.

The functions and base classes that torch's C++ provides (`torch._C._cuda_*`) are replaced, so that torch's own
Python runs on them unchanged; a function of torch.cuda itself is replaced only where that is not possible. A thread
that belongs to no rank gets torch's own answers. `tensors.py` detects ranks; each other file has one subject.
"""

from __future__ import annotations

from distsim.sim.device.cuda_api.compiled import (
    compiled_patches,
    fake_patches,
    give_back_kernels,
    give_back_warning,
    register_kernels,
)
from distsim.sim.device.cuda_api.devices import current_patches, device_patches
from distsim.sim.device.cuda_api.memory import checkpoint_patches, give_back_dcp, memory_patches, time_dcp
from distsim.sim.device.cuda_api.streams import graph_patches
from distsim.sim.device.cuda_api.tensors import class_patches, tensor_patches
from distsim.sim.isolation.modules.patch_table import Patch

__all__ = ["cuda_patches", "give_back_dcp", "give_back_kernels", "give_back_warning", "register_kernels", "time_dcp"]


def cuda_patches() -> list[Patch]:
    """Return patches (holder, attribute, replacement) for everything."""
    return [
        *current_patches(),
        *memory_patches(),
        *device_patches(),
        *class_patches(),
        *tensor_patches(),
        *compiled_patches(),
        *graph_patches(),
        *fake_patches(),
        *checkpoint_patches(),
    ]
