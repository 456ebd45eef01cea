"""However many frames are made anew for each call, the third goes the short way.

ranks: 2
kind: healthy
guard: check
"""

from distsim.realexec.guard.recorder import Recorder
from tests.cases.begin import dist, torch
from tests.cases.releases import SHORT_WAY

begin, long_ways = Recorder.begin, []
Recorder.begin = lambda *args: long_ways.append(args) or begin(*args)


def below(depth, call):
    return below(depth - 1, call) if depth else call()


def loop(depth):
    counts = []
    for number in range(6):
        before = len(long_ways)
        below(depth, lambda: dist.all_reduce(torch.ones(3 + depth)))
        counts.append(len(long_ways) - before)
    return counts


def step(number):
    dist.all_reduce(torch.ones(100 + number))  # new each time
    before = len(long_ways)
    dist.all_reduce(torch.ones(2))
    return len(long_ways) - before


for depth in range(14):
    counts = loop(depth)
    assert not (SHORT_WAY and any(counts[2:])), (depth, counts)
counts = [step(number) for number in range(10)]
assert not (SHORT_WAY and any(counts[6:])), counts
dist.destroy_process_group()
