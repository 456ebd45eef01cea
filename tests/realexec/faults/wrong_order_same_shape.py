# ranks: 3
# kind: wrong_order
# culprits: 2
# exit: 4

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
world = dist.get_world_size()
t = torch.ones(8)
for _ in range(3):
    dist.all_reduce(t)
import time

grads = {"a": torch.full((4,), 1.0), "b": torch.full((4,), 2.0)}


def reduce_a():
    dist.all_reduce(grads["a"])


def reduce_b():
    dist.all_reduce(grads["b"])


for step in range(5):
    order = [reduce_a, reduce_b]
    if rank == 2 and step == 3:
        order.reverse()
    for reduce in order:
        reduce()
dist.barrier()
time.sleep(1.5)
dist.barrier()
