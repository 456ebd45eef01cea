"""Teaches: DistributedDataParallel over two linear layers, with ranks started by mp.spawn.

Both layers are used, so every parameter gets a gradient. Its sister that forgets one is
scenarios/hangs/ddp_unused_parameter.py.
"""

import os

import torch
import torch.distributed as dist
from torch import multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(10, 10, bias=False)
        self.b = nn.Linear(10, 1, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a = self.a(x)
        return a, self.b(x)


def worker(rank: int, world_size: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = DDP(TwoLayers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(rank)
    for step in range(4):
        a, b = model(torch.randn(20, 10, generator=generator))
        loss = a.pow(2).mean() + (b - 1).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"rank {rank}, step {step}: loss {loss.item():.5f}", flush=True)
    total = sum(p.sum().item() for p in model.parameters())
    print(f"rank {rank}: weights sum to {total:.5f}", flush=True)
    del model  # before the group: see ddp_mlp.py
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = os.environ.get("TUTORIAL_PORT", "29555")
    mp.spawn(worker, nprocs=2, args=(2,), join=True)
