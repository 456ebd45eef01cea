"""Teaches: pipeline parallel. One stage a rank, four microbatches, the GPipe and the 1F1B schedule.

Both schedules do the same sums in another order of sends and receives, so they print the same loss.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
first, last = rank == 0, rank == world_size - 1


def mse(got: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return (got - wanted).pow(2).mean()


for schedule_class in (ScheduleGPipe, Schedule1F1B):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(world_size)]
    stage = PipelineStage(layers[rank], rank, world_size, torch.device("cpu"))
    schedule = schedule_class(stage, n_microbatches=4, loss_fn=mse)
    optimizer = torch.optim.SGD(layers[rank].parameters(), lr=0.5)
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    for step in range(2):
        losses: list[torch.Tensor] = []
        arguments = (x,) if first else ()
        schedule.step(*arguments, target=x.tanh() if last else None, losses=losses if last else None)
        optimizer.step()
        optimizer.zero_grad()
        if last:
            loss = torch.stack(losses).mean().item()
            print(f"rank {rank}, {schedule_class.__name__}, step {step}: loss {loss:.5f}")
    weight = layers[rank][0].weight.sum().item()
    print(f"rank {rank}, {schedule_class.__name__}: weights sum to {weight:.4f}")
dist.destroy_process_group()
