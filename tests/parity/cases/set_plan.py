# ranks: 3
# kind: shape_mismatch
# culprits: 1
# exit: 4
"""The order of buckets comes from a set of strings: it is another on rank 1 (as if PYTHONHASHSEED differed)."""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
sizes = {"embed": 32, "head": 8, "norm": 4, "mlp": 16}
order = ["norm", "embed", "mlp", "head"] if rank == 1 and "fixed" not in sys.argv else ["embed", "head", "mlp", "norm"]
for _ in range(2):
    for name in order:
        dist.all_reduce(torch.ones(sizes[name]))  # <-
dist.destroy_process_group()
