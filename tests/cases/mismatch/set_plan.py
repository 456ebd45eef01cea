"""The order of buckets comes from a set of strings: it is another on rank 1 (as if PYTHONHASHSEED differed).

ranks: 3
kind: shape_mismatch
culprits: 1
exit: 4
gpus: no, the host is ahead of its kernels: later calls show that the order differs
"""

from tests.cases.begin import FIXED, dist, rank, torch

sizes = {"embed": 32, "head": 8, "norm": 4, "mlp": 16}
order = ["norm", "embed", "mlp", "head"] if rank == 1 and not FIXED else ["embed", "head", "mlp", "norm"]
for _ in range(2):
    for name in order:
        dist.all_reduce(torch.ones(sizes[name]))  # <-
dist.destroy_process_group()
