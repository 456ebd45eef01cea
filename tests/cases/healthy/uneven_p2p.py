"""Ranks have unlike numbers of messages, each of which is received.

ranks: 3
kind: healthy
"""

from tests.cases.begin import dist, rank, t, torch

if rank == 0:
    for n in range(5):
        dist.send(torch.ones(n + 1), 1)
    for _ in range(3):
        dist.recv(torch.ones(2), 2)
elif rank == 1:
    for n in range(5):
        dist.recv(torch.ones(n + 1), 0)
else:
    for _ in range(3):
        dist.send(torch.ones(2), 0)
dist.barrier()
dist.all_reduce(t)
dist.destroy_process_group()
