"""A world made by hand: job ranks 0, 2 and 3 are its 0, 1 and 2, and job rank 3 leaves out one of its all_reduces.

ranks: 4
kind: uneven_iterations
culprits: 3
exit: 3
says: Ranks 0,2 make all_reduce
"""

import torch.distributed.distributed_c10d as c10d

from tests.cases.begin import dist, rank, torch

if rank != 1:
    own = {0: 0, 2: 1, 3: 2}[rank]
    store = dist.PrefixStore("weights", c10d._get_default_store())  # a port of its own may be taken
    update, _ = c10d._new_process_group_helper(
        3, own, [], c10d.Backend("gloo"), store, group_name="weights", timeout=c10d.default_pg_timeout
    )
    c10d._world.pg_group_ranks[update] = {i: i for i in range(3)}
    for number in range(3):
        if rank != 3 or number != 2:
            dist.all_reduce(torch.ones(8), group=update)
dist.barrier()  # <-
dist.destroy_process_group()
