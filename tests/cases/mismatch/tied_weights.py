"""One rank goes past a tied weight: its next broadcast meets the one that the others make of this.

ranks: 4
kind: shape_mismatch
culprits: 1
exit: 4
says: `tied.intersection([name])` at
gpus: no, the host is ahead of its kernels: later calls show that one was left out
"""

from tests.cases.begin import FIXED, dist, rank, torch

parameters = {f"layer.{i}": torch.ones(4 + i) for i in range(5)}
tied = {"layer.3"} if rank == 1 and not FIXED else set()
for name, weight in parameters.items():
    if tied.intersection([name]):
        continue
    dist.broadcast(weight, src=1)  # <-
dist.barrier()
dist.destroy_process_group()
