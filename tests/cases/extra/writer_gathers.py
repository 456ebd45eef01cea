"""After a step the writer alone gathers the state; the others are in the backward pass of the next step.

ranks: 3
kind: extra_collective
culprits: 0
exit: 4
says: it stands under `if self.is_writer`
"""

from tests.cases.begin import FIXED, dist, rank, torch


class Saver:
    """Writes the state of all ranks now and then."""

    def __init__(self, is_writer: bool) -> None:
        self.is_writer = is_writer

    def after(self, step: int) -> None:
        if step % 2 == 0:
            return
        if self.is_writer:
            dist.broadcast(torch.ones(3), src=0)  # <-


model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
saver = Saver(rank == 0 or FIXED)
for step in range(6):
    model(torch.ones(2, 8)).sum().backward()
    saver.after(step)
dist.destroy_process_group()
