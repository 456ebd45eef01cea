"""A spawned worker of a data loader calls a collective: its process has joined nothing, and torch raises.

ranks: 2
kind: rank_raised
culprits: 0, 1
exit: 1
says: has not been initialized
check: no, a spawned process imports the program anew
strict: no, as check
gpus: no, as check
"""

from torch.utils.data import DataLoader, Dataset

from tests.cases.begin import dist, torch


class Shared(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        seed = torch.tensor([i])
        dist.broadcast(seed, src=0)
        return seed


for batch in DataLoader(Shared(), num_workers=1, multiprocessing_context="spawn"):
    dist.all_reduce(batch)
