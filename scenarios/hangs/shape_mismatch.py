"""Teaches: the last batch is smaller on one rank. gloo ends the process that *receives* with SIGABRT; the
culprit may go on.
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
batch = 8 if rank != 1 else 5  # a dataset that the world size does not divide
activations = torch.ones(batch, 16)
dist.all_reduce(activations)  # <- culprit
