"""Teaches: nodes read the number of the attempt at different times, and wait under different prefixes.
Seen in pytorch/pytorch 135712 and 135957.
"""

import sys

import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
store = dist.distributed_c10d._get_default_store()
is_cured = "cured" in sys.argv

if rank == 0:
    store.set("attempt", "1")
    attempt = "1"
elif is_cured:
    attempt = store.get("attempt").decode()
else:
    attempt = store.get("attempt").decode() if store.check(["attempt"]) else "0"
store.set(f"{attempt}/in {rank}", "1")
store.wait([f"{attempt}/in {other}" for other in range(size)])
