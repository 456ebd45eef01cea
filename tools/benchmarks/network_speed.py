"""Speed of the network model. Prints figures, asserts nothing.

Peer: simpy alone, the closed form, the bare routes. Aim: in each line.

    python -m tools.benchmarks.network_speed
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import simpy

from distsim.cluster import load_cluster
from distsim.network import FluidNetwork, Transfer
from distsim.network.bench import OPS, bench
from tools.benchmarks.arguments import Arguments
from tools.benchmarks.yardstick import scaled, simpy_events_per_s, told

HERE = Path(__file__).parent
CLOSED_FORM_US = 2 * 1023 / 1024 * (64 << 20) / 50e9 * 1e6 + 2 * 1023 * 5.0


def closed_form() -> None:
    """One 64 MiB ring all_reduce on 1,024 ranks behind 50 GB/s, 5 us NICs, with making the network; each time on a
    cluster loaded anew, of which the first makes what a process makes once."""
    spent: list[tuple[float, float]] = []
    for _ in range(7):
        cluster = load_cluster(str(HERE / "network_ring1024.toml"))
        env = simpy.Environment()
        began = time.process_time()
        network = FluidNetwork(env, cluster)
        timing = env.run(network.collective(Transfer("all_reduce", "nccl", tuple(cluster.devices), 64 << 20)))
        first_s, began = time.process_time() - began, time.process_time()
        env.run(network.collective(Transfer("all_reduce", "nccl", tuple(cluster.devices), 64 << 20)))
        spent.append((first_s * 1e3, (time.process_time() - began) * 1e3))
    took_us = (timing.end_s - timing.start_s) * 1e6
    print(
        f"ring of 1,024, 64 MiB: {took_us:,.1f} us simulated, closed form {CLOSED_FORM_US:,.1f} us "
        f"({took_us / CLOSED_FORM_US - 1:+.4%}; target: within 0.5 %); {network.statistics().num_flows} flows"
    )
    rate = simpy_events_per_s()
    first_ms, again_ms = (statistics.median(column) for column in zip(*spent, strict=True))
    print(
        f"  {first_ms:.1f} CPU ms, scaled {scaled(first_ms, rate):.1f} (aim: 5); the second {again_ms:.2f} ms; "
        f"the first of the process {spent[0][0]:.1f} ms"
    )


def command_line() -> None:
    """The whole command, process start included."""
    command = [
        sys.executable,
        "-m",
        "distsim",
        "bench",
        "all_reduce",
        "--on",
        "dgx-h100:128",
        "-b",
        "8",
        "-e",
        "8G",
        "-f",
        "2",
    ]
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    print(
        f"distsim bench all_reduce --on dgx-h100:128 -b 8 -e 8G -f 2: {time.perf_counter() - began:.2f} s "
        "(target: under 3 s)"
    )


def loading() -> None:
    """1,024 nodes."""
    load_cluster("dgx-h100:2")  # the preset is read once
    began = time.process_time()
    cluster = load_cluster("dgx-h100:1024")
    loaded_ms = (time.process_time() - began) * 1e3
    began = time.process_time()
    FluidNetwork(simpy.Environment(), cluster)
    made_ms = (time.process_time() - began) * 1e3
    print(f"dgx-h100:1024: {loaded_ms:.1f} CPU ms to load (aim: 5), {made_ms:.1f} ms to make its network")


def sweep(nodes: int) -> None:
    """31 sizes of 8 collectives."""
    began = time.process_time()
    cluster = load_cluster(f"dgx-h100:{nodes}")
    network = FluidNetwork(simpy.Environment(), cluster)
    sizes = [8 << power for power in range(31)]
    for op in OPS[:8]:
        bench(op, cluster, sizes, network=network)
    took_s = time.process_time() - began
    print(f"31 sizes x 8 collectives on {8 * nodes:,} ranks: {took_s:.2f} CPU s (target: under 10 s)")


def growth() -> None:
    """Cost against number of links."""
    for nodes in (16, 32, 64, 128, 256):
        cluster = load_cluster(f"dgx-h100:{nodes}")
        devices = tuple(cluster.devices)
        env = simpy.Environment()
        began = time.perf_counter()
        network = FluidNetwork(env, cluster)
        for op in ("all_reduce", "all_gather", "all_to_all"):
            env.run(network.collective(Transfer(op, "nccl", devices, 1 << 28)))
        took_ms = (time.perf_counter() - began) * 1e3
        print(
            f"{nodes * 8:5d} ranks, {len(cluster.links):6d} links: {took_ms:7.1f} ms for three collectives, "
            f"{took_ms * 1e3 / len(cluster.links):.2f} us a link"
        )


def many_at_once() -> None:
    """128 tensor-parallel groups and 8 data-parallel groups, 50 times each, all on one network."""
    cluster = load_cluster("dgx-h100:128")
    devices = cluster.devices
    env = simpy.Environment()
    network = FluidNetwork(env, cluster)
    inner = [Transfer("all_reduce", "nccl", tuple(devices[8 * n : 8 * n + 8]), 16 << 20) for n in range(128)]
    outer = [Transfer("all_reduce", "nccl", tuple(devices[k::8]), 64 << 20) for k in range(8)]

    def run(transfer: Transfer) -> object:
        for _ in range(50):
            yield network.collective(transfer)

    began = time.perf_counter()
    for transfer in inner + outer:
        env.process(run(transfer))
    env.run()
    took_s = time.perf_counter() - began
    counts = network.statistics()
    print(
        f"136 groups x 50 all_reduces on 1,024 ranks: {took_s:.2f} s, {counts.num_flows} flows, "
        f"{counts.num_settlements} settlements, "
        f"{took_s / counts.num_collectives * 1e6:.0f} us a collective"
    )


def crowded(times: int) -> None:
    """128 groups of 64 ranks drawn from shared rails, some all_reduces each: every NIC carries several groups."""
    cluster = load_cluster("dgx-h100:128")
    draw = random.Random(0)
    nodes = [sorted(draw.sample(range(128), 64)) for _ in range(128)]
    groups = [tuple(cluster.devices[node * 8 + index % 8] for node in chosen) for index, chosen in enumerate(nodes)]
    env = simpy.Environment()
    network = FluidNetwork(env, cluster)

    def run(transfer: Transfer) -> object:
        for _ in range(times):
            yield network.collective(transfer)

    began = time.process_time()
    for group in groups:
        env.process(run(Transfer("all_reduce", "nccl", group, 64 << 20)))
    env.run()
    counts = network.statistics()
    print(
        f"128 groups of 64 on shared rails x {times} all_reduces: {time.process_time() - began:.2f} CPU s, "
        f"{counts.num_settlements} settlements, virtual time {env.now!r} s (aim: {1.0 if times == 1 else 1.5} s)"
    )


def planning() -> None:
    """The first collective of 16,384 ranks, beside asking for its ring's routes one by one."""
    cluster = load_cluster("dgx-h100:2048")
    devices = tuple(cluster.devices)
    network = FluidNetwork(simpy.Environment(), cluster)
    for op in ("all_reduce", "all_gather", "all_to_all"):
        began = time.process_time()
        network.collective(Transfer(op, "nccl", devices, 64 << 20))
        print(f"first {op} of 16,384 ranks: {time.process_time() - began:.2f} CPU s to plan (aim: 1 s)")
    began = time.process_time()
    for a, b in pairwise(devices):
        for key in range(8):
            cluster.route(a, b, key)
    print(f"  the routes of its eight rings alone, one by one: {time.process_time() - began:.2f} CPU s")


def main() -> None:
    Arguments(__doc__).parse_args()
    print(told(simpy_events_per_s()))
    loading()
    closed_form()
    command_line()
    sweep(128)
    sweep(2048)
    growth()
    many_at_once()
    crowded(1)
    crowded(10)
    planning()


if __name__ == "__main__":
    main()
