# ranks: 2

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
world = dist.get_world_size()
t = torch.ones(8)
for _ in range(3):
    dist.all_reduce(t)
import threading

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
