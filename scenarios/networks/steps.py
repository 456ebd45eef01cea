"""Teaches: five training steps whose gradients cross the network; the files beside it break the network under them."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
gradient = torch.ones(1 << 20)
for _step in range(5):
    torch.ones(128, 128) @ torch.ones(128, 128)
    dist.all_reduce(gradient)  # <- step
if rank == 0:
    print(f"done, {gradient[0].item():g}")
dist.destroy_process_group()
