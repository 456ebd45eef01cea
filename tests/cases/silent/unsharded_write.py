"""A weight is clamped in forward while fully_shard has gathered it.

ranks: 2
kind: unsharded_write_lost
"""

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.cases.begin import FIXED, F, dist, nn, rank, torch, world

torch.manual_seed(0)


class M(nn.Module):
    def __init__(s):
        super().__init__()
        s.a = nn.Linear(16, 16)
        s.b = nn.Linear(16, 4)

    def forward(s, x):
        if s.training and not FIXED:
            with torch.no_grad():
                s.b.weight.clamp_(-0.05, 0.05)
        return s.b(F.relu(s.a(x)))


m = M()
fully_shard(m, mesh=init_device_mesh("cpu", (world,)))
o = torch.optim.SGD(m.parameters(), 0.1)
torch.manual_seed(1 + rank)
for s in range(6):
    F.cross_entropy(m(torch.randn(8, 16)), torch.randint(4, (8,))).backward()
    o.step()
    o.zero_grad()
dist.destroy_process_group()
