"""A thread gathers on the host, as dcp.async_save does, beside the main thread's calls on the other backend.

ranks: 2
kind: healthy
simulated: no, torch's fake backend is refused by its name; tests/device/test_two_backends.py has NCCL's
"""

import threading

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers torch's backend `fake`

dist.init_process_group("cpu:gloo,meta:fake")
rank = dist.get_rank()
here, there = torch.full((4,), float(rank)), torch.empty(1024, device="meta")
dist.all_reduce(here)
assert here.tolist() == [1.0] * 4
everybody = [None] * 2


def gather():
    for _ in range(20):
        dist.all_gather_object(everybody, rank)


thread = threading.Thread(target=gather)
thread.start()
for _ in range(100):
    dist.all_reduce(there)
thread.join()
assert everybody == [0, 1]
dist.barrier()
