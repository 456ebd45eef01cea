"""Teaches: a gradient reduced in the background, and written to before the call was waited for."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
gradient = torch.ones(1 << 16)
work = dist.all_reduce(gradient, async_op=True)  # <- culprit
if rank == 1:
    gradient.zero_()  # too early: the call still has the buffer
work.wait()
dist.barrier()
