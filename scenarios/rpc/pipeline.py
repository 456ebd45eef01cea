"""Teaches: a model in two halves on two workers, fed with micro-batches: pipeline parallelism over RPC."""

import os
import threading

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch.distributed.optim import DistributedOptimizer
import itertools


class Half(torch.nn.Module):
    def __init__(self, sizes: tuple[int, ...], seed: int) -> None:
        super().__init__()
        self.lock = threading.Lock()
        torch.manual_seed(seed)
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))

    def forward(self, x_rref: rpc.RRef) -> torch.Tensor:
        x = x_rref.to_here()
        with self.lock:
            return torch.relu(self.layers(x))

    def parameter_rrefs(self) -> list[rpc.RRef]:
        return [rpc.RRef(p) for p in self.parameters()]


class Pipeline:
    def __init__(self, split: int) -> None:
        self.split = split
        self.first = rpc.remote("worker1", Half, args=((8, 16, 16), 1))
        self.second = rpc.remote("worker2", Half, args=((16, 16, 4), 2))

    def __call__(self, batch: torch.Tensor) -> torch.Tensor:
        outputs = []
        for part in batch.split(self.split):
            middle = self.first.remote().forward(rpc.RRef(part))
            outputs.append(self.second.rpc_async().forward(middle))
        return torch.cat(torch.futures.wait_all(outputs))

    def parameter_rrefs(self) -> list[rpc.RRef]:
        return [*self.first.rpc_sync().parameter_rrefs(), *self.second.rpc_sync().parameter_rrefs()]


rank = int(os.environ["RANK"])
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3)
if rank == 0:
    model = Pipeline(split=4)
    optimizer = DistributedOptimizer(torch.optim.SGD, model.parameter_rrefs(), lr=0.1)
    torch.manual_seed(0)
    batch, target = torch.rand(16, 8), torch.rand(16, 4)
    for step in range(3):
        with dist_autograd.context() as context:
            loss = torch.nn.functional.mse_loss(model(batch), target)
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
        print(f"step {step}: loss {loss.item():.4f}")
rpc.shutdown()
