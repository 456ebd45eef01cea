"""Rank 1 reduces in half precision."""

import torch
import torch.distributed as dist


def main() -> None:
    dist.init_process_group("gloo")
    value = torch.ones(4)
    for _ in range(3):
        dist.all_reduce(value)
    if dist.get_rank() == 1:
        value = value.half()
    dist.all_reduce(value)
    dist.destroy_process_group()


main()
