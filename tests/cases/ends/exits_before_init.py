"""A rank finds no data and leaves with exit code 0 before the others meet.

ranks: 3
kind: rank_exited
culprits: 2
exit: 3
"""

import os
import sys

import torch
import torch.distributed as dist

if os.environ["RANK"] == "2" and "fixed" not in sys.argv:
    sys.exit(0)  # <-
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(2))
dist.destroy_process_group()
