"""A server receives from any rank; one worker sends one message less than the other.

ranks: 3
kind: p2p_unmatched
culprits: 2
exit: 3
says: count the messages
gpus: no, NCCL has no receive from any source
"""

from tests.cases.begin import FIXED, dist, rank, torch, world

if rank == 0:
    for _ in range(2 * (world - 1)):
        dist.recv(torch.zeros(3))
else:
    for step in range(2):
        if rank == 2 and step == 1 and not FIXED:
            continue
        dist.send(torch.ones(3), dst=0)
dist.barrier()  # <-
dist.destroy_process_group()
