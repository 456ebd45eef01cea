"""Asynchronous calls return at once in any number; a mismatch raises in wait(), and the group goes on.

ranks: 2
kind: caught
guard: strict
prints: caught 2
"""

from distsim.debug import CollectiveMismatch
from tests.cases.begin import dist, rank, torch

works = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(300)]
bad = dist.all_reduce(torch.ones(4 + rank), async_op=True)
after = dist.all_reduce(torch.ones(2), async_op=True)
for work in works:
    work.wait()
try:
    bad.wait()
except CollectiveMismatch as error:
    print("caught", len(error.records))
after.wait()
t = torch.ones(3)
dist.all_reduce(t)
assert t[0] == 2
dist.destroy_process_group()
