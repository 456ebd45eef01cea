"""Teaches: a recommendation model (DLRM). Each rank has some embedding tables whole; looked up rows change hands.

The batch is data parallel, the tables are not: an all_to_all_single takes the indices to the tables, another the rows
back, and its gradients the way back again. The dense layers are under DistributedDataParallel.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function
from torch.nn.parallel import DistributedDataParallel

from log import Log, start
from options import OneLine

parser = OneLine(description="DLRM")
parser.add_argument("--tables", type=int, default=64, help="embedding tables, over all ranks")
parser.add_argument("--rows", type=int, default=1_000_000, help="of a table")
parser.add_argument("--dim", type=int, default=128, help="of a row")
parser.add_argument("--batch", type=int, default=2048, help="samples of a rank")
parser.add_argument("--pooling", type=int, default=20, help="rows looked up in a table for a sample")
parser.add_argument("--steps", type=int, default=5)
args = parser.parse_args()


class Swap(Function):
    """[ranks, ...] of which block r goes to rank r."""

    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x)
        return out

    @staticmethod
    def backward(ctx, dy):
        dy = dy.contiguous()
        dx = torch.empty_like(dy)
        dist.all_to_all_single(dx, dy)
        return dx


class Dense(nn.Module):
    """Numbers and looked up rows to one logit, by their pairwise products."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, args.dim), nn.ReLU())
        pairs = args.tables * (args.tables + 1) // 2
        self.top = nn.Sequential(nn.Linear(args.dim + pairs, 1024), nn.ReLU(), nn.Linear(1024, 1))
        self.register_buffer("pairs", torch.tril_indices(args.tables + 1, args.tables + 1, -1), persistent=False)

    def forward(self, numbers, rows):
        x = self.bottom(numbers)
        each = torch.cat([x[:, None], rows], dim=1)
        products = (each @ each.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([x, products], dim=1))[:, 0]


device = start()
world = dist.get_world_size()
if args.tables % world:
    parser.error(f"--tables {args.tables} must be a multiple of the {world} ranks")
own = args.tables // world
torch.manual_seed(dist.get_rank())
with device:
    tables = nn.ModuleList(nn.EmbeddingBag(args.rows, args.dim, mode="sum") for _ in range(own))
    dense = Dense()
dense = DistributedDataParallel(dense, device_ids=[device.index] if device.type == "cuda" else None)
slow, fast = torch.optim.Adagrad(dense.parameters(), lr=0.01), torch.optim.SGD(tables.parameters(), lr=0.01)

log = Log(device, args.batch)
for step in range(1, args.steps + 1):
    numbers = torch.rand(args.batch, 13, device=device)
    wanted = torch.randint(args.rows, (world, own, args.batch, args.pooling), device=device)
    clicked = torch.randint(2, (args.batch,), device=device).float()
    indices = torch.empty_like(wanted)
    dist.all_to_all_single(indices, wanted)  # [ranks, own tables, their batch, pooling]
    found = [table(indices[:, n].flatten(0, 1)) for n, table in enumerate(tables)]
    rows = torch.stack(found, dim=1).view(world, args.batch, own, args.dim)
    rows = Swap.apply(rows).transpose(0, 1).reshape(args.batch, args.tables, args.dim)
    loss = F.binary_cross_entropy_with_logits(dense(numbers, rows), clicked)
    loss.backward()
    for optimizer in (slow, fast):
        optimizer.step()
        optimizer.zero_grad()
    log.step(step, loss.detach())
dist.destroy_process_group()
