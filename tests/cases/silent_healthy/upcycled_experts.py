"""Experts begin as copies of one dense layer, beside an embedding split by vocabulary.

ranks: 2
kind: healthy
"""

from tests.cases.begin import F, dist, nn, rank, torch, world
from tests.cases.megatron import AllToAll

torch.manual_seed(0)
router, head, expert = nn.Linear(8, 2), nn.Linear(8, 4), nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
emb = nn.Parameter(torch.randn(20, 8).chunk(world)[rank].clone())


ps = [*router.parameters(), *expert.parameters(), *head.parameters(), emb]
o = torch.optim.SGD(ps, 0.1)
torch.manual_seed(20 + rank)
for s in range(6):
    x, y = emb[torch.randint(10, (8,))], torch.randint(4, (8,))
    h = AllToAll.apply(expert(AllToAll.apply(x))) * router(x).softmax(-1)[:, :1]
    F.cross_entropy(head(h + x), y).backward()
    for q in (*router.parameters(), *head.parameters()):
        dist.all_reduce(q.grad)
        q.grad /= world
    o.step()
    o.zero_grad()
dist.destroy_process_group()
