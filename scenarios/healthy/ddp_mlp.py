"""Teaches: a whole training run. DistributedDataParallel on CPU tensors, as one would start it with torchrun.

Each rank has its own shard of a made-up regression problem; the loss is averaged over the ranks for
printing. The numbers printed are the same on gloo and simulated; the samples per second are the
cluster's, so simulated they are those of the cluster named with --on.

    distsim run --on dgx-h100:2 scenarios/healthy/ddp_mlp.py
    torchrun --nproc-per-node 4 scenarios/healthy/ddp_mlp.py
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=32, help="samples per rank and step")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-3)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)  # the same teacher and the same first student everywhere
    teacher = nn.Linear(args.width, args.width).requires_grad_(False)
    model = DDP(nn.Sequential(*(Block(args.width) for _ in range(args.depth))))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    torch.manual_seed(1 + rank)  # but every rank draws its own samples

    if rank == 0:
        count = sum(p.numel() for p in model.parameters())
        print(f"{count:,} parameters on {world_size} ranks, {args.batch * world_size} samples a step")
    begin = time.perf_counter()
    for step in range(1, args.steps + 1):
        x = torch.randn(args.batch, args.width)
        loss = nn.functional.mse_loss(model(x), teacher(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        mean = loss.detach()
        dist.all_reduce(mean)
        mean /= world_size
        if rank == 0:
            rate = step * args.batch * world_size / (time.perf_counter() - begin)
            print(f"step {step:3d}  loss {mean.item():.4f}  | {rate:,.0f} samples/s")

    # All students are still the same: the sum of the differences is zero.
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    reference = weights.clone()
    dist.broadcast(reference, src=0)
    assert torch.equal(weights, reference), f"rank {rank} has drifted away"
    # The model goes first. Were it freed after the group, DDP would hold the group's last reference, and
    # torch 2.13 then waits for gloo's thread with the GIL in its hand, which that thread may want.
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
