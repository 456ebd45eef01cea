# ranks: 2
# kind: thread_race
# culprits: 0
# exit: 4

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
world = dist.get_world_size()
t = torch.ones(8)
for _ in range(3):
    dist.all_reduce(t)
import threading
import time


def other():
    time.sleep(0.3 if rank else 0.1)
    dist.all_reduce(torch.ones(4))  # <-


thread = threading.Thread(target=other, name="metrics")
thread.start()
time.sleep(0.5 if rank else 0.02)
dist.broadcast(torch.ones(2), 0)
thread.join()
