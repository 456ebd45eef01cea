"""A rank has a default group of its own before it joins the job's.

ranks: 2
kind: healthy
"""

import os

import torch
import torch.distributed as dist

if os.environ["RANK"] == "0":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
