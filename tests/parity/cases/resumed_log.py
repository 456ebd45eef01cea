# ranks: 4
# kind: missing_rank
# culprits: 3
# exit: 3
"""As resumed, four ranks, with a log of the loss every second step and a broadcast of the learning rate every fifth."""

import sys

import torch
import torch.distributed as dist


def log(loss):
    dist.reduce(loss, dst=0)


def train(first):
    for step in range(first, 20):
        grads = torch.ones(64)
        dist.all_reduce(grads)  # <-
        if step % 2 == 0:
            log(torch.ones(1))
        if step % 5 == 0:
            lr = torch.tensor([0.1])
            dist.broadcast(lr, src=0)


dist.init_process_group("gloo")
train(11 if dist.get_rank() == 3 and "fixed" not in sys.argv else 10)
dist.destroy_process_group()
