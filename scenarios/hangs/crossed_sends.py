"""Teaches: two ranks send to each other first and receive afterwards: neither send ends."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
if rank < 2:
    peer = 1 - rank
    dist.send(torch.ones(4), dst=peer)  # <- culprit
    dist.recv(torch.zeros(4), src=peer)
