"""An expert layer leaves before its all_to_all on the rank that has no tokens.

ranks: 4
kind: uneven_iterations
culprits: 3
exit: 3
says: Agree on `x.shape[0] == 0`
"""

from tests.cases.begin import FIXED, dist, rank, torch, world


def experts(x):
    if x.shape[0] == 0:
        return x
    counts = torch.tensor([x.shape[0] // world] * world)
    got = torch.empty_like(counts)
    dist.all_to_all_single(got, counts)
    out = torch.empty(int(got.sum()), 4)
    dist.all_to_all_single(out, x, got.tolist(), counts.tolist())
    return out


for layer in range(3):
    experts(torch.ones(0 if rank == 3 and layer == 1 and not FIXED else 8, 4))
dist.all_reduce(torch.ones(1))  # <-
dist.destroy_process_group()
