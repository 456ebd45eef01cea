"""A message is sent before a barrier and received after it.

ranks: 2
kind: healthy
"""

from tests.cases.begin import dist, rank, torch

if rank == 0:
    work = dist.isend(torch.ones(4), 1)
    dist.barrier()
    work.wait()
else:
    dist.barrier()
    dist.recv(torch.ones(4), 0)
dist.destroy_process_group()
