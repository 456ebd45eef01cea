"""Rank 1 leaves a step early because its loss is not finite."""

import torch
import torch.distributed as dist


def step(loss: torch.Tensor) -> None:
    if not torch.isfinite(loss):
        return
    grad = torch.ones(4) * loss
    dist.all_reduce(grad)


def main() -> None:
    dist.init_process_group("gloo")
    for number in range(5):
        bad = number == 2 and dist.get_rank() == 1
        step(torch.tensor(float("nan") if bad else 1.0))
        total = torch.ones(1)
        dist.all_reduce(total)
    dist.destroy_process_group()


main()
