"""Rank 1 stops early by its own loss; the others go on."""

import torch
import torch.distributed as dist


def main() -> None:
    dist.init_process_group("gloo")
    for epoch in range(5):
        loss = torch.ones(1)
        dist.all_reduce(loss)
        dist.broadcast(loss, src=0)
        if dist.get_rank() == 1 and epoch == 2:
            break
    dist.destroy_process_group()


main()
