# ranks: 3
# kind: p2p_unmatched
# culprits: 2
# exit: 3

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
world = dist.get_world_size()
t = torch.ones(8)
for _ in range(3):
    dist.all_reduce(t)
ops = [dist.P2POp(dist.isend, t, (rank + 1) % world), dist.P2POp(dist.irecv, t.clone(), (rank - 1) % world)]
if rank == 2:
    ops = ops[1:]
for work in dist.batch_isend_irecv(ops):
    work.wait()
dist.barrier()  # <-
