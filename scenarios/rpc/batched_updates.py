"""Teaches: a parameter server that answers all trainers at once, when the last has come: async_execution."""

import os
import threading

import torch
import torch.distributed.rpc as rpc


class ParameterServer:
    def __init__(self, num_trainers: int) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.num_trainers = num_trainers
        self.num_updates = 0
        self.lock = threading.Lock()
        self.updated: torch.futures.Future = torch.futures.Future()
        for p in self.model.parameters():
            p.grad = torch.zeros_like(p)

    def get_model(self) -> torch.nn.Module:
        return self.model

    @staticmethod
    @rpc.functions.async_execution
    def update_and_fetch(server: rpc.RRef, grads: list[torch.Tensor]) -> torch.futures.Future:
        self = server.local_value()
        with self.lock:
            for p, grad in zip(self.model.parameters(), grads, strict=False):
                p.grad += grad
            self.num_updates += 1
            waiting = self.updated
            if self.num_updates == self.num_trainers:
                for p in self.model.parameters():
                    p.grad /= self.num_trainers
                self.num_updates = 0
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=False)
                self.updated = torch.futures.Future()
                waiting.set_result(self.model)
        return waiting


def train(server: rpc.RRef, number: int) -> float:
    model = server.rpc_sync().get_model()
    generator = torch.Generator().manual_seed(number)
    loss = torch.zeros(())
    for _ in range(3):
        inputs = torch.rand(8, 4, generator=generator)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).pow(2).mean()
        grads = torch.autograd.grad(loss, list(model.parameters()))
        model = rpc.rpc_sync(server.owner(), ParameterServer.update_and_fetch, args=(server, list(grads)))
    return float(loss.detach())


rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
rpc.init_rpc("ps" if rank == 0 else f"trainer{rank}", rank=rank, world_size=size)
if rank == 0:
    server = rpc.RRef(ParameterServer(size - 1))
    losses = [rpc.rpc_async(f"trainer{i}", train, args=(server, i)) for i in range(1, size)]
    for number, future in enumerate(losses, start=1):
        print(f"trainer {number}: loss {future.wait():.4f}")
rpc.shutdown()
