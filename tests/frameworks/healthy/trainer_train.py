"""transformers' Trainer: a tiny Llama, evaluation with metrics, a checkpoint and a resumed run."""

import os
import sys

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments


class Words(Dataset):
    def __init__(self, count):
        generator = torch.Generator().manual_seed(1)
        self.rows = torch.randint(0, 64, (count, 12), generator=generator)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Show(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and logs:
            kept = {k: round(v, 4) for k, v in sorted(logs.items()) if k in ("loss", "eval_loss", "eval_count")}
            print(state.global_step, kept)


def count(prediction):
    return {"count": float(np.prod(prediction.label_ids.shape))}


def main():
    folder = sys.argv[1]
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    torch.manual_seed(0)
    for steps in (4, 6):
        arguments = TrainingArguments(
            folder,
            use_cpu=True,
            max_steps=steps,
            per_device_train_batch_size=2,
            per_device_eval_batch_size=2,
            logging_steps=2,
            eval_strategy="steps",
            eval_steps=2,
            save_steps=4,
            report_to=[],
            disable_tqdm=True,
            seed=3,
            dataloader_num_workers=0,
        )
        trainer = Trainer(
            LlamaForCausalLM(config),
            arguments,
            train_dataset=Words(24),
            eval_dataset=Words(7),
            compute_metrics=count,
            callbacks=[Show()],
        )
        trainer.pop_callback(next(c for c in trainer.callback_handler.callbacks if "Printer" in type(c).__name__))
        trainer.train(resume_from_checkpoint=steps == 6)
    weights = sum(p.detach().double().abs().sum().item() for p in trainer.model.parameters())
    print(f"rank {arguments.process_index} of {arguments.world_size}: {weights:.5f}")
    if arguments.process_index == 0:
        print(sorted(name for name in os.listdir(folder) if name.startswith("checkpoint")))


if __name__ == "__main__":
    main()
