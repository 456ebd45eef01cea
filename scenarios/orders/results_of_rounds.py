"""Teaches: results "from anybody" of the next round are taken for this round's.
Seen in OpenChemistry/stempy 292 and 293.
"""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
is_cured = "cured" in sys.argv

for step in range(2):
    tag = step if is_cured else 0
    if rank == 0:
        for _ in range(2):
            result = torch.zeros(1)
            dist.recv(result, tag=tag)
            assert int(result) == step, f"round {step} takes a result of round {int(result)}"
    else:
        dist.send(torch.tensor([float(step)]), 0, tag=tag)
