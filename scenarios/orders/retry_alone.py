"""Teaches: each rank decides alone whether to retry, by a mark that it has seen or not: one more barrier on some.
Seen in InternLM/xtuner 1852.
"""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
store = dist.distributed_c10d._get_default_store()
is_cured = "cured" in sys.argv

if rank == 0:
    store.set("checkpoint", "1")
if is_cured:
    dist.barrier()
if not store.check(["checkpoint"]):
    dist.barrier()  # the retry
dist.all_reduce(torch.ones(1))
