"""Teaches: a job that has not begun yet; the files beside it keep some ranks from the rendezvous."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")  # <- waits
tensor = torch.ones(1)
dist.all_reduce(tensor)
print(f"joined, {tensor.item():g}")
