"""What came from any source does not count among the messages from one rank.

ranks: 3
kind: healthy
"""

from tests.cases.begin import dist, rank, torch

if rank == 0:
    for _ in range(2):
        dist.recv(torch.zeros(1))
else:
    dist.send(torch.ones(1), 0)
dist.barrier()
if rank == 0:
    dist.recv(torch.zeros(4), src=1)
elif rank == 1:
    dist.send(torch.ones(4), 0)
dist.barrier()
