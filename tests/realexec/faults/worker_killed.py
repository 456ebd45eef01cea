# ranks: 2
# kind: rank_raised
# culprits: 1
# exit: 1

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
world = dist.get_world_size()
t = torch.ones(8)
for _ in range(3):
    dist.all_reduce(t)
import os
import signal

from torch.utils.data import DataLoader, Dataset


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
