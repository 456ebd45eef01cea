"""Every rank updates a metric, only rank 0 asks for its value, which gathers.

ranks: 2, 4
kind: extra_collective
culprits: 0
exit: 4
"""

from tests.cases.begin import FIXED, dist, rank, torch, world


class Metric:
    def __init__(self):
        self.value = torch.zeros(1)

    def compute(self):
        dist.barrier()  # <-
        parts = [torch.zeros(1) for _ in range(world)]
        dist.all_gather(parts, self.value)
        return torch.cat(parts).mean()


metric = Metric()
for _ in range(2):
    for _ in range(3):
        grad = torch.ones(4)
        dist.all_reduce(grad)
        metric.value += grad.sum()
    if rank == 0 or FIXED:
        print("metric", metric.compute())
dist.destroy_process_group()
