"""Teaches: the sum that every rank ends up with; one flipped bit makes it differ from rank to rank."""

import torch
import torch.distributed as dist


def total() -> float:
    """Reduce twice, answer the first element."""
    dist.init_process_group("gloo")
    tensor = torch.full((4,), float(dist.get_rank() + 1))
    for _ in range(2):
        dist.all_reduce(tensor)  # <- culprit
    return tensor[0].item()
