# ranks: 3
# kind: missing_rank
# culprits: 1
# exit: 3

import threading

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
reduced = threading.Event()
if rank != 1:
    dist.all_reduce(torch.ones(8), async_op=True).get_future().add_done_callback(lambda done: reduced.set())
    reduced.wait()
dist.barrier()  # <-
