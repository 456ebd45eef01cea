# ranks: 3
# kind: p2p_unmatched
# culprits: 2
# exit: 3
# cure: count the messages
"""A server receives from any rank; one worker sends one message less than the other."""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
if rank == 0:
    for _ in range(2 * (world - 1)):
        dist.recv(torch.zeros(3))
else:
    for step in range(2):
        if rank == 2 and step == 1 and "fixed" not in sys.argv:
            continue
        dist.send(torch.ones(3), dst=0)
dist.barrier()  # <-
dist.destroy_process_group()
