"""all_gather into [t] * world: contrastive loss over aliased features.

ranks: 4
kind: aliased_outputs
"""

from tests.cases.begin import FIXED, F, dist, nn, rank, torch, world

torch.manual_seed(0)
m = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
o = torch.optim.SGD(m.parameters(), 0.1)
torch.manual_seed(rank)
for s in range(6):
    z = m(torch.randn(8, 16))
    parts = [torch.empty_like(z) for _ in range(world)] if FIXED else [torch.empty_like(z)] * world
    dist.all_gather(parts, z.detach())
    parts[rank] = z  # <- culprit
    F.cross_entropy(z @ torch.cat(parts).t(), torch.arange(8) + 8 * rank).backward()
    for p in m.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
    o.step()
    o.zero_grad()
dist.destroy_process_group()
