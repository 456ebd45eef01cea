"""A data loader's worker is killed on rank 1.

ranks: 2
kind: rank_raised
culprits: 1
exit: 1
simulated: no, a data loader's workers run in the rank's own process there: a signal to one is one to the rank
"""

import os
import signal

from torch.utils.data import DataLoader, Dataset

from tests.cases.begin import dist, rank, torch


class Samples(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        if rank == 1 and i == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.ones(2)


for batch in DataLoader(Samples(), batch_size=1, num_workers=1):  # <-
    dist.all_reduce(batch)  # <- (the loader's signal handler raises wherever the rank is)
dist.barrier()
