"""A rank that comes the shorter way learns that another one calls with another shape.

ranks: 2
kind: caught
guard: strict
prints: refused
"""

from distsim.debug import CollectiveMismatch
from tests.cases.begin import dist, rank, torch

for round in range(4):
    tensor = torch.ones(6 if (rank, round) == (1, 3) else 4)
    try:
        dist.all_reduce(tensor)
    except CollectiveMismatch as error:
        assert round == 3 and "all_reduce #7" in str(error), error
        print("refused", flush=True)
