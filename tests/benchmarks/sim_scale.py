"""1,024 live ranks, each with a real 64 KiB tensor, 10 all_reduces: wall time, memory, exactness.

    python -m tests.benchmarks.sim_scale [--ranks 4096] [--loop]

Aim: 6 s and 0.6 GiB on two quiet cores (4,096 ranks: 40 s), exact results. With --loop, 64 ranks make
1,000 all_reduces of one element instead: what a call costs each of them, beside what a bare lock costs that
two threads pass to and fro. CPU seconds, and simpy's own events a second beside them, count where others use
the machine too. sim_peers.py has torch's own simulations beside ours, sim_hand_over.py the hand-over alone.
"""

from __future__ import annotations

import argparse
import resource
import time

from tests.benchmarks.sim_hand_over import bare_us, simpy_events_per_s

RANKS = 1_024
CALLS = 10
SIMPY_EVENTS_PER_S = 750_000
"""Of the machine that the aims are for."""


def body(elements: int, calls: int) -> float:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    tensor = torch.full((elements,), float(dist.get_rank() % 7))
    for _ in range(calls):
        dist.all_reduce(tensor)
        tensor.fmod_(7)
    return float(tensor.sum())


def expected(ranks: int, elements: int, calls: int) -> float:
    values = [float(rank % 7) for rank in range(ranks)]
    for _ in range(calls):
        values = [sum(values) % 7] * ranks
    return values[0] * elements


def loop(ranks: int, calls: int) -> None:
    """A long loop of small calls on few ranks."""
    import distsim

    lock_us = bare_us()
    begun = time.process_time()
    outcome = distsim.simulate(body, on=f"dgx-h100:{ranks // 8}", args=(1, calls))
    cpu_s = time.process_time() - begun
    print(f"{ranks} ranks x {calls:,} all_reduces of 4 B: {cpu_s:.1f} CPU s")
    rate = simpy_events_per_s()
    call_us = cpu_s / ranks / calls * 1e6
    print(f"{call_us:.0f} us a call and rank; {call_us * rate / SIMPY_EVENTS_PER_S:.0f} where simpy is faster (aim 60)")
    print(f"{cpu_s / outcome.events * 1e6:.0f} us an event; a bare hand-over: {lock_us:.1f} us")
    print(f"simpy alone: {rate:,.0f} events/s of CPU; the aims are for {SIMPY_EVENTS_PER_S:,}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument("--loop", action="store_true", help="64 ranks, 1,000 small calls instead")
    args = parser.parse_args()
    if args.loop:
        loop(64, 1_000)
        return
    import distsim

    elements = 16_384
    begun, cpu = time.perf_counter(), time.process_time()
    outcome = distsim.simulate(body, on=f"dgx-h100:{args.ranks // 8}", args=(elements, CALLS))
    wall_s, cpu_s = time.perf_counter() - begun, time.process_time() - cpu
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    exact = set(outcome.results) == {expected(args.ranks, elements, CALLS)}
    print(f"{args.ranks:,} ranks x {CALLS} all_reduces of 64 KiB: {wall_s:.1f} s, {memory / 2**30:.2f} GiB")
    rate = simpy_events_per_s()
    print(f"{cpu_s:.1f} CPU s, {cpu_s / outcome.events * 1e6:.0f} us an event")
    scaled_s = cpu_s * rate / SIMPY_EVENTS_PER_S
    print(f"simpy alone: {rate:,.0f} events/s of CPU; at {SIMPY_EVENTS_PER_S:,} this is {scaled_s:.1f} s")
    print(f"results {'exact' if exact else 'WRONG'}; {outcome.events:,} events, {outcome.events / wall_s:,.0f}/s")


if __name__ == "__main__":
    main()
