"""Teaches: a language model whose embedding and decoder lie on another worker, and distributed autograd over it."""

import os

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch.distributed.optim import DistributedOptimizer

WORDS, HIDDEN = 30, 8


def drawn(seed: int) -> torch.Tensor:
    """Not from the process's generator: another thread of the server may be drawing from it."""
    return torch.rand(WORDS, HIDDEN, generator=torch.Generator().manual_seed(seed))


class Embedding(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(WORDS, HIDDEN, _weight=drawn(1))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.table(words)


class Decoder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(HIDDEN, WORDS, bias=False)
        self.linear.weight = torch.nn.Parameter(drawn(2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.linear(hidden)


def parameter_rrefs(module: rpc.RRef) -> list[rpc.RRef]:
    return [rpc.RRef(p) for p in module.local_value().parameters()]


class Model(torch.nn.Module):
    def __init__(self, server: str) -> None:
        super().__init__()
        self.embedding, self.decoder = rpc.remote(server, Embedding), rpc.remote(server, Decoder)
        torch.manual_seed(3)
        self.lstm = torch.nn.LSTM(HIDDEN, HIDDEN)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        output, _ = self.lstm(self.embedding.rpc_sync().forward(words))
        return self.decoder.rpc_sync().forward(output)

    def parameter_rrefs(self) -> list[rpc.RRef]:
        there = [rpc.rpc_sync(m.owner(), parameter_rrefs, args=(m,)) for m in (self.embedding, self.decoder)]
        return [*there[0], *[rpc.RRef(p) for p in self.lstm.parameters()], *there[1]]


rank = int(os.environ["RANK"])
rpc.init_rpc(("trainer", "ps")[rank], rank=rank, world_size=2)
if rank == 0:
    model = Model("ps")
    optimizer = DistributedOptimizer(torch.optim.Adagrad, model.parameter_rrefs(), lr=0.1)
    text = torch.randint(WORDS, (10, 5), generator=torch.Generator().manual_seed(0))
    for step in range(3):
        with dist_autograd.context() as context:
            loss = torch.nn.functional.cross_entropy(model(text[:-1]).flatten(0, 1), text[1:].flatten())
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
        print(f"step {step}: loss {loss.item():.4f}")
rpc.shutdown()
