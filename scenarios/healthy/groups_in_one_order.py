"""Teaches: several groups at once are fine as long as all ranks use them in one order.

The same program with another order on one rank is scenarios/hangs/two_groups_crossed.py.
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
first, second = dist.new_group(), dist.new_group()

a, b = torch.tensor([float(rank)]), torch.tensor([10.0 * rank])
works = [dist.all_reduce(a, group=first, async_op=True), dist.all_reduce(b, group=second, async_op=True)]
# Waiting may be done in any order: only the order of the calls counts.
for work in works if rank % 2 else reversed(works):
    work.wait()
print(f"rank {rank}: {a.item():.0f} and {b.item():.0f}")
dist.destroy_process_group()
