# ranks: 3
# kind: uneven_iterations
# culprits: 0
# exit: 3
"""Rank 0 runs out of memory in backward, logs it and skips the step, which has a clip of the gradients' norm."""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()


def forward_backward(step):
    if rank == 0 and step == 3 and "fixed" not in sys.argv:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 12.00 GiB")
    grad = torch.ones(64)
    dist.all_reduce(grad)
    norm = grad.norm()
    dist.all_reduce(norm, op=dist.ReduceOp.MAX)


for step in range(6):
    try:
        forward_backward(step)
    except torch.OutOfMemoryError as error:
        print("skipping batch:", error)
dist.barrier()  # <-
dist.destroy_process_group()
