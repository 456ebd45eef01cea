"""pytorch-ignite: a handler evaluates an accuracy on rank 0 only; computing it reduces."""

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events
from ignite.metrics import Accuracy


def main():
    idist.initialize("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accuracy = Accuracy()

    def step(engine, x):
        out = model(x)
        optimizer.zero_grad()
        out.mean().backward()
        optimizer.step()
        accuracy.update((out.detach(), torch.zeros(len(x), dtype=torch.long)))

    trainer = Engine(step)

    @trainer.on(Events.ITERATION_COMPLETED(every=3))
    def report(engine):
        if idist.get_rank() == 0:
            print("accuracy", accuracy.compute())  # <- culprit

    trainer.run([torch.randn(4, 4) for _ in range(8)], max_epochs=1)
    idist.finalize()


main()
