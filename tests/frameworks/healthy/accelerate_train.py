"""accelerate: prepare, gradient accumulation, gather_for_metrics over an uneven set."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(0)
    x = torch.randn(37, 8)
    y = x.sum(1, keepdim=True)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    train = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)
    test = DataLoader(TensorDataset(x, y), batch_size=4)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)
    for epoch in range(2):
        model.train()
        for xs, ys in train:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(xs), ys)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        errors = []
        for xs, ys in test:
            with torch.no_grad():
                error = (model(xs) - ys).abs()
            errors.append(accelerator.gather_for_metrics(error))
        errors = torch.cat(errors)
        accelerator.print(f"epoch {epoch}: {len(errors)} samples, mean error {errors.mean():.5f}")
    print(f"rank {accelerator.process_index} of {accelerator.num_processes}: {len(train)} batches")
    accelerator.wait_for_everyone()
    total = accelerator.reduce(torch.tensor([accelerator.process_index + 1.0]), "sum")
    accelerator.print("sum", total.item())
    accelerator.end_training()


if __name__ == "__main__":
    main()
