"""What it costs to let another simulated rank run, beside a bare lock that two threads pass to and fro.

    python -m tools.benchmarks.sim_hand_over

Peer: that lock. Aim: none of its own; sim_scale.py --loop has that of a call.

Two ranks sleep in turns (virtual time), so every event leaves one simulated process and enters the other. CPU
microseconds, on the one core that the ranks keep to and, in turns with that, where the kernel puts them; simpy's own
events a second say how fast the machine is just now.
"""

from __future__ import annotations

import statistics
import threading
import time
from unittest import mock

from tools.benchmarks.arguments import Arguments
from tools.benchmarks.yardstick import simpy_events_per_s, told

TURNS = 5_000


def naps(turns: int) -> None:
    for _ in range(turns):
        time.sleep(1e-3)


def hand_over_us(turns: int = TURNS) -> float:
    """CPU microseconds of a hand-over from rank to rank: out of one thread and process, into the other."""
    import distsim

    cpu_s = []
    distsim.simulate(naps, on="dgx-h100:1", nproc_per_node=2, args=(1,))
    for count in (turns, 2 * turns):  # the difference is without start and end
        begun = time.process_time()
        distsim.simulate(naps, on="dgx-h100:1", nproc_per_node=2, args=(count,))
        cpu_s.append(time.process_time() - begun)
    return (cpu_s[1] - cpu_s[0]) / (2 * turns) * 1e6


def bare_us(times: int = 20_000) -> float:
    """CPU microseconds of one hand-over of a bare lock from thread to thread."""
    here, there = threading.Lock(), threading.Lock()
    here.acquire()
    there.acquire()

    def answer() -> None:
        for _ in range(times):
            there.acquire()
            here.release()

    other = threading.Thread(target=answer)
    other.start()
    begun = time.process_time()
    for _ in range(times):
        there.release()
        here.acquire()
    other.join()
    return (time.process_time() - begun) / times / 2 * 1e6


def anywhere_us() -> float:
    """The same where nothing is said of cores."""
    from distsim.sim.kernel import baton

    with mock.patch.object(baton, "core_now", None):
        return hand_over_us()


def main() -> None:
    Arguments(__doc__).parse_args()
    found = [(hand_over_us(), anywhere_us()) for _ in range(3)]
    ours_us, spread_us = (statistics.median(column) for column in zip(*found, strict=True))
    lock_us = bare_us()
    print(f"a hand-over from rank to rank: {ours_us:.0f} us of CPU, the state of a process and two semaphores")
    print(f"the same on any core: {spread_us:.0f} us; on one it is {ours_us / spread_us:.2f} of it (three in turns)")
    print(f"a bare lock from thread to thread: {lock_us:.1f} us; ours is {ours_us / lock_us:.1f} of it")
    print(told(simpy_events_per_s()))


if __name__ == "__main__":
    main()
