"""transformers: a Trainer whose callback reduces on rank 0 only."""

import os
import tempfile

import torch
import torch.distributed as dist
from transformers import Trainer, TrainerCallback, TrainingArguments

os.environ.setdefault("HF_HUB_OFFLINE", "1")


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x=None, labels=None):
        out = self.layer(x).squeeze(-1)
        return {"loss": ((out - labels) ** 2).mean(), "logits": out}


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, i):
        return {"x": torch.full((4,), float(i % 3)), "labels": torch.tensor(1.0)}


class Report(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.is_world_process_zero and state.global_step == 2:
            dist.all_reduce(torch.ones(1))  # <- culprit


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=4,
            max_steps=4,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            logging_strategy="no",
        )
        Trainer(Model(), arguments, train_dataset=Data(), callbacks=[Report()]).train()
