# ranks: 2

import threading
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
t = torch.ones(8)
for _ in range(3):
    dist.all_reduce(t)
got = torch.zeros(8)
if rank == 0:
    receiver = threading.Thread(target=dist.recv, args=(got, 1))
    receiver.start()
    time.sleep(2)  # rank 1 waits for the message below, the thread for rank 1's answer: no circle
    dist.send(t, 1)
    receiver.join()
else:
    dist.recv(got, 0)
    dist.send(t, 0)
dist.barrier()
dist.destroy_process_group()
