# ranks: 4
# kind: uneven_iterations
# culprits: 1
# exit: 3
# cure: Skip the round on all ranks or on none: all_reduce whether any rank does. `batch is None`
"""A collate function gives None for a batch of broken samples, on one rank."""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
batches = [torch.ones(2) for _ in range(5)]
if rank == 1 and "fixed" not in sys.argv:
    batches[2] = None
for batch in batches:
    if batch is None:
        continue
    dist.all_reduce(batch)
dist.barrier()  # <-
dist.destroy_process_group()
