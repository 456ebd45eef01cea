"""Calls with a timeout of their own, and a profiled one: strict neither makes them slower nor changes their words.

ranks: 2
kind: healthy
"""

import time
from datetime import timedelta

from tests.cases.begin import dist, rank, torch

for _ in range(20):
    began = time.monotonic()
    dist.monitored_barrier()
    assert time.monotonic() - began < 20
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
    dist.all_reduce(torch.ones(4), async_op=True).wait()
assert any(event.name == "gloo:all_reduce" for event in profiler.events()), "no event of the call"
first, second = (dist.new_group(timeout=timedelta(seconds=0.7)) for _ in range(2))  # a timeout ends a group
if rank == 1:
    time.sleep(3)
else:
    calls = {
        "Rank 1 failed to pass monitoredBarrier": lambda: dist.monitored_barrier(first, timedelta(seconds=0.7)),
        " Timed out ": lambda: dist.barrier(second),
    }
    for words, call in calls.items():
        said = ""
        try:
            call()
        except RuntimeError as error:
            said = str(error)
        assert words in said, said
dist.monitored_barrier()
dist.destroy_process_group()
