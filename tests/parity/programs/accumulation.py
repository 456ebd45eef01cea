"""Rank 1 accumulates gradients over three batches, the others over two."""

import torch
import torch.distributed as dist


def main() -> None:
    dist.init_process_group("gloo")
    every = 3 if dist.get_rank() == 1 else 2
    grad = torch.zeros(4)
    for batch in range(12):
        grad += 1
        if (batch + 1) % every == 0:
            dist.all_reduce(grad)
            grad.zero_()
    dist.barrier()
    dist.destroy_process_group()


main()
