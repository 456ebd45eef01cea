"""Teaches: a barrier made of one counter is used for each update: from the second time on the counter is full.
Seen in MoonshotAI/checkpoint-engine 106 and 107.
"""

import sys

import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
store = dist.distributed_c10d._get_default_store()
is_cured = "cured" in sys.argv

for update in range(2):
    store.set(f"written {update}/{rank}", "1")
    counter = f"barrier {update}" if is_cured else "barrier"
    store.add(counter, 1)
    while store.add(counter, 0) < size:
        pass
    assert store.check([f"written {update}/{other}" for other in range(size)]), "passed the barrier too early"
