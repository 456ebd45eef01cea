"""Every rank updates a metric, only rank 0 asks for its value, which gathers."""

import torch
import torch.distributed as dist


class Metric:
    def __init__(self) -> None:
        self.value = torch.zeros(1)

    def update(self, value: torch.Tensor) -> None:
        self.value += value

    def compute(self) -> torch.Tensor:
        dist.barrier()
        parts = [torch.zeros(1) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, self.value)
        return torch.cat(parts).mean()


def main() -> None:
    dist.init_process_group("gloo")
    metric = Metric()
    for _ in range(2):
        for _ in range(3):
            grad = torch.ones(4)
            dist.all_reduce(grad)
            metric.update(grad.sum())
        if dist.get_rank() == 0:
            print("metric", metric.compute())
    dist.destroy_process_group()


main()
