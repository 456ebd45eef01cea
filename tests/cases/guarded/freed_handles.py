"""Without any garbage collection the handle of a call that was held is freed when it has gone out.

ranks: 2
kind: healthy
guard: strict
"""

import gc
import weakref

from tests.cases.begin import dist, rank, torch

gc.disable()
rank, store = rank, dist.distributed_c10d._get_default_store()
for number in range(4):
    tensor = torch.ones(4)
    if rank == 1:
        store.wait([f"made {number}"])  # so the other's call is held
    work = dist.all_reduce(tensor, async_op=True)
    known = weakref.ref(work)
    future = work.get_future() if number % 2 else None
    store.set(f"made {number}", "")
    (future or work).wait()
    work.wait()
    assert tensor.tolist() == [2] * 4, tensor
    del tensor, work, future
    for _ in range(100):
        dist.barrier()  # the thread that lets calls out may be in the middle of that
    assert known() is None, number
dist.destroy_process_group()
