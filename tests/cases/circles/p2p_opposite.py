"""Two stages exchange activation and gradient: both receive first in the second round.

ranks: 2
kind: deadlock_cycle
culprits: 0, 1
exit: 3
"""

from tests.cases.begin import FIXED, dist, rank, torch

peer = 1 - rank
send, recv = torch.ones(64), torch.zeros(64)
for step in range(3):
    if rank == 0 and (step < 2 or FIXED):
        dist.send(send, peer)
        dist.recv(recv, peer)
    else:
        dist.recv(recv, peer)  # <-
        dist.send(send, peer)
dist.destroy_process_group()
