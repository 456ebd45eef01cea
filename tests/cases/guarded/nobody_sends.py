"""A message that nobody sends ends with the group's timeout or that of the wait, as it does without a guard.

ranks: 2
kind: caught
guard: strict
args: irecv | batch | recv | shorter
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

how = sys.argv[1]
dist.init_process_group("gloo", timeout=timedelta(seconds=2))
if dist.get_rank() == 0:
    one = torch.ones(3)
    try:
        if how == "recv":
            dist.recv(one, 1)
        elif how == "irecv":
            dist.irecv(one, 1).wait()
        elif how == "batch":
            dist.batch_isend_irecv([dist.P2POp(dist.irecv, one, 1)])[0].wait()
        else:
            dist.irecv(one, 1).wait(timedelta(seconds=1))
    except RuntimeError as error:
        assert "Timed out waiting" in str(error), error
    else:
        raise AssertionError("it came")
store = dist.distributed_c10d._get_default_store()
if dist.get_rank() == 0:
    store.set("over", "")
    store.wait(["bye"], timedelta(seconds=40))  # it holds the store
else:
    store.wait(["over"], timedelta(seconds=40))
    store.set("bye", "")
