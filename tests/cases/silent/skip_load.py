"""Only rank 0 loads the checkpoint; gradients are averaged by hand.

ranks: 4
kind: replicas_differ_at_start
unvalued: replicas_differ_at_start
"""

from tests.cases.begin import FIXED, F, dist, nn, rank, torch, world

torch.manual_seed(0)
m = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
ref = {k: v + 1 for k, v in m.state_dict().items()}
if rank == 0 or FIXED:
    m.load_state_dict(ref)  # <- culprit
o = torch.optim.AdamW(m.parameters(), 1e-2)
g = torch.Generator().manual_seed(rank)
for s in range(6):
    x, y = torch.randn(8, 16, generator=g), torch.randint(4, (8,), generator=g)
    F.cross_entropy(m(x), y).backward()
    for p in m.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
    o.step()
    o.zero_grad()
dist.destroy_process_group()
