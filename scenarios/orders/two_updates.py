"""Teaches: two updates of weights begin at once: "is one active?" and "mark it active" are two steps.
Seen in NovaSky-AI/SkyRL 1605.
"""

import sys

import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
store = dist.distributed_c10d._get_default_store()
is_cured = "cured" in sys.argv

if is_cured:
    may_update = store.compare_set("active", "", str(rank)) == str(rank).encode()
else:
    may_update = not store.check(["active"])
    if may_update:
        store.set("active", str(rank))
if may_update:
    assert store.add("updates", 1) == 1, "two updates at once"
