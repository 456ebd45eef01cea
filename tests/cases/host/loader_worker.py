"""A forked worker of a data loader calls a collective: the groups of its rank do not work there.

ranks: 2
kind: host_stuck
culprits: 0, 1
exit: 3
hang_after: 3
suite: check
says: called broadcast
gpus: no, CUDA cannot be used in a forked process
"""

import ctypes

from torch.utils.data import DataLoader, Dataset

from tests.cases.begin import dist, torch


class Shared(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG: stuck in C++, it would outlive its rank
        seed = torch.tensor([i])
        dist.broadcast(seed, src=0)  # <-
        return seed


for batch in DataLoader(Shared(), num_workers=1):
    dist.all_reduce(batch)
