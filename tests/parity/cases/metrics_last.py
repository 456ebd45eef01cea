# ranks: 3
# kind: uneven_iterations
# culprits: 1
# exit: 3
"""As metrics_dict, but at the end of training: only a barrier and destroy follow; the extra key sorts last."""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
metrics = {"loss": 1.0}
for _ in range(3):
    dist.all_reduce(torch.ones(16))
if rank == 1 and "fixed" not in sys.argv:
    metrics["perplexity"] = 3.0
for value in metrics.values():
    t = torch.tensor([value])
    dist.all_reduce(t)  # <-
dist.barrier()
dist.destroy_process_group()
