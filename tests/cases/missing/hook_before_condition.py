"""A gradient that one rank lacks, whose hook reduces; behind the pass all meet a condition of their own, as before.

ranks: 3
kind: missing_rank
culprits: 1
exit: 3
says: enter the loss on every rank
"""

from tests.cases.begin import FIXED, dist, nn, rank, torch

torch.manual_seed(0)
base, head = nn.Linear(4, 4), nn.Linear(4, 4)


def reduced(gradient: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(gradient)
    return gradient


head.weight.register_hook(reduced)
for step in range(6):
    hidden = base(torch.ones(2, 4))
    loss = (hidden if rank == 1 and step == 3 and not FIXED else head(hidden)).sum()
    loss.backward()
    if not torch.isnan(loss):
        dist.broadcast(torch.ones(1), 0)  # <-
dist.destroy_process_group()
