"""A thread with a group of its own beside the main thread.

ranks: 2
kind: healthy
"""

import threading

from tests.cases.begin import dist, t, torch, world

background = dist.new_group(list(range(world)))


def metrics():
    for _ in range(20):
        dist.all_reduce(torch.ones(2), group=background)


thread = threading.Thread(target=metrics)
thread.start()
for _ in range(20):
    dist.all_reduce(t)
thread.join()
dist.destroy_process_group()
