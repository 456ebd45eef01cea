# ranks: 3
# kind: rank_exited
# culprits: 2
# exit: 3
"""A rank finds no data and leaves with exit code 0 before the others meet."""

import sys

import torch
import torch.distributed as dist

if "fixed" not in sys.argv:
    import os

    if os.environ["RANK"] == "2":
        sys.exit(0)  # <-
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(2))
dist.destroy_process_group()
