# ranks: 4
# kind: shape_mismatch
# culprits: 1
# exit: 4
# cure: `tied.intersection([name])` at
"""One rank goes past a tied weight: its next broadcast meets the one that the others make of this."""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
parameters = {f"layer.{i}": torch.ones(4 + i) for i in range(5)}
tied = {"layer.3"} if rank == 1 and "fixed" not in sys.argv else set()
for name, weight in parameters.items():
    if tied.intersection([name]):
        continue
    dist.broadcast(weight, src=1)  # <-
dist.barrier()
dist.destroy_process_group()
