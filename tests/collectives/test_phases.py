"""What plans consist of: phases that carry what their messages carry, rings by their rails, every figure of a phase."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from distsim.cluster import load_cluster
from distsim.collectives import Compiler, Transfer
from distsim.collectives.algorithms.ring import rings_of
from distsim.collectives.libraries.gloo import compile_gloo, compile_mpi
from distsim.collectives.members import Members
from distsim.collectives.plan import NOTHING, Loads, Plan, PlanPhase, TransferCost
from tests.golden import assert_golden

SOME = {
    "dgx-h100:1": (0, 1, 2),
    "dgx-a100:3": (0, 3, 5, 8, 9, 16),
    "aws-p5:2": tuple(range(0, 16, 2)),
    "polaris:3": tuple(range(12)),
    "mi300x:2": (0, 1, 2, 8, 9, 10, 11),
    "alps-gh200:3": (0, 1, 4, 5, 6, 8),
    "hgx-h100-sharp:4": tuple(range(32)),
    "kestrel:3": (0, 4, 8),
}
"""Cluster -> devices of a group: alone on their nodes, unequal parts of nodes, whole ones."""


def made(on: str, **forced: str) -> tuple[Compiler, Members]:
    cluster = load_cluster(on)
    compiler = Compiler(cluster, **forced)
    return compiler, compiler.group(tuple(cluster.devices[number] for number in SOME[on]), 0)


def every_phase(phases: tuple[PlanPhase, ...]) -> Iterator[PlanPhase]:
    for phase in phases:
        yield phase
        yield from every_phase(phase.then)


def ways_of(compiler: Compiler, group: Members, op: str, nbytes: int) -> Iterator[Plan]:
    """Each algorithm and protocol that NCCL has for an operation."""
    nccl = compiler.nccl
    for one in nccl.candidates(op, nbytes, nccl.machine(group)):
        if one.believed_us is not None:
            yield nccl.plan(group, op, nbytes, one.algo, one.proto)


def by_phases(plan: Plan, links: int) -> NDArray[np.float64]:
    """The bytes on each link."""
    total = np.zeros(links)
    for phase in every_phase(plan.phases):
        total[phase.loads.links] += phase.loads.weights * phase.progress_bytes
        if phase.overlap is not None:
            beside = phase.overlap
            total[beside.loads.links] += beside.loads.weights * (
                beside.first_bytes + beside.pieces * beside.piece_bytes
            )
    return total


def by_messages(plan: Plan, links: int) -> NDArray[np.float64]:
    total = np.zeros(links)
    assert plan.messages is not None
    for index, message in enumerate(plan.messages()):
        assert all(before < index for before in message.after)
        np.add.at(total, list(message.links), message.nbytes)
    return total


@pytest.mark.parametrize("on", [on for on, numbers in SOME.items() if len(numbers) < 16])
def test_phases_carry_what_messages_carry(on: str) -> None:
    """The same bytes over each link, by every algorithm that has messages, of NCCL, gloo, MPI and the ideal library:
    but for NCCL's flags on NVLink, which a message to another GPU's NIC has as between nodes."""
    compiler, group = made(on)
    ideal, _ = made(on, nccl_version="ideal")
    links, nbytes = len(group.capacity), 3 << 20
    plans = [plan for op in ("all_reduce", "all_gather") for plan in ways_of(compiler, group, op, nbytes)]
    uneven = tuple(tuple((src * 7 + dst * 3) % 5 * 1000 for dst in range(group.size)) for src in range(group.size))
    for op in ("all_gather", "all_reduce", "all_to_all", "gather", "scatter", "uneven", "sendrecv"):
        name, splits = ("all_to_all", uneven) if op == "uneven" else (op, None)
        plans += [compile(group, name, nbytes, 1, splits) for compile in (compile_gloo, compile_mpi)]
        transfer = Transfer(name, "nccl", group.devices, nbytes, 1, splits)
        plans += [compiler.compile(transfer), *([ideal.compile(transfer)] if op != "sendrecv" else [])]
    seen, outside = set(), group.links.outside
    for plan in plans:
        if plan.messages is not None:
            seen.add(plan.algo)
            alike = outside | (plan.proto in ("ideal", "gloo", "mpi"))
            moved, expected = by_messages(plan, links), by_phases(plan, links)
            assert moved[alike] == pytest.approx(expected[alike], rel=1e-9), plan
    assert len(seen) > 3


@pytest.mark.parametrize("nodes", [2, 3])
def test_rings_swap_rails_at_each_node(nodes: int) -> None:
    """A ring that enters a node by one rail leaves it by the next, every other node the other way round; rings begin
    their way inside a node at different GPUs."""
    cluster = load_cluster(f"dgx-h100:{nodes}")
    rings = rings_of(Compiler(cluster).group(tuple(cluster.devices), 0))
    assert len(rings) == 8
    for number, ring in enumerate(rings):
        crossings = [(src % 8, dst % 8) for src, dst, away in zip(ring.src, ring.dst, ring.inter, strict=True) if away]
        inside, after = (number, number ^ 1), (number ^ 1, number)
        # from the last GPU of a node to the first of the next: both on one rail, but between an odd last and the first
        expected = (
            [(after[0], after[0]), (inside[0], inside[0])]
            if nodes == 2
            else [(after[0],) * 2, (number,) * 2, (after[0], number)]
        )
        assert crossings == expected
    orders = [tuple(ring.src[:8]) for ring in rings]
    assert len({order[1:7] for order in orders}) == 8
    assert all((order[0], order[7]) == (number, number ^ 1) for number, order in enumerate(orders))
    nics = np.zeros(len(cluster.links))
    for ring in rings:
        np.add.at(nics, ring.ways.flat, 1.0)
    kinds = [link.kind for link in cluster.links]
    assert {int(n) for n, kind in zip(nics, kinds, strict=True) if kind == "nic"} == {1}


@pytest.mark.parametrize(
    ("op", "share", "hops"), [("all_gather", 0.5, 1), ("reduce_scatter", 0.5, 1), ("all_reduce", 1.0, 2)]
)
def test_two_ranks_on_an_ideal_ring(op: str, share: float, hops: int) -> None:
    """Each passes its half on, once or twice: latency and bytes over bandwidth."""
    cluster = load_cluster("dgx-h100:1")
    devices = tuple(cluster.devices[:2])
    compiler = Compiler(cluster, nccl_version="ideal")
    group = compiler.group(devices, 0)
    links = list(group.route(0, 1))
    hop_s, slowest = float(group.links.latency_s[links].sum()), float(group.capacity[links].min())
    for nbytes in (0, 1 << 10, 1 << 30):
        plan = compiler.compile(Transfer(op, "nccl", devices, nbytes))
        assert plan.alone_s(group.capacity) == pytest.approx(hops * hop_s + share * nbytes / slowest, rel=1e-9)


def test_phases_side_by_side_end_with_the_last() -> None:
    """Each after the phase that it follows; bytes go at the rate of the slowest link, or of the phase itself."""
    capacity = np.array([10.0, 4.0])
    slow = Loads(np.array([0, 1]), np.array([1.0, 2.0]))
    moved = [PlanPhase(slow, 8.0, latency_s=1.0), PlanPhase(slow, 8.0, 1.0), PlanPhase(slow, 0.0, latency_s=1.0)]
    assert [phase.alone_s(capacity) for phase in moved] == [5.0, 8.0, 1.0]
    both = PlanPhase(NOTHING, 0.0, latency_s=1.0, then=(moved[0], moved[1]))
    assert both.alone_s(capacity) == 9.0
    assert Plan("", "", 1, 3.0, (both, moved[2])).alone_s(capacity) == 13.0


@pytest.mark.parametrize(("links_s", "inter", "seconds"), [(2.0, False, 1.0 + 10.0), (2.0, True, 2.0 + 20.0)])
def test_a_hop_costs_its_links_and_the_software(links_s: float, inter: bool, seconds: float) -> None:
    """Of the links inside a node a share."""
    cost = TransferCost(intra_links=0.5, intra_hop_s=10.0, inter_hop_s=20.0)
    assert cost.hop_s(links_s, inter) == seconds


def test_a_byte_on_an_edge_takes_what_the_edge_allows() -> None:
    """Its own rate inside a node and between nodes where it has one."""
    cost = TransferCost(edge_bytes_per_s=4.0, near_bytes_per_s=8.0)
    assert [cost.least_s(inter) for inter in (False, True)] == [1 / 8, 1 / 4]
    assert [replace(cost, far_bytes_per_s=2.0).least_s(inter) for inter in (False, True)] == [1 / 8, 1 / 2]


def figures_of(plan: Plan, weights: NDArray[np.float64]) -> str:
    """All that a plan consists of; links by a sum in which each has a weight."""
    texts = [f"{plan.algo}/{plan.proto}/{plan.channels} {plan.floor_s * 1e6:.6g}"]
    for one in every_phase(plan.phases):
        load = float(one.loads.weights @ weights[one.loads.links])
        numbers = [one.progress_bytes, load, one.cap_bytes_per_s, one.latency_s * 1e6, one.streams]
        if one.overlap is not None:
            beside = one.overlap
            load = float(beside.loads.weights @ weights[beside.loads.links])
            numbers += [load, beside.first_bytes, beside.piece_bytes, beside.pieces, beside.every_s * 1e6]
            numbers += [beside.way_s * 1e6, beside.busy_s * 1e6, beside.share, beside.cap_bytes_per_s, beside.streams]
        texts.append(" ".join(f"{round(number, 9):.6g}" for number in numbers))
    return "; ".join(texts)


def test_what_every_way_consists_of() -> None:
    """The start-up, and of each phase bytes, links, rate, latency, streams, and what goes on beside it."""
    text = ""
    for on in SOME:
        compiler, group = made(on)
        weights: NDArray[np.float64] = np.arange(len(group.capacity)) % 7 + np.float64(1.0)
        text += f"-- {on}\n"
        for op in ("all_reduce", "all_gather"):
            for nbytes in (20 << 10, 5 << 20):
                for plan in ways_of(compiler, group, op, nbytes):
                    text += f"{op} {nbytes}: {figures_of(plan, weights)}\n"
                for algo in ("hierarchical", "tree", "ring") if op == "all_reduce" else ():
                    ideal, _ = made(on, nccl_version="ideal", algo=algo)
                    plan = ideal.compile(Transfer(op, "nccl", group.devices, nbytes))
                    text += f"{op} {nbytes}: {figures_of(plan, weights)}\n"
        for op in ("broadcast", "reduce", "all_to_all", "gather", "scatter", "sendrecv", "barrier"):
            plans = [compiler.compile(Transfer(op, "nccl", group.devices, 3 << 20, 1))]
            plans += [compile(group, op, 3 << 20, 1, None) for compile in (compile_gloo, compile_mpi)]
            text += "".join(f"{op}: {figures_of(plan, weights)}\n" for plan in plans)
    assert_golden(Path(__file__).parent / "golden" / "phases.txt", text)
