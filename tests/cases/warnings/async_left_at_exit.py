"""The program ends while a call that nobody has waited for is open.

ranks: 3
kind: async_never_waited
culprits: 0, 1, 2
exit: 0
"""

from tests.cases.begin import dist, torch

h = dist.all_reduce(torch.ones(8), async_op=True)  # <-
