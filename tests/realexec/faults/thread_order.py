# ranks: 3
# kind: thread_race
# culprits: 1
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

turn = threading.Event()


def metrics():
    turn.wait()
    dist.all_reduce(torch.ones(8))  # <-


thread = threading.Thread(target=metrics, name="metrics")
thread.start()
if rank == 1:
    turn.set()
    thread.join()
dist.all_reduce(t)
turn.set()
thread.join()
time.sleep(1)
dist.barrier()
