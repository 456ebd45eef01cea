"""Teaches: weights are written while a pass reads them: half old, half new.
Seen in NVIDIA-NeMo/RL 2180 and sgl-project/sglang 22620.
"""

import sys

import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
store = dist.distributed_c10d._get_default_store()
is_cured = "cured" in sys.argv

if rank == 0:
    store.multi_set(["first", "second"], ["old", "old"])
dist.barrier()
if rank == 0 and is_cured:
    store.multi_set(["first", "second"], ["new", "new"])
elif rank == 0:
    store.set("first", "new")
    store.set("second", "new")
elif is_cured:
    first, second = store.multi_get(["first", "second"])
    assert first == second, "half old, half new"
else:
    first, second = store.get("first"), store.get("second")
    assert first == second, "half old, half new"
