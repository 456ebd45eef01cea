"""Only rank 0 evaluates once training is over."""

import torch
import torch.distributed as dist


def mean(value: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(value)
    return value / dist.get_world_size()


def main() -> None:
    dist.init_process_group("gloo")
    for _ in range(4):
        mean(torch.ones(4))
    if dist.get_rank() == 0:
        print("accuracy", mean(torch.ones(1)))
    dist.barrier()
    dist.destroy_process_group()


main()
