# ranks: 2
# kind: p2p_size_mismatch
# culprits: 0,1
# exit: 4
# cure: Post the messages between ranks 0 and 1 in one order
"""Two isends and two irecvs of one pair, posted in opposite orders."""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
first, second = torch.zeros(4), torch.zeros(16)
if rank == 0:
    works = [dist.isend(first, 1), dist.isend(second, 1)]  # <-
elif "fixed" in sys.argv:
    works = [dist.irecv(first, 0), dist.irecv(second, 0)]
else:
    works = [dist.irecv(second, 0), dist.irecv(first, 0)]  # <-
for work in works:
    work.wait()
dist.barrier()
dist.destroy_process_group()
