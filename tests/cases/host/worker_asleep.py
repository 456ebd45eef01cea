"""A worker process of a data loader sleeps for good, and its rank waits for the batch.

ranks: 2
kind: host_stuck
culprits: 1
exit: 3
hang_after: 3
suite: check
says: in __getitem__
simulated: no, the simulator runs a loader's workers in the rank, where the sleep only takes virtual time
gpus: no, as the simulator
records: no, as the simulator
"""

import time

from torch.utils.data import DataLoader, Dataset

from tests.cases.begin import FIXED, dist, rank, t


class Slow(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        if i == 2 and rank == 1 and not FIXED:
            time.sleep(1000)
        return t


for batch in DataLoader(Slow(), num_workers=1):  # <-
    dist.all_reduce(batch)
