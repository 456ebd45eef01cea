"""Neither a heartbeat that saw a frame nor a call of an except block keeps the tensors and groups of its frames.

ranks: 2
kind: healthy
guard: check
"""

import time
import weakref

from tests.cases.begin import dist, torch


def pauses(group):
    held = torch.ones(4)
    freed.append(weakref.ref(held))
    for _ in range(3):
        dist.all_reduce(held)
    time.sleep(0.5)  # heartbeats look at this frame


def catches():
    held = torch.ones(4)
    freed.append(weakref.ref(held))
    raise RuntimeError("expected")


def threads():
    import os

    return [open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")]


freed = []
pauses(dist.group.WORLD)
try:
    catches()
except RuntimeError:
    dist.all_reduce(torch.ones(1))
for _ in range(3):
    dist.all_reduce(torch.ones(1))
assert [held() for held in freed] == [None, None], freed
dist.destroy_process_group()
assert "pt_gloo_runloop" not in threads(), threads()
