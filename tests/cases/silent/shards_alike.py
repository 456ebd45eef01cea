"""Tensor parallel: the split weights of a feed-forward layer are drawn with one seed on all ranks.

ranks: 4
kind: shards_alike
"""

from tests.cases.begin import FIXED, F, dist, nn, rank, torch
from tests.cases.megatron import Copy, Reduce

tp, dp = rank % 2, rank // 2
tensor_groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
data_groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
group = tensor_groups[dp]


class FeedForward(nn.Module):
    def __init__(s):
        super().__init__()
        torch.manual_seed(1)
        s.norm = nn.LayerNorm(16)
        torch.manual_seed(2 + tp * FIXED)
        s.up, s.down = nn.Linear(16, 16), nn.Linear(16, 16, bias=False)

    def forward(s, x):
        return x + Reduce.apply(s.down(F.gelu(s.up(Copy.apply(s.norm(x), group)))), group)  # <- culprit


m = FeedForward()
o = torch.optim.Adam(m.parameters(), 0.01)
gen = torch.Generator().manual_seed(7 + dp)
for _ in range(5):
    x = torch.randn(8, 16, generator=gen)
    (m(x) - x.roll(1, -1)).pow(2).mean().backward()
    for p in m.parameters():
        dist.all_reduce(p.grad, group=data_groups[tp])
        p.grad /= 2
    o.step()
    o.zero_grad()
dist.destroy_process_group()
