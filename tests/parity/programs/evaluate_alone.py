"""Only rank 0 evaluates, through the function that training uses."""

import torch
import torch.distributed as dist


def mean(value: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(value)
    return value / dist.get_world_size()


def train_step() -> None:
    mean(torch.ones(4))


def evaluate() -> None:
    mean(torch.ones(4))


def main() -> None:
    dist.init_process_group("gloo")
    for step in range(6):
        train_step()
        if step == 3 and dist.get_rank() == 0:
            evaluate()
    dist.barrier()
    dist.destroy_process_group()


main()
