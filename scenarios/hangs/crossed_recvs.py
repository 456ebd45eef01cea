"""Teaches: two ranks both receive first. Unlike crossed sends, no buffering can save it."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
if rank < 2:
    peer = 1 - rank
    dist.recv(torch.zeros(4), src=peer)  # <- culprit
    dist.send(torch.ones(4), dst=peer)
