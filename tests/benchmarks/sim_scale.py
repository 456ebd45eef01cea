"""1,024 live ranks, each with a real 64 KiB tensor, 10 all_reduces: wall time, memory, exactness.

    python tests/benchmarks/sim_scale.py [--peer]

Aim: under 15 s and under 4 GiB on 2 cores, exact results. With --peer, torch's LocalTensorMode
(torch.distributed._local_tensor) does one all_reduce of 16 KiB on as many ranks in the same run; it
needs some 18 GB of memory.
"""

from __future__ import annotations

import argparse
import resource
import time

RANKS = 1_024
CALLS = 10


def body(elements: int, calls: int) -> float:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    tensor = torch.full((elements,), float(dist.get_rank() % 7))
    for _ in range(calls):
        dist.all_reduce(tensor)
        tensor.fmod_(7)
    return float(tensor.sum())


def expected(elements: int, calls: int) -> float:
    values = [float(rank % 7) for rank in range(RANKS)]
    for _ in range(calls):
        values = [sum(values) % 7] * RANKS
    return values[0] * elements


def peer(elements: int) -> float:
    """Wall seconds of one all_reduce of LocalTensorMode on as many ranks."""
    import torch
    import torch.distributed as dist
    from torch.distributed._local_tensor import LocalTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    begun = time.perf_counter()
    with LocalTensorMode(RANKS):
        dist.all_reduce(torch.ones(elements))
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", action="store_true", help="LocalTensorMode in the same run (18 GB)")
    args = parser.parse_args()
    import distsim

    elements = 16_384
    begun = time.perf_counter()
    outcome = distsim.simulate(body, on="dgx-h100:128", args=(elements, CALLS))
    wall_s = time.perf_counter() - begun
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    exact = set(outcome.results) == {expected(elements, CALLS)}
    print(f"{RANKS:,} ranks x {CALLS} all_reduces of 64 KiB: {wall_s:.1f} s (aim 15), {memory / 2**30:.2f} GiB (aim 4)")
    print(f"results {'exact' if exact else 'WRONG'}; {outcome.events:,} events, {outcome.events / wall_s:,.0f}/s")
    if args.peer:
        peer_s = peer(4_096)
        print(f"LocalTensorMode, one of 16 KiB: {peer_s:.1f} s; ours, ten of 64 KiB: {wall_s / peer_s:.2f} of it")


if __name__ == "__main__":
    main()
