"""Whether a call went out at once or was held: its tensors live as long as the program wants them.

ranks: 2
kind: healthy
guard: check, strict
args: at once | late
prints: kept 0
"""

import sys
import time
import weakref

from distsim.realexec.install import current_session
from tests.cases.begin import dist, rank, torch

current_session().heartbeat.stop()  # it would see to the leavings
rank, late = rank, sys.argv[1] == "late"
store = dist.distributed_c10d._get_default_store()
tensors = []
for number in range(8):
    one = torch.ones(4)
    tensors.append(weakref.ref(one))
    if rank == 1 and late:
        store.wait([f"made {number}"])
    work = dist.all_reduce(one, async_op=True)
    if rank == 0:
        store.set(f"made {number}", "")
    work.wait()
    del one, work
until = time.monotonic() + 20
while time.monotonic() < until and any(tensor() is not None for tensor in tensors):
    time.sleep(0.01)  # gloo's own thread lets go of the last one
print("kept", sum(tensor() is not None for tensor in tensors))
dist.barrier()
dist.destroy_process_group()
