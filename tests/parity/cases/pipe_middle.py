# ranks: 3
# kind: p2p_unmatched
# culprits: 1
# exit: 3
# cure: Give `range(micro)`
"""The middle stage of a pipeline runs one micro-batch less than its neighbours, and waits in the barrier."""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


def stage(micro):
    for _ in range(micro):
        x = torch.zeros(4)
        if rank > 0:
            dist.recv(x, src=rank - 1)
        if rank < world - 1:
            dist.send(x, dst=rank + 1)


stage(4 if rank != 1 or "fixed" in sys.argv else 3)
dist.barrier()  # <-
dist.destroy_process_group()
