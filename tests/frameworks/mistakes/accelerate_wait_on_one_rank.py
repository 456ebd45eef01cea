"""accelerate: rank 0 alone saves, and waits for everyone while it does."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset


def save(accelerator, model):
    accelerator.wait_for_everyone()  # <- culprit
    accelerator.unwrap_model(model).state_dict()


def main():
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=4)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    for number, (x,) in enumerate(data):
        optimizer.zero_grad()
        loss = model(x).mean()
        accelerator.backward(loss)
        optimizer.step()
        if number == 1 and accelerator.is_main_process:
            save(accelerator, model)


main()
