"""Rank 1 takes the branch that broadcasts, the others the one that reduces."""

import torch
import torch.distributed as dist


def main() -> None:
    dist.init_process_group("gloo")
    value = torch.ones(4)
    for _ in range(3):
        dist.all_reduce(value)
    if dist.get_rank() == 1:
        dist.broadcast(value, src=0)
    else:
        dist.all_reduce(value)
    dist.barrier()
    dist.destroy_process_group()


main()
