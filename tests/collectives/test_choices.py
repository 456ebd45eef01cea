"""What every way of a collective costs, as a table: a change of a figure is seen by whoever reviews it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from distsim.cluster import load_cluster
from distsim.collectives import Compiler, Transfer
from tests.golden import assert_golden

CLUSTERS = {
    "dgx-h100:1": "nccl", "dgx-h100:4": "nccl", "dgx-a100:2": "nccl", "dgx-b200:2": "nccl", "snellius-h100:3": "nccl",
    "polaris:4": "nccl ideal", "aws-p5:2": "nccl", "alps-gh200:2": "nccl", "hgx-h100-sharp:2": "nccl",
    "gcp-a3mega:2": "nccl", "gb200-nvl72:1": "nccl", "pcie-4090:2": "nccl", "frontier:2": "nccl", "mi300x:1": "nccl",
    "ethernet-cpu:3": "gloo mpi",
}  # fmt: skip
"""Cluster -> whose algorithms."""
OPS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "all_to_all",
    "gather",
    "sendrecv",
    "barrier",
)
MOST = 16
"""Ranks up to which messages are counted, too."""
SIZES = {"1 KiB": 1 << 10, "96 KiB": 96 << 10, "3 MiB": 3 << 20, "1 GiB": 1 << 30}


def lines(on: str, flavour: str) -> Iterator[str]:
    """Of each operation and size the ways with their microseconds, and its messages with their bytes over all links."""
    cluster = load_cluster(on)
    compiler = Compiler(cluster, nccl_version="ideal" if flavour == "ideal" else None)
    devices, flavour = tuple(cluster.devices), "nccl" if flavour == "ideal" else flavour
    for op in OPS:
        for name, nbytes in SIZES.items():
            transfer = Transfer(op, flavour, devices, nbytes, root=1 if op in ("broadcast", "reduce", "gather") else 0)
            ways = [
                f"{'*' if way.chosen else ''}{way.algo}/{way.proto}/{way.channels} {way.predicted_s * 1e6:.5g}"
                for way in compiler.explain(transfer)
                if way.predicted_s is not None
            ]
            plan = compiler.compile(transfer)
            if plan.messages is not None and len(devices) <= MOST:
                messages = plan.messages()
                total = sum(one.nbytes * len(one.links) for one in messages)
                late_s = sum(one.latency_s for one in messages)
                ways.append(f"{len(messages)} messages {total:.5g} B {late_s * 1e6:.5g} us")
            yield f"{op} {name}: {', '.join(ways)}\n"


@pytest.mark.parametrize("on", CLUSTERS)
def test_what_every_way_costs(on: str) -> None:
    """Alone on its links; the star is at the one that is taken."""
    text = "".join(f"-- {flavour}\n{''.join(lines(on, flavour))}" for flavour in CLUSTERS[on].split())
    assert_golden(Path(__file__).parent / "golden" / f"{on.replace(':', '_')}.txt", text)
