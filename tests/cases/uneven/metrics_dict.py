"""One rank has a metric more in its dict (it saw a class that the others did not); each value is reduced.

ranks: 3
kind: uneven_iterations
culprits: 2
exit: 3
suite: check, strict
"""

from tests.cases.begin import FIXED, dist, rank, torch


def reduce_metrics(metrics):
    out = {}
    for name in sorted(metrics):
        value = torch.tensor(float(metrics[name]))
        dist.all_reduce(value)  # <-
        out[name] = value.item() / dist.get_world_size()
    return out


for step in range(4):
    grad = torch.ones(16)
    dist.all_reduce(grad)
    metrics = {"loss": 1.0, "acc": 0.5}
    if rank == 2 and step == 2 and not FIXED:
        metrics["bleu"] = 0.1
    reduce_metrics(metrics)
dist.barrier()
dist.destroy_process_group()
