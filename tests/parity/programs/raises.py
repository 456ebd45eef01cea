"""Rank 1 meets a bad sample and raises."""

import torch
import torch.distributed as dist


def load(number: int) -> torch.Tensor:
    if number == 3 and dist.get_rank() == 1:
        raise ValueError("bad sample 3")
    return torch.ones(4)


def main() -> None:
    dist.init_process_group("gloo")
    for number in range(5):
        grad = load(number)
        dist.all_reduce(grad)
    dist.destroy_process_group()


main()
