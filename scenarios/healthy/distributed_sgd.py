"""Teaches: data parallel training with nothing but all_reduce.

A data set is cut into one part for each rank, every rank computes the gradients of its part, and the
gradients are averaged by hand. The script starts its own ranks with torch.multiprocessing and needs
no launcher: `python distributed_sgd.py`, or `distsim run --on ethernet-cpu:2 distributed_sgd.py`.
The data are made here: points in two spirals, to be told apart.
"""

import math
import os
from random import Random

import torch
import torch.distributed as dist
from torch import multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

WORLD_SIZE = 4
EPOCHS = 3


class Part(Dataset):
    """Some items of a data set, by their numbers."""

    def __init__(self, data: Dataset, indices: list[int]) -> None:
        self.data = data
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int):
        return self.data[self.indices[index]]


class Partitioner:
    """Cuts a data set into parts of the given shares, in an order that all ranks agree on."""

    def __init__(self, data: Dataset, shares: list[float], seed: int = 1234) -> None:
        order = list(range(len(data)))
        Random(seed).shuffle(order)
        self.data = data
        self.parts = []
        for share in shares:
            count = int(share * len(data))
            self.parts.append(order[:count])
            order = order[count:]

    def part(self, number: int) -> Part:
        return Part(self.data, self.parts[number])


def spirals(count: int = 512) -> TensorDataset:
    turn = torch.linspace(0.5, 3 * math.pi, count // 2)
    arms = [torch.stack([turn * torch.cos(turn + a), turn * torch.sin(turn + a)], 1) for a in (0.0, math.pi)]
    return TensorDataset(torch.cat(arms) / 10, torch.arange(2).repeat_interleave(count // 2))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(2, 32)
        self.out = nn.Linear(32, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.log_softmax(self.out(torch.tanh(self.hidden(x))), dim=1)


def average_gradients(model: nn.Module) -> None:
    size = float(dist.get_world_size())
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
        parameter.grad /= size


def run(rank: int, world_size: int) -> None:
    torch.manual_seed(1234)
    part = Partitioner(spirals(), [1 / world_size] * world_size).part(rank)
    # A world of twice the size takes half the batch: the same steps as a whole.
    loader = DataLoader(part, batch_size=128 // world_size, shuffle=True)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    for epoch in range(EPOCHS):
        total = 0.0
        for x, target in loader:
            optimizer.zero_grad()
            loss = nn.functional.nll_loss(model(x), target)
            total += loss.item()
            loss.backward()
            average_gradients(model)
            optimizer.step()
        print(f"rank {rank}, epoch {epoch}: {total / len(loader):.4f}", flush=True)


def start(rank: int, world_size: int) -> None:
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = os.environ.get("TUTORIAL_PORT", "29555")
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    run(rank, world_size)
    dist.destroy_process_group()


if __name__ == "__main__":
    processes = []
    mp.set_start_method("spawn")
    for rank in range(WORLD_SIZE):
        process = mp.Process(target=start, args=(rank, WORLD_SIZE))
        process.start()
        processes.append(process)
    for process in processes:
        process.join()
    assert all(process.exitcode == 0 for process in processes)
