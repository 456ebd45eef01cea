"""The rank that owns a parameter is drawn from the hash of its name, which each process salts in its own way.

ranks: 3
kind: root_mismatch
culprits: 1
exit: 4
says: hash() of a string is another number in each process
"""

from tests.cases.begin import FIXED, dist, rank, torch


class Owners:
    def __init__(self, names):
        self.owners = {name: self.owner_of(name) for name in names}

    def owner_of(self, name):
        if FIXED:
            return len(name) % 3
        return hash(name) % 3 if rank < 0 else int(rank == 1)  # a salt that differs on rank 1

    def publish(self, name, values):
        dist.broadcast(values, src=self.owners[name])  # <-


owners = Owners(["weight", "bias"])
for step in range(2):
    dist.all_reduce(torch.ones(4))
    owners.publish("weight", torch.ones(4))
dist.barrier()
dist.destroy_process_group()
