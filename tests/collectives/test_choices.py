"""What every way of a collective costs, as a table: a change of a figure is seen by whoever reviews it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from distsim.cluster import load_cluster
from distsim.collectives import Compiler, Transfer
from tests.golden import assert_golden

CLUSTERS = {
    "dgx-h100:1": "nccl", "dgx-h100:4": "nccl", "dgx-a100:2": "nccl", "dgx-b200:2": "nccl", "snellius-h100:3": "nccl",
    "polaris:4": "nccl ideal", "aws-p5:2": "nccl", "alps-gh200:2": "nccl", "hgx-h100-sharp:2": "nccl",
    "gcp-a3mega:2": "nccl", "gb200-nvl72:1": "nccl", "pcie-4090:2": "nccl", "frontier:2": "nccl", "mi300x:1": "nccl",
    "mi300x:3": "nccl", "mi355x:2": "nccl", "kestrel:5": "nccl", "gb200-nvl72:2": "nccl", "ethernet-cpu:3": "gloo mpi",
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


VERSIONS = ("2.16.5", "2.18.5", "2.19.4", "2.21.5", "2.23.4", "2.24.3", "2.25.1", "2.28.3", "2.29.2", "2.30.3")
PARTS = {
    "dgx-h100:3": [(0, 1, 2), (3, 11), (0, 1, 2, 8, 9, 16), tuple(range(0, 24, 2)), (5,)],
    "dgx-a100:17": [tuple(range(136)), tuple(range(0, 136, 8))],
    "mi300x:1": [(0, 1, 2, 3), (0, 1, 2, 3, 4), (0, 1, 2, 3, 4, 5), (0, 1, 2, 3, 4, 5, 6)],
    "mi300x:2": [(0, 8), (0, 1, 8), (2, 3, 10, 11)],
    "gb200-nvl72:2": [(0, 1, 72), tuple(range(0, 144, 9))],
    "ethernet-cpu:4": [(0,), (0, 1), (0, 2, 4), (0, 1, 2, 3, 5)],
}
"""Cluster -> groups by the numbers of their devices."""


def ways_of(compiler: Compiler, transfer: Transfer) -> str:
    """The ways of a transfer with their microseconds; the star is at the one that is taken."""
    return ", ".join(
        f"{'*' if way.chosen else ''}{way.algo}/{way.proto}/{way.channels} {way.predicted_s * 1e6:.5g}"
        for way in compiler.explain(transfer)
        if way.predicted_s is not None
    )


def messages_of(compiler: Compiler, transfer: Transfer) -> str:
    """Number and latency of the messages of a transfer, with their bytes over all links."""
    plan = compiler.compile(transfer)
    if plan.messages is None or len(transfer.devices) > MOST:
        return ""
    messages = plan.messages()
    total = sum(one.nbytes * len(one.links) for one in messages)
    late_s = sum(one.latency_s for one in messages)
    return f"{len(messages)} messages {total:.5g} B {late_s * 1e6:.5g} us"


def lines(on: str, flavour: str) -> Iterator[str]:
    """Of each operation and size the ways with their microseconds, and its messages with their bytes over all links."""
    cluster = load_cluster(on)
    compiler = Compiler(cluster, nccl_version="ideal" if flavour == "ideal" else None)
    devices, flavour = tuple(cluster.devices), "nccl" if flavour == "ideal" else flavour
    for op in OPS:
        for name, nbytes in SIZES.items():
            transfer = Transfer(op, flavour, devices, nbytes, root=1 if op in ("broadcast", "reduce", "gather") else 0)
            texts = filter(None, [ways_of(compiler, transfer), messages_of(compiler, transfer)])
            yield f"{op} {name}: {', '.join(texts)}\n"


@pytest.mark.parametrize("on", CLUSTERS)
def test_what_every_way_costs(on: str) -> None:
    """Alone on its links; the star is at the one that is taken."""
    text = "".join(f"-- {flavour}\n{''.join(lines(on, flavour))}" for flavour in CLUSTERS[on].split())
    assert_golden(Path(__file__).parent / "golden" / f"{on.replace(':', '_')}.txt", text)


def test_what_each_release_of_nccl_believes() -> None:
    """By generation of GPU; a release between two rows is as the earlier one."""
    text = ""
    for on in ("dgx-a100:2", "dgx-h100:3", "dgx-b200:2", "pcie-4090:1"):
        cluster = load_cluster(on)
        for version in VERSIONS:
            compiler = Compiler(cluster, nccl_version=version)
            for op in ("all_reduce", "all_gather"):
                for nbytes in (4 << 10, 1 << 20, 256 << 20):
                    transfer = Transfer(op, "nccl", tuple(cluster.devices), nbytes)
                    text += f"{on} {version} {op} {nbytes}: {ways_of(compiler, transfer)}\n"
    assert_golden(Path(__file__).parent / "golden" / "releases.txt", text)


@pytest.mark.parametrize("on", PARTS)
def test_what_a_group_of_some_ranks_costs(on: str) -> None:
    """Groups that fill no node, or unequal parts of several; a phase shows its bytes on links of unlike weights."""
    cluster = load_cluster(on)
    compiler, text = Compiler(cluster), ""
    capacity, weights = compiler.links.capacity, np.arange(len(cluster.links)) % 7 + 1
    flavour = "gloo" if "cpu" in on else "nccl"
    for numbers in PARTS[on]:
        devices = tuple(cluster.devices[number] for number in numbers)
        size = len(devices)
        uneven = tuple(tuple((src * 7 + dst * 3) % 5 * 1000 for dst in range(size)) for src in range(size))
        for op in (*OPS, "scatter", "uneven"):
            splits = uneven if op == "uneven" else None
            nbytes = sum(map(sum, uneven)) if splits else 1 << 20
            name = "all_to_all" if splits else op
            transfer = Transfer(name, flavour, devices, nbytes, root=size - 1 if op != "uneven" else 0, splits=splits)
            plan = compiler.compile(transfer)
            phases = [phase for first in plan.phases for phase in (first, *first.then)]
            loads = [
                f"{float(one.loads.weights @ weights[one.loads.links]) * one.progress_bytes:.5g}" for one in phases
            ]
            alone_us = plan.alone_s(capacity) * 1e6
            texts = [f"{plan.algo} {alone_us:.5g} us", *loads, messages_of(compiler, transfer)]
            text += f"{size} of {numbers[-1]} {op}: {', '.join(filter(None, texts))}\n"
    assert_golden(Path(__file__).parent / "golden" / f"parts_{on.replace(':', '_')}.txt", text)
