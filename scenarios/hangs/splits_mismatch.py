"""Teaches: all_to_all_single where what one rank sends is not what the other expects: a router of experts
that counts its tokens wrongly.
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
send = [2] * world_size
receive = [2] * world_size
if rank == 2:
    receive[0] = 3  # rank 0 sends two rows only
dist.all_to_all_single(  # <- culprit
    torch.zeros(sum(receive), 4), torch.ones(sum(send), 4), receive, send
)
