"""A synchronous call, however often it was made before, goes out after the asynchronous one that is held.

ranks: 2
kind: healthy
guard: strict
"""

from tests.cases.begin import dist, rank, torch

store = dist.distributed_c10d._get_default_store()
for number in range(30):
    first, second = torch.ones(4), torch.full((4,), 2.0)
    if rank == 1:
        store.wait([f"made {number}"])
    work = dist.all_reduce(first, async_op=True)  # on rank 0 nobody is there yet
    if rank == 0:
        store.set(f"made {number}", "")
    dist.all_reduce(second)
    work.wait()
    assert first[0] == 2 and second[0] == 4, (first, second)
dist.destroy_process_group()
