"""Teaches: a group of some of the ranks, and a collective that only they take part in."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()

everyone = torch.ones(1)
dist.all_reduce(everyone, op=dist.ReduceOp.SUM)

# new_group is called by all ranks, members or not.
pair = dist.new_group([0, 1])
tensor = torch.full((2,), float(rank + 1))
if rank in (0, 1):
    dist.all_reduce(tensor, op=dist.ReduceOp.PRODUCT, group=pair)

print(f"rank {rank}: everyone {everyone.item()}, pair {tensor.tolist()}")
dist.destroy_process_group()
