"""Teaches: a checkpoint's thread and the main thread use one group, so that their calls pair differently by rank.
Seen in KempnerInstitute/KempnerForge 104.
"""

import sys
import threading

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
own = dist.new_group() if "cured" in sys.argv else None


def save() -> None:
    dist.broadcast(torch.zeros(4), src=0, group=own)


checkpoint = threading.Thread(target=save)
checkpoint.start()
dist.all_reduce(torch.ones(2))
checkpoint.join()
