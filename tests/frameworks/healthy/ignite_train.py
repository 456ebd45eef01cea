"""pytorch-ignite: engines, handlers and metrics inside ignite.distributed.Parallel."""

import ignite.distributed as idist
import torch
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import EarlyStopping
from ignite.metrics import Loss, MeanAbsoluteError, RunningAverage
from torch import nn
from torch.utils.data import TensorDataset


def training(local_rank, config):
    torch.manual_seed(0)
    x = torch.randn(36, 8)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    loader = idist.auto_dataloader(data, batch_size=8, shuffle=True)
    model = idist.auto_model(nn.Linear(8, 1))
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=config["lr"]))
    trainer = create_supervised_trainer(model, optimizer, nn.functional.mse_loss)
    RunningAverage(output_transform=lambda loss: loss).attach(trainer, "loss")
    metrics = {"mae": MeanAbsoluteError(), "mse": Loss(nn.functional.mse_loss)}
    evaluator = create_supervised_evaluator(model, metrics=metrics)
    stop = EarlyStopping(5, lambda engine: -engine.state.metrics["mse"], trainer)
    evaluator.add_event_handler(Events.COMPLETED, stop)

    @trainer.on(Events.EPOCH_STARTED)
    def shuffle(engine):
        loader.sampler.set_epoch(engine.state.epoch)

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate(engine):
        evaluator.run(loader)
        found = {name: round(value, 5) for name, value in sorted(evaluator.state.metrics.items())}
        print(f"rank {idist.get_rank()} epoch {engine.state.epoch}: {found} {engine.state.metrics['loss']:.5f}")

    trainer.run(loader, max_epochs=config["epochs"])
    print("sum", idist.all_reduce(idist.get_rank() + 1.0), idist.all_gather(f"r{idist.get_rank()}"))


def main():
    with idist.Parallel(backend="gloo") as parallel:
        parallel.run(training, {"lr": 0.05, "epochs": 2})


if __name__ == "__main__":
    main()
