"""Teaches: a group of two backends. A rank without a batch still has its metric on the CPU: its call goes to gloo and
that of the others to NCCL, and they never meet.
"""

import os

import torch
import torch.distributed as dist

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("cpu:gloo,cuda:nccl")
batches = 0 if dist.get_rank() == 5 else 2
total = torch.zeros(1)
for _ in range(batches):
    total = total.to("cuda") + torch.ones(1, device="cuda")
dist.all_reduce(total)  # <- culprit
