"""The same as writer_gathers, under a condition that does not say that it asks for the rank.

ranks: 3
kind: extra_collective
culprits: 0
exit: 4
says: Agree on `self.saves`
"""

from tests.cases.begin import FIXED, dist, rank, torch


class Saver:
    """Writes the state of all ranks now and then."""

    def __init__(self, saves: bool) -> None:
        self.saves = saves

    def after(self, step: int) -> None:
        if step % 2 == 0:
            return
        if self.saves:
            dist.broadcast(torch.ones(3), src=0)  # <-


model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
saver = Saver(rank == 0 or FIXED)
for step in range(6):
    model(torch.ones(2, 8)).sum().backward()
    saver.after(step)
dist.destroy_process_group()
