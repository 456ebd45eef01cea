# ranks: 3

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
world = dist.get_world_size()
t = torch.ones(8)
for _ in range(3):
    dist.all_reduce(t)

import threading


def serve():
    x = torch.zeros(8)
    dist.recv(x, src=1, tag=99)


th = None
if rank == 0:
    th = threading.Thread(target=serve, name="server")
    th.start()
import time

for _ in range(5):
    dist.all_reduce(t)
    time.sleep(0.1)
if rank == 1:
    dist.send(t, 0, tag=99)
if th:
    th.join()
dist.barrier()
dist.destroy_process_group()
