"""Functions of torch that were something else before the guard came stay so.

ranks: 2
kind: healthy
guard: check
"""

import functools
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

import distsim.debug

dist.init_process_group("gloo")

distsim.debug.remove()
made = []
with (
    mock.patch.object(c10d, "barrier", made.append),
    mock.patch.object(c10d, "broadcast", functools.partial(c10d.broadcast)),
    mock.patch.object(c10d, "batch_isend_irecv", functools.partial(c10d.batch_isend_irecv)),
):
    distsim.debug.install("check")
    c10d.barrier("mine")
    for _ in range(5):
        one = torch.ones(1)
        dist.all_reduce(one)
        c10d.broadcast(one, 0)
        assert one.item() == 2
assert made == ["mine"]
dist.barrier()
dist.destroy_process_group()
