"""A function returns before its collective on the rank that has no gradients in this step.

ranks: 4
kind: missing_rank
culprits: 2
exit: 3
says: Agree on `not grads`
"""

from tests.cases.begin import FIXED, dist, rank, torch


def clip(grads):
    if not grads:
        return
    total = torch.stack([g.norm() for g in grads]).sum()
    dist.all_reduce(total)


for step in range(4):
    clip([] if rank == 2 and step == 2 and not FIXED else [torch.ones(3)] * 2)
    dist.all_reduce(torch.tensor([1]))  # <-
dist.barrier()
dist.destroy_process_group()
