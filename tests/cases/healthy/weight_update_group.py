"""A further world beside the job's, made by hand as RLHF frameworks do: job ranks 0, 2 and 3 are its 0, 1 and 2.

ranks: 4
kind: healthy
"""

import os
import time

import torch.distributed.distributed_c10d as c10d

from tests.cases.begin import dist, rank, torch

trainers = dist.new_group([0, 1])
update = None
if rank != 1:
    own = {0: 0, 2: 1, 3: 2}[rank]
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    url = f"tcp://127.0.0.1:{int(os.environ['MASTER_PORT']) + 1}"
    store, own, size = next(c10d.rendezvous(url, own, 3, timeout=c10d.default_pg_timeout))
    store = dist.PrefixStore("weights", store)
    update, _ = c10d._new_process_group_helper(
        size, own, [], c10d.Backend("gloo"), store, group_name="weights", timeout=c10d.default_pg_timeout
    )
    c10d._world.pg_group_ranks[update] = {i: i for i in range(size)}
if rank == 0:
    time.sleep(1.5)
weights = torch.full((8,), float(rank))
for _ in range(2):
    if update is not None:
        dist.broadcast(weights, src=0, group=update)
    if rank < 2:
        dist.all_reduce(torch.ones(4), group=trainers)
dist.barrier()
dist.destroy_process_group()
