"""A callback on a call's future makes a further call and waits for it; so does DDP's PowerSGD hook.

ranks: 2
kind: healthy
"""

import faulthandler

from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.cases.begin import dist, nn, torch

faulthandler.dump_traceback_later(25, exit=True)  # a deadlock is to fail the test, not to hang it


def again(future):
    return dist.all_reduce(future.value()[0], async_op=True).get_future().then(lambda inner: inner.value()[0]).wait()


for _ in range(20):
    t = torch.ones(8)
    assert dist.all_reduce(t, async_op=True).get_future().then(again).wait()[0] == 4
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)))
model.register_comm_hook(power.PowerSGDState(None, start_powerSGD_iter=2), power.powerSGD_hook)
for _ in range(8):
    model(torch.randn(4, 32)).square().mean().backward()
dist.destroy_process_group()
