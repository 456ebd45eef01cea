"""Of every operation that training makes only the first two calls are recorded at length.

ranks: 2
kind: healthy
guard: check
"""

from distsim.realexec.guard.recorder import Recorder
from tests.cases.operations import *
from tests.cases.releases import SHORT_WAY

begin, long_ways = Recorder.begin, []
Recorder.begin = lambda *args: long_ways.append(args) or begin(*args)
for call in ALL + MESSAGES:
    counts = []
    for number in range(5):
        before = len(long_ways)
        call()
        counts.append(len(long_ways) - before)
    assert counts[0] and not (SHORT_WAY and any(counts[2:])), (call.__name__, counts)
dist.destroy_process_group()
