# ranks: 4
# kind: missing_rank
# culprits: 2
# exit: 3
# cure: Agree on `not grads`
"""A function returns before its collective on the rank that has no gradients in this step."""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()


def clip(grads):
    if not grads:
        return
    total = torch.stack([g.norm() for g in grads]).sum()
    dist.all_reduce(total)


for step in range(4):
    clip([] if rank == 2 and step == 2 and "fixed" not in sys.argv else [torch.ones(3)] * 2)
    dist.all_reduce(torch.tensor([1]))  # <-
dist.barrier()
dist.destroy_process_group()
