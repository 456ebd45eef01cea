"""Rank 1 takes another rank for the source."""

import torch
import torch.distributed as dist


def main() -> None:
    dist.init_process_group("gloo")
    value = torch.ones(4)
    for _ in range(3):
        dist.all_reduce(value)
    dist.broadcast(value, src=1 if dist.get_rank() == 1 else 0)
    dist.barrier()
    dist.destroy_process_group()


main()
