"""torchmetrics: metrics that are summed, and ones that keep lists, over uneven shards."""

import torch
import torch.distributed as dist
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassConfusionMatrix
from torchmetrics.regression import SpearmanCorrCoef


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(50, 4, generator=generator).softmax(1)
    labels = torch.randint(0, 4, (50,), generator=generator)
    metrics = MetricCollection(
        {"acc": MulticlassAccuracy(4), "auroc": MulticlassAUROC(4), "confusion": MulticlassConfusionMatrix(4)}
    )
    order, mean = SpearmanCorrCoef(), MeanMetric()
    for epoch in range(2):
        for begin in range(rank * 5, 50, size * 5):
            metrics.update(scores[begin : begin + 5], labels[begin : begin + 5])
            order.update(scores[begin : begin + 5, 0], labels[begin : begin + 5].float())
            mean.update(scores[begin : begin + 5].max())
        found = metrics.compute()
        rows = [f"{name} {value.flatten().tolist()}" for name, value in sorted(found.items())]
        print(f"rank {rank} epoch {epoch}:", *rows, f"{order.compute():.5f} {mean.compute():.5f}")
        metrics.reset(), order.reset(), mean.reset()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
