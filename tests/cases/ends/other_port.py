"""Rank 1 calls another port than the others, where nobody is.

ranks: 3
kind: never_joined
culprits: 1
exit: 3
hang_after: 4
suite: check
says: 127.0.0.1:
group: no, real ranks have none before it is made
gpus: no, it has no tensor
"""

import os

import torch.distributed as dist

if os.environ["RANK"] == "1":
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 7)
dist.init_process_group("gloo")
