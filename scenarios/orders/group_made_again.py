"""Teaches: a group is destroyed and made again on the same store: addresses of the first time are read.
Seen in pytorch/pytorch 55967.
"""

import sys

import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
store = dist.distributed_c10d._get_default_store()
is_cured = "cured" in sys.argv

for attempt in range(2):
    key = f"{attempt}/address of rank 0" if is_cured else "address of rank 0"
    if rank == 0:
        store.set(key, f"port {attempt}")
    else:
        address = store.get(key).decode()
        assert address == f"port {attempt}", f"attempt {attempt} connects to {address}"
    dist.barrier()
