"""Teaches: RPC and DDP in one program. Two trainers hold a dense layer with DDP, a parameter server the embedding.

Ranks 0 and 1 train, 2 tells them to, 3 is the parameter server.
"""

import os

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer
from torch.nn.parallel import DistributedDataParallel

NUM_EMBEDDINGS, DIM = 20, 4


class Hybrid(torch.nn.Module):
    def __init__(self, table: RemoteModule, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.table = table
        torch.manual_seed(1)
        self.dense = DistributedDataParallel(torch.nn.Linear(DIM, 2), process_group=group)

    def forward(self, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.dense(self.table.forward(indices, offsets))


def train(table: RemoteModule, rank: int) -> float:
    model = Hybrid(table, trainers)
    params = [rpc.RRef(p) for p in model.dense.parameters()] + table.remote_parameters()
    optimizer = DistributedOptimizer(torch.optim.SGD, params, lr=0.05)
    generator = torch.Generator().manual_seed(rank)
    loss = torch.zeros(())
    for _ in range(4):
        indices = torch.randint(NUM_EMBEDDINGS, (12,), generator=generator)
        target = torch.randint(2, (4,), generator=generator)
        with dist_autograd.context() as context:
            loss = torch.nn.functional.cross_entropy(model(indices, torch.arange(0, 12, 3)), target)
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
        dist.barrier(trainers)
    return float(model.dense.module.weight.detach().norm())


rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
trainers = dist.new_group([0, 1])
rpc.init_rpc(("trainer0", "trainer1", "master", "ps")[rank], rank=rank, world_size=4)
if rank == 2:
    table = RemoteModule("ps", torch.nn.EmbeddingBag, (NUM_EMBEDDINGS, DIM), {"mode": "sum"})
    running = [rpc.rpc_async(f"trainer{i}", train, args=(table, i)) for i in range(2)]
    norms = [future.wait() for future in running]
    print(f"both trainers have one dense layer: {norms[0] == norms[1]}")
rpc.shutdown()
dist.destroy_process_group()
