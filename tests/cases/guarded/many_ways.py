"""A line that is called in more ways than are kept leaves no more behind than at first, and a group none of its own.

ranks: 2
kind: healthy
guard: check
"""

import gc
import sys

from distsim.realexec.guard.fast_path import CachedCall
from distsim.realexec.guard.recorder import UNKNOWN
from tests.cases.begin import dist, torch
from tests.cases.releases import SHORT_WAY

if not SHORT_WAY:  # nothing is kept
    sys.exit()


def num_seen():
    return sum(type(one) in (CachedCall, type(UNKNOWN)) for one in gc.get_objects())


dist.destroy_process_group(dist.new_group())  # the making of groups has a log of its own
gc.disable()
for _ in range(5):
    dist.all_reduce(torch.ones(1))  # at the start, and never again
counts, one, Op = [], torch.ones(1, dtype=torch.int), dist.ReduceOp
ways = [(dst, op) for op in (Op.SUM, Op.PRODUCT, Op.MIN, Op.MAX, Op.BAND, Op.BOR) for dst in range(2)]
for step in range(12):
    for dst, op in ways:  # more than are kept of one line
        for _ in range(4):
            dist.reduce(one, dst, op)
    counts.append(num_seen())
assert counts[-1] <= counts[1], counts
for size in range(1, 9):  # each is learnt, and none is in the place of another
    for _ in range(3):
        dist.all_reduce(torch.ones(size))
assert num_seen() <= counts[-1] + size, (num_seen(), counts)
counts.append(num_seen())
other = dist.new_group()
for _ in range(9):
    dist.barrier(group=other)
    dist.all_reduce(torch.ones(1), group=other)
assert num_seen() > counts[-1]
dist.destroy_process_group(other)
del other
assert num_seen() <= counts[-1], (num_seen(), counts)
dist.destroy_process_group()
