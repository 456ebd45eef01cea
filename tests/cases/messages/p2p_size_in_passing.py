"""Nobody is ever blocked by it: the receiver's buffer is only half filled, and both train on.

ranks: 2
kind: p2p_size_mismatch
culprits: 0
exit: 4
"""

from tests.cases.begin import dist, rank, t, torch

for step in range(80):
    if rank == 0:
        dist.send(torch.ones(4 if step == 75 else 8), 1)  # <-
    else:
        dist.recv(torch.ones(8), 0)
    dist.all_reduce(t)
t = torch.ones(1 << 18)  # slow enough for the ring to keep the messages for seconds
for _ in range(10_000):
    dist.all_reduce(t)
print("came through", flush=True)
