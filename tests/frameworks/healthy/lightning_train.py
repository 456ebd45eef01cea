"""Lightning under torchrun: DDP, a validation loop with synchronized logging, a checkpoint."""

import sys

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        self.sizes = []

    def training_step(self, batch, index):
        xs, ys = batch
        self.sizes.append(len(xs))
        loss = nn.functional.mse_loss(self.net(xs), ys)
        self.log("train_loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def validation_step(self, batch, index):
        xs, ys = batch
        self.log("val_loss", nn.functional.mse_loss(self.net(xs), ys), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def main():
    L.seed_everything(0, verbose=False)
    x = torch.randn(40, 8)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    folder = sys.argv[1]
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=2,
        enable_progress_bar=False,
        logger=False,
        enable_model_summary=False,
        default_root_dir=folder,
        num_sanity_val_steps=1,
    )
    model = Model()
    trainer.fit(model, DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=4))
    metrics = {name: round(value.item(), 5) for name, value in sorted(trainer.callback_metrics.items())}
    print(f"rank {trainer.global_rank} of {trainer.world_size}: {metrics} {model.sizes}")
    if trainer.is_global_zero:
        print(trainer.global_step, trainer.checkpoint_callback.best_model_path != "")


if __name__ == "__main__":
    main()
