"""Teaches: one rank forgot its autocast: float32 where the others send bfloat16."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
dtype = torch.float32 if rank == 3 else torch.bfloat16
dist.all_reduce(torch.ones(16, dtype=dtype))  # <- culprit
