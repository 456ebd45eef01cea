"""2 x 2 mesh, TP by hand; other dropout masks in the sharded region, gradients averaged over dp.

ranks: 4
kind: healthy
"""

from torch.distributed.device_mesh import init_device_mesh

from tests.cases.begin import F, dist, nn, rank, torch
from tests.cases.megatron import Copy, Reduce, part

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
dp, tp = mesh.get_group("dp"), mesh.get_group("tp")
d, t = mesh.get_local_rank("dp"), mesh.get_local_rank("tp")


class Block(nn.Module):
    def __init__(s):
        super().__init__()
        s.ln = nn.LayerNorm(16)
        a, b = torch.randn(32, 16) * 0.2, torch.randn(16, 32) * 0.2
        s.w1, s.w2 = part(a, 0, 2, t), part(b, 1, 2, t)
        s.drop = nn.Dropout(0.2)

    def forward(s, x):
        return x + Reduce.apply(s.drop(F.gelu(F.linear(Copy.apply(s.ln(x), tp), s.w1))) @ s.w2.t(), tp)


torch.manual_seed(0)
m = nn.Sequential(Block(), Block())
o = torch.optim.AdamW(m.parameters(), 1e-2)
torch.manual_seed(50 + rank)
g = torch.Generator().manual_seed(d)
for s in range(6):
    m(torch.randn(8, 16, generator=g)).pow(2).mean().backward()
    for p in m.parameters():
        dist.all_reduce(p.grad, group=dp)
        p.grad /= 2
    o.step()
    o.zero_grad()
dist.destroy_process_group()
