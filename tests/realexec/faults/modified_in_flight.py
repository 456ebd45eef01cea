# ranks: 2
# kind: buffer_modified_in_flight
# culprits: 1
# exit: 4
# checksum: 1

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
world = dist.get_world_size()
t = torch.ones(8)
for _ in range(3):
    dist.all_reduce(t)
import time

x = torch.ones(1 << 16)
work = dist.all_reduce(x, async_op=True)  # <-
if rank == 1:
    x += 1
time.sleep(0.1)
work.wait()
dist.barrier()
dist.destroy_process_group()
