"""DDP's join() covers the model's own collectives, not the metric reduced inside of it: rank 1 has fewer batches.

ranks: 3
kind: missing_rank
culprits: 1
exit: 3
says: out of join()
"""

from torch.nn.parallel import DistributedDataParallel as DDP

from tests.cases.begin import FIXED, dist, rank, torch

model = DDP(torch.nn.Linear(8, 2))
batches = 3 if rank == 1 and not FIXED else 5
with model.join():  # <-
    for _ in range(batches):
        loss = model(torch.ones(4, 8)).sum()
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
dist.barrier()
dist.destroy_process_group()
