"""The device, the process group, and a line a step, as torchtitan prints it."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist


def start() -> torch.device:
    """Join the job; NCCL where there are GPUs, else gloo."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


class Log:
    """Times the steps; *rank* prints."""

    def __init__(self, device: torch.device, tokens_per_gpu: float, rank: int = 0) -> None:
        self.device = device
        self.tokens = tokens_per_gpu
        self.prints = dist.get_rank() == rank
        self.began = self._now()

    def step(self, number: int, loss: torch.Tensor | None) -> None:
        """Call it at the end of each step, on every rank; *loss* where there is one."""
        now = self._now()
        seconds, self.began = now - self.began, now
        if not self.prints:
            return
        shown = "" if loss is None else f"  loss: {loss.item():7.4f}"
        memory = ""
        if self.device.type == "cuda":
            memory = f"  memory: {torch.cuda.max_memory_allocated() / 2**30:5.2f}GiB"
        speed = f"  tps: {self.tokens / seconds:,.0f}" if seconds else ""
        print(f"step: {number:2d}{shown}{memory}  time: {seconds:.4f}s{speed}", flush=True)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def tokens(vocab: int, seq: int, mbs: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A made-up micro-batch: what comes in and what shall come out, each [mbs, seq]."""
    text = torch.randint(vocab, (mbs, seq + 1), device=device)
    return text[:, :-1], text[:, 1:]
