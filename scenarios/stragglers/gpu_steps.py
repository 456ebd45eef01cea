"""Teaches: a training on GPUs of which one is slower; every step takes as long as that GPU needs."""

import os

import torch
import torch.distributed as dist

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8192, 8192, device="cuda"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _step in range(4):
    optimizer.zero_grad()
    model(torch.ones(2048, 8192, device="cuda")).sum().backward()
    optimizer.step()
if dist.get_rank() == 0:
    print("trained")
dist.destroy_process_group()
