"""Expert parallel: the router's gradient is not averaged, the head's is.

ranks: 2
kind: replicas_diverge
unvalued: replicas_diverge
"""

from tests.cases.begin import FIXED, F, dist, nn, rank, torch, world
from tests.cases.megatron import AllToAll

torch.manual_seed(0)
router = nn.Linear(8, 2)
torch.manual_seed(10 + rank)
expert = nn.Linear(8, 8)
torch.manual_seed(0)
head = nn.Linear(8, 4)


ps = [*router.parameters(), *expert.parameters(), *head.parameters()]
o = torch.optim.SGD(ps, 0.1)
torch.manual_seed(20 + rank)
for s in range(6):
    x, y = torch.randn(8, 8), torch.randint(4, (8,))
    gate = router(x).softmax(-1)
    h = AllToAll.apply(expert(AllToAll.apply(x))) * gate[:, :1]
    F.cross_entropy(head(h + x), y).backward()
    for q in [*router.parameters(), *head.parameters()] if FIXED else head.parameters():
        dist.all_reduce(q.grad)
        q.grad /= world
    o.step()
    o.zero_grad()
dist.destroy_process_group()
