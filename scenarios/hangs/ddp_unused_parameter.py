"""Teaches: a layer that takes no part in the loss. DDP waits for its gradient and says so at the second
forward; find_unused_parameters=True, or not training it, is the way out.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(10, 10, bias=False)
        self.b = nn.Linear(10, 1, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a = self.a(x)
        return a, self.b(x)


torch.manual_seed(0)
model = DDP(TwoLayers())
for _ in range(3):
    a, b = model(torch.randn(20, 10))  # <- culprit
    a.sum().backward()  # b is left out
