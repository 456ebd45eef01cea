# ranks: 3
# kind: rank_raised
# culprits: 1
# exit: 1

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
t = torch.ones(8)


def total(tensor):
    dist.all_reduce(tensor)  # as in the steps before: known, but an exception is on its way  # <-


def report():
    total(t)


for step in range(4):
    try:
        if rank == 1 and step == 3:
            raise ValueError("no batch")
        dist.broadcast(t, 0)
    finally:
        report()
