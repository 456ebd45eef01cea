"""One rank builds a layer less, and the weights are broadcast one by one.

ranks: 4
kind: uneven_iterations
culprits: 3
exit: 3
says: Build the same model on every rank
"""

from tests.cases.begin import FIXED, dist, rank, torch

layers = 1 if rank == 3 and not FIXED else 2
net = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(layers)))
for parameter in net.parameters():
    dist.broadcast(parameter.data, src=0)
dist.barrier()  # <-
dist.destroy_process_group()
