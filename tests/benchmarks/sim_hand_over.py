"""What it costs to let another simulated rank run, beside a bare lock that two threads pass to and fro.

    python -m tests.benchmarks.sim_hand_over

Peer: that lock. Aim: none of its own; sim_scale.py --loop has that of a call.

Two ranks sleep in turns (virtual time), so every event leaves one simulated process and enters the other. Times are
CPU microseconds; simpy's own events a second say how fast the machine is just now.
"""

from __future__ import annotations

import statistics
import threading
import time

from tests.benchmarks.arguments import Arguments
from tests.benchmarks.yardstick import simpy_events_per_s, told

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


def main() -> None:
    Arguments(__doc__).parse_args()
    ours_us = statistics.median(hand_over_us() for _ in range(3))
    lock_us = bare_us()
    print(f"a hand-over from rank to rank: {ours_us:.0f} us of CPU, the state of a process and two semaphores")
    print(f"a bare lock from thread to thread: {lock_us:.1f} us; ours is {ours_us / lock_us:.1f} of it")
    print(told(simpy_events_per_s()))


if __name__ == "__main__":
    main()
