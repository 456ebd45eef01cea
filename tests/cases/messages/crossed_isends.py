"""Two isends and two irecvs of one pair, posted in opposite orders.

ranks: 2
kind: p2p_size_mismatch
culprits: 0, 1
exit: 4
says: Post the messages between ranks 0 and 1 in one order
"""

from tests.cases.begin import FIXED, dist, rank, torch

first, second = torch.zeros(4), torch.zeros(16)
if rank == 0:
    works = [dist.isend(first, 1), dist.isend(second, 1)]  # <-
elif FIXED:
    works = [dist.irecv(first, 0), dist.irecv(second, 0)]
else:
    works = [dist.irecv(second, 0), dist.irecv(first, 0)]  # <-
for work in works:
    work.wait()
dist.barrier()
dist.destroy_process_group()
