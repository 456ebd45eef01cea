# ranks: 3
# kind: rank_raised
# culprits: 1
# exit: 1

import threading

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
t = torch.ones(8)
threading.Thread(target=threading.Event().wait).start()  # a prefetching thread that nobody stops
for step in range(5):
    if rank == 1 and step == 3:
        raise ValueError("bad batch")  # <-
    dist.all_reduce(t)
