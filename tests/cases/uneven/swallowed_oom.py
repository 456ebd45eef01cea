"""Rank 0 runs out of memory in backward, logs it and skips the step, which has a clip of the gradients' norm.

ranks: 3
kind: uneven_iterations
culprits: 0
exit: 3
"""

from tests.cases.begin import FIXED, dist, rank, torch


def forward_backward(step):
    if rank == 0 and step == 3 and not FIXED:
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
