"""torchmetrics: every rank updates, only rank 0 computes, which gathers."""

import torch
import torch.distributed as dist
from torchmetrics import MeanMetric


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    metric = MeanMetric()
    for _epoch in range(2):
        for _ in range(3):
            loss = model(torch.randn(4, 4)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            metric.update(loss.detach())
        if rank == 0:
            print("loss", float(metric.compute()))  # <- culprit
    dist.destroy_process_group()


main()
