"""Teaches: tensor parallel with DTensor.

The first layer is cut by columns, the second by rows, and one all-reduce remains. The result is
compared with the same layers on one rank.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 64)
        self.down = nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


torch.manual_seed(0)
whole = FeedForward()
torch.manual_seed(0)
parallel = parallelize_module(FeedForward(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
expected, got = whole(x), parallel(x)
torch.testing.assert_close(got, expected)
got.sum().backward()
expected.sum().backward()
torch.testing.assert_close(parallel.up.weight.grad.full_tensor(), whole.up.weight.grad)
shape = tuple(parallel.up.weight.to_local().shape)
print(f"rank {rank}: holds {shape} of {tuple(whole.up.weight.shape)}, result {got.sum().item():.4f}")
dist.destroy_process_group()
