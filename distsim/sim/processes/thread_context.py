"""What makes an OS thread a thread of a simulated process, as far as torch is concerned."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from distsim.sim.c10d.backend import adopt_groups
from distsim.sim.device.cpu import CpuRates
from distsim.sim.device.dispatch import ComputeMode
from distsim.sim.isolation.process import SimProcess, require_task
from distsim.torch_compat.device import SET_ONLY_LIFT_CPU_TENSORS
from distsim.torch_compat.groups import UNREGISTER_ALL_PROCESS_GROUPS
from distsim.torch_compat.works import SET_MULTITHREADING_ENABLED

__all__ = ["thread_of"]

_set_only_lift_cpu_tensors = SET_ONLY_LIFT_CPU_TENSORS.get()
_unregister_all_process_groups = UNREGISTER_ALL_PROCESS_GROUPS.get()
_set_multithreading_enabled = SET_MULTITHREADING_ENABLED.get()

_set_num_threads = torch.set_num_threads


@contextlib.contextmanager
def thread_of(process: SimProcess) -> Iterator[None]:
    """Make the calling thread a thread of *process* as far as torch is concerned. In the end torch's
    thread-local state holds nothing of Python's: what it held would be dropped while the thread dies."""
    task = require_task()
    _set_num_threads(1)
    _set_multithreading_enabled(False)
    adopt_groups(process)
    cpu, faults = process.world.cpu, process.world.faults
    slowed = faults.compute_s if faults.are_planted else None
    if process.accelerators is not None:
        _set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") makes its values on the host
    try:
        rates = CpuRates(cpu.flops_per_s, cpu.memory_bytes_per_s, cpu.op_overhead_s, slowed, process.world.keeps_slices)
        with ComputeMode(task, rates):
            yield
    finally:
        _unregister_all_process_groups()
