"""Rank 2 raises before init_process_group.

ranks: 3
kind: rank_raised
culprits: 2
exit: 1
"""

import os

import torch.distributed as dist

if os.environ["RANK"] == "2":
    raise RuntimeError("no data")  # <-
dist.init_process_group("gloo")
