"""all_gather into [t] * world: contrastive loss over aliased features. ranks: 4"""

import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

FIX = "fixed" in sys.argv
dist.init_process_group("gloo")
r, w = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
m = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
o = torch.optim.SGD(m.parameters(), 0.1)
torch.manual_seed(r)
for s in range(6):
    z = m(torch.randn(8, 16))
    parts = [torch.empty_like(z) for _ in range(w)] if FIX else [torch.empty_like(z)] * w
    dist.all_gather(parts, z.detach())
    parts[r] = z  # <- culprit
    F.cross_entropy(z @ torch.cat(parts).t(), torch.arange(8) + 8 * r).backward()
    for p in m.parameters():
        dist.all_reduce(p.grad)
        p.grad /= w
    o.step()
    o.zero_grad()
dist.destroy_process_group()
