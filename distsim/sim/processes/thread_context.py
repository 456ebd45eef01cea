"""What makes an OS thread a thread of a simulated process, as far as torch is concerned."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from distsim.sim.c10d.backend import adopt_groups
from distsim.sim.device.cpu import CpuRates
from distsim.sim.device.dispatch import ComputeMode
from distsim.sim.isolation.process import SimProcess, require_task

__all__ = ["thread_of"]

_set_num_threads = torch.set_num_threads


@contextlib.contextmanager
def thread_of(process: SimProcess) -> Iterator[None]:
    """Make the calling thread a thread of *process* as far as torch is concerned. In the end torch's
    thread-local state holds nothing of Python's: what it held would be dropped while the thread dies."""
    task = require_task()
    _set_num_threads(1)
    torch._C._set_multithreading_enabled(False)
    adopt_groups(process)
    cpu, faults = process.world.cpu, process.world.faults
    slowed = faults.compute_s if faults.are_planted else None
    if process.accelerators is not None:
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") makes its values on the host
    try:
        rates = CpuRates(cpu.flops_per_s, cpu.memory_bytes_per_s, cpu.op_overhead_s, slowed, process.world.keeps_slices)
        with ComputeMode(task, rates):
            yield
    finally:
        torch._C._distributed_c10d._unregister_all_process_groups()
