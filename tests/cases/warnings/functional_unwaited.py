"""Nobody waits for the results of functional collectives.

ranks: 2
kind: async_never_waited|buffer_modified_in_flight
culprits: 0, 1
exit: 0
says: Call wait_tensor() on what the functional collective at
"""

from tests.cases.begin import dist, torch

name = dist.group.WORLD.group_name
t = torch.ones(1 << 16)
for _ in range(3):
    t = torch.ops._c10d_functional.all_reduce(t, "sum", name)  # <-
dist.barrier()
dist.destroy_process_group()
