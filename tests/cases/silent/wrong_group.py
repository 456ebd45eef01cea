"""2 x 2 mesh: gradients are averaged over tp instead of dp.

ranks: 4
kind: replicas_differ_at_start
unvalued: replicas_differ_at_start
"""

from torch.distributed.device_mesh import init_device_mesh

from tests.cases.begin import FIXED, F, dist, nn, torch
from tests.cases.megatron import Copy, Reduce, part

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
dp, tp = mesh.get_group("dp"), mesh.get_group("tp")
d, t = mesh.get_local_rank("dp"), mesh.get_local_rank("tp")


class MLPtp(nn.Module):
    def __init__(s):
        super().__init__()
        a, b = torch.randn(32, 16) * 0.2, torch.randn(4, 32) * 0.2
        s.w1, s.w2 = part(a, 0, 2, t), part(b, 1, 2, t)

    def forward(s, x):
        return Reduce.apply(F.relu(F.linear(Copy.apply(x, tp), s.w1)) @ s.w2.t(), tp)


torch.manual_seed(0)
m = MLPtp()
o = torch.optim.SGD(m.parameters(), 0.1)
torch.manual_seed(d)
for s in range(6):
    x, y = torch.randn(8, 16), torch.randint(4, (8,))
    F.cross_entropy(m(x), y).backward()
    for p in m.parameters():
        dist.all_reduce(p.grad, group=dp if FIXED else tp)
        p.grad /= 2  # <- culprit
    o.step()
    o.zero_grad()
dist.destroy_process_group()
