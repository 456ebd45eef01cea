"""Teaches: the holder of a lease is late, not dead: the follower's wait ends, and both lead.
Of the kind of pytorch/pytorch 59663 and meta-pytorch/torchft 71.
"""

import sys
from datetime import timedelta

import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
store = dist.distributed_c10d._get_default_store()
is_cured = "cured" in sys.argv


def becomes_leader() -> bool:
    return not is_cured or store.compare_set("leader", "", str(rank)) == str(rank).encode()


leads = False
if rank == 0:
    leads = becomes_leader()
    store.set("alive", "1")
else:
    try:
        store.wait(["alive"], timedelta(seconds=1))
    except RuntimeError:
        leads = becomes_leader()
leaders = store.add("leaders", int(leads))
assert leaders < 2, "both lead"
