"""One key of the metrics is absent on rank 1 in one step.

ranks: 3
kind: uneven_iterations
culprits: 1
exit: 3
"""

from tests.cases.begin import FIXED, dist, rank, torch


def log(metrics):
    for name in metrics:
        dist.all_reduce(torch.tensor(metrics[name]))


for step in range(4):
    dist.all_reduce(torch.ones(16))  # <-
    metrics = {"loss": 1.0, "acc": 1.0, "f1": 1.0}
    if rank == 1 and step == 1 and not FIXED:
        del metrics["f1"]
    log(metrics)
dist.destroy_process_group()
