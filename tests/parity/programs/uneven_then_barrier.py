"""Rank 1 has one batch less than the others, and a barrier comes after the loop."""

import torch
import torch.distributed as dist


def train(batches: int) -> None:
    weight = torch.ones(4)
    for _ in range(batches):
        grad = torch.ones(4)
        dist.all_reduce(grad)
        weight -= 0.1 * grad


def main() -> None:
    dist.init_process_group("gloo")
    train(5 if dist.get_rank() == 1 else 6)
    dist.barrier()
    dist.destroy_process_group()


main()
