"""Adam's state is restored on rank 0 only.

ranks: 2
kind: optimizer_state_differs
unvalued: optimizer_state_differs
"""

from torch.nn.parallel import DistributedDataParallel as DDP

from tests.cases.begin import FIXED, F, dist, nn, rank, torch

torch.manual_seed(0)
m = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
o = torch.optim.Adam(m.parameters(), 1e-2)
torch.manual_seed(rank)
sd = o.state_dict()
sd["state"] = {
    i: {"step": torch.tensor(9.0), "exp_avg": torch.full_like(p, 0.1), "exp_avg_sq": torch.full_like(p, 0.1)}
    for i, p in enumerate(m.parameters())
}
if rank == 0 or FIXED:
    o.load_state_dict(sd)  # <- culprit
for s in range(6):
    x, y = torch.randn(8, 16), torch.randint(4, (8,))
    F.cross_entropy(m(x), y).backward()
    o.step()
    o.zero_grad()
dist.destroy_process_group()
