"""Teaches: a send that nobody takes. gloo's send waits for its recv, however small the message."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
if rank == 0:
    dist.send(torch.ones(4), dst=3)  # <- waits
