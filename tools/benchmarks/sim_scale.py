"""1,024 live ranks, 10 all_reduces, each of a fresh and real 64 KiB tensor a rank: wall time, memory, exactness.

    python -m tools.benchmarks.sim_scale [--ranks 4096] [--loop]

Peer: torch's import and its own operators. Aim: 6 s and 0.6 GiB (4,096 ranks: 40 s and 3 GiB), exact results.

The seconds are CPU seconds of the machine that yardstick.py tells of. What counts against them is all that a program
costs that imports distsim and calls `simulate` once. The import of torch in it, which every program of torch pays and
no simulator can shorten, is told beside, and so is what the program's own operators take on one thread: 10,240 fresh
tensors, the sums of 1,024 of them and their copies.

Memory: torch is 0.2 GiB, a rank's thread 0.14 MiB, two generations of tensors are 0.13 GiB (docs/faq.md).

With --loop, 64 ranks make 1,000 all_reduces of one element instead: what a call costs each of them, beside what a bare
lock costs that two threads pass to and fro. sim_peers.py has torch's own simulations beside ours, sim_hand_over.py the
hand-over alone.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time

from tools.benchmarks.arguments import Arguments, whole_nodes
from tools.benchmarks.sim_hand_over import bare_us
from tools.benchmarks.yardstick import scaled, simpy_events_per_s, told

RANKS = 1_024
CALLS = 10


def body(elements: int, calls: int) -> list[float]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    sums: list[float] = []
    for call in range(calls):
        tensor = torch.full((elements,), float((rank + call) % 7))
        dist.all_reduce(tensor)
        sums.append(float(tensor[-1]))
    return [*sums, float(tensor.sum())]


def expected(ranks: int, elements: int, calls: int) -> list[float]:
    sums = [float(sum((rank + call) % 7 for rank in range(ranks))) for call in range(calls)]
    return [*sums, sums[-1] * elements]


def importing_torch_s() -> float:
    """CPU seconds of `import torch`, in a process of its own."""
    told_s = "import time; begun = time.process_time(); import torch; print(time.process_time() - begun)"
    return min(float(subprocess.check_output([sys.executable, "-c", told_s])) for _ in range(2))


def operators_s(ranks: int, elements: int, calls: int) -> float:
    """CPU seconds of what the ranks compute, and of the sums and their copies, without anybody who simulates them."""
    import torch

    torch.set_num_threads(1)
    begun = time.process_time()
    tensors = [torch.full((elements,), float(rank % 7)) for rank in range(ranks)]
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total.add_(tensor)
    for tensor in tensors:
        tensor.copy_(total)
    return (time.process_time() - begun) * calls


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
    print(f"{call_us:.0f} us a call and rank; scaled {scaled(call_us, rate):.0f} (aim 60)")
    print(f"{cpu_s / outcome.events * 1e6:.0f} us an event; a bare hand-over: {lock_us:.1f} us")
    print(told(rate))


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--ranks", type=whole_nodes, default=RANKS)
    parser.add_argument("--loop", action="store_true", help="64 ranks, 1,000 small calls instead")
    args = parser.parse_args()
    if args.loop:
        loop(64, 1_000)
        return
    elements = 16_384
    begun, cpu = time.perf_counter(), time.process_time()
    import distsim

    outcome = distsim.simulate(body, on=f"dgx-h100:{args.ranks // 8}", args=(elements, CALLS))
    wall_s, cpu_s = time.perf_counter() - begun, time.process_time() - cpu
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    right = expected(args.ranks, elements, CALLS)
    exact = all(found == right for found in outcome.results)
    print(f"{args.ranks:,} ranks x {CALLS} all_reduces of 64 KiB: {wall_s:.1f} s, {memory / 2**30:.2f} GiB")
    rate, torch_s, program_s = simpy_events_per_s(), importing_torch_s(), operators_s(args.ranks, elements, CALLS)
    print(f"{cpu_s:.1f} CPU s, scaled {scaled(cpu_s, rate):.1f} s; {cpu_s / outcome.events * 1e6:.0f} us an event")
    print(f"of it {torch_s:.1f} s to import torch, {program_s:.1f} s the program's own operators")
    rest_s = cpu_s - torch_s - program_s
    print(f"simulating alone: {rest_s:.1f} s, scaled {scaled(rest_s, rate):.1f}; {told(rate)}")
    print(f"results {'exact' if exact else 'WRONG'}; {outcome.events:,} events, {outcome.events / wall_s:,.0f}/s")


if __name__ == "__main__":
    main()
