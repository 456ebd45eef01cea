"""How long clusters take to build and to route.

Peer: none. Aim: none of its own; network_speed.py has that of loading 1,024 nodes.

    python -m tools.benchmarks.cluster_build
"""

from __future__ import annotations

import random
import time

from distsim.cluster import load_cluster
from tools.benchmarks.arguments import Arguments

ROUTES = 100_000


def main() -> None:
    """A line for each size; 16,384 accelerators are the largest of the project's figures."""
    Arguments(__doc__).parse_args()
    load_cluster("dgx-h100")  # pydantic is imported once
    print("cluster         devices     links  build s  graph s  new us cached us")
    for name in ("dgx-h100:1", "dgx-h100:128", "dgx-h100:2048", "gb200-nvl72:16"):
        started = time.perf_counter()
        cluster = load_cluster(name)
        build_s = time.perf_counter() - started
        started = time.perf_counter()
        _ = cluster.graph
        graph_s = time.perf_counter() - started
        devices = cluster.devices
        chance = random.Random(0)
        pairs = [(chance.choice(devices), chance.choice(devices)) for _ in range(ROUTES)]
        took_us = []
        for _ in range(2):
            started = time.perf_counter()
            for src, dst in pairs:
                cluster.route(src, dst)
            took_us.append((time.perf_counter() - started) / ROUTES * 1e6)
        print(
            f"{name:<14} {len(devices):>8,} {len(cluster.links):>9,} {build_s:>8.3f} {graph_s:>8.3f} "
            f"{took_us[0]:>7.2f} {took_us[1]:>9.2f}"
        )


if __name__ == "__main__":
    main()
