"""Each rank resumes from the newest checkpoint that it finds: rank 1 has lost one, and its loop is longer.

ranks: 2
kind: uneven_iterations
culprits: 1
tie: 2
exit: 3
says: load the same checkpoint everywhere, or broadcast `step`
"""

from tests.cases.begin import FIXED, dist, rank, torch


class Trainer:
    def __init__(self):
        self.step = 0

    def resume(self, latest):
        self.step = latest

    def train_step(self):
        dist.all_reduce(torch.ones(8))  # <-
        self.step += 1

    def fit(self, until):
        while self.step < until:
            self.train_step()
        return torch.zeros(())

    def summary(self, loss):
        dist.all_gather([torch.zeros(()) for _ in range(2)], loss)  # <-


trainer = Trainer()
trainer.resume(4 if rank == 0 or FIXED else 2)
trainer.summary(trainer.fit(6))
dist.destroy_process_group()
