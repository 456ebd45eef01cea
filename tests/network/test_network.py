"""Network: collectives and sends in simpy's time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import simpy

from distsim.cluster import load_cluster
from distsim.collectives import Compiler, Loads, Overlap, Plan, PlanPhase
from distsim.errors import UsageError
from distsim.network import FluidNetwork, Network, Transfer, make_network
from distsim.network.fluid import FluidRun
from distsim.network.network import NETWORKS

pytestmark = pytest.mark.smoke

RING = str(Path(__file__).parent / "ring1024.toml")
MIB = 1 << 20


def test_a_ring_of_1024_has_its_closed_form() -> None:
    """2 (n - 1) / n S / B + 2 (n - 1) alpha, in a handful of events."""
    cluster = load_cluster(RING)
    env = simpy.Environment()
    network = FluidNetwork(env, cluster)
    timing = env.run(network.collective(Transfer("all_reduce", "nccl", tuple(cluster.devices), 64 * MIB)))
    assert timing.end_s == pytest.approx(12_911.7e-6, rel=0.005)
    assert network.statistics().num_flows <= 3


def test_a_cut_link_strikes_during_a_collective() -> None:
    """A NIC that is down for 10 ms in the middle makes an all_reduce 10 ms longer."""
    cluster = load_cluster("dgx-h100:2")
    transfer = Transfer("all_reduce", "nccl", (cluster.devices[0], cluster.devices[8]), 512 * MIB)

    def run(down_s: float) -> float:
        env = simpy.Environment()
        network = FluidNetwork(env, cluster, nccl_version="ideal")
        (nic,) = [link.index for link in cluster.links if link.name == "n0/nic0->leaf0"]

        def fault() -> object:
            yield env.timeout(1e-3)
            network.set_link(nic, up=False)
            yield env.timeout(down_s)
            network.set_link(nic)

        if down_s:
            env.process(fault())  # type: ignore[arg-type]
        return float(env.run(network.collective(transfer)).end_s)

    assert run(10e-3) - run(0.0) == pytest.approx(10e-3, rel=1e-6)


def test_links_report_their_bytes_and_utilisation() -> None:
    """A busy NIC is listed with what it moved, and no more samples than bounded."""
    cluster = load_cluster("dgx-h100:2")
    env = simpy.Environment()
    network = FluidNetwork(env, cluster, nccl_version="ideal")
    transfer = Transfer("all_reduce", "nccl", (cluster.devices[0], cluster.devices[8]), 256 * MIB)
    for _ in range(20):
        env.run(network.collective(transfer))
    busiest = max(network.links_busy(), key=lambda busy: busy.mean_utilisation)
    assert cluster.links[busiest.index].kind in ("nic", "fabric")
    assert busiest.bytes == pytest.approx(20 * 256 * MIB)
    assert 0.9 < busiest.mean_utilisation <= busiest.peak_utilisation <= 1.0
    samples = network.utilisation_samples()
    assert 0 < len(samples) <= 64 * 129
    assert samples == sorted(samples, key=lambda sample: (sample[0], sample[1]))


def test_the_same_run_twice_is_the_same() -> None:
    """Contended traffic ends at identical times, run after run."""
    cluster = load_cluster("dgx-h100:4")

    def run() -> list[float]:
        env = simpy.Environment()
        network = FluidNetwork(env, cluster)
        events = [
            network.collective(Transfer("all_reduce", "nccl", tuple(cluster.devices[k::8]), 8 * MIB, key=k % 3))
            for k in range(8)
        ]
        events += [network.send(cluster.devices[0], cluster.devices[9 + k], MIB * k) for k in range(8)]
        env.run(env.all_of(events))
        return [event.value.end_s for event in events]

    assert run() == run()


@pytest.mark.parametrize(
    "op",
    [
        "all_reduce",
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
        "all_to_all_single",
        "broadcast",
        "reduce",
        "gather",
        "scatter",
        "barrier",
        "monitored_barrier",
    ],
)
@pytest.mark.parametrize("flavour", ["nccl", "gloo", "mpi"])
def test_every_operation_runs_for_every_flavour(op: str, flavour: str) -> None:
    """All of torch.distributed's names give a time above zero on GPUs and on CPU nodes."""
    cluster = load_cluster("dgx-a100:2" if flavour == "nccl" else "ethernet-cpu:4")
    env = simpy.Environment()
    timing = env.run(
        FluidNetwork(env, cluster).collective(Transfer(op, flavour, tuple(cluster.devices), 1 << 20, root=3))
    )
    assert 0.0 < timing.end_s < 1.0


def test_uneven_splits_take_as_long_as_the_fullest_link() -> None:
    """One pair with all the bytes of an all_to_all takes what a send of them takes."""
    cluster = load_cluster("dgx-h100:1")
    size = 8
    splits = tuple(tuple(64 * MIB if (s, d) == (0, 1) else 0 for d in range(size)) for s in range(size))
    env = simpy.Environment()
    network = FluidNetwork(env, cluster, nccl_version="ideal")
    transfer = Transfer("all_to_all_single", "nccl", tuple(cluster.devices), 0, splits=splits)
    assert env.run(network.collective(transfer)).end_s == pytest.approx(
        64 * MIB / cluster.node.nvlink_bytes_per_s, rel=0.01
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"flavour": "ucc"}, "flavour nccl, gloo or mpi, got 'ucc'"),
        ({"op": "all_shuffle"}, "expected an operation .* got 'all_shuffle'"),
        ({"root": 8}, "root from 0 to 7, got 8"),
    ],
)
def test_mistakes_are_named(change: dict[str, object], words: str) -> None:
    """A wrong flavour, operation or root is one line that says what was expected."""
    cluster = load_cluster("dgx-h100:1")
    fields: dict[str, object] = {
        "op": "all_reduce",
        "flavour": "nccl",
        "devices": tuple(cluster.devices),
        "nbytes": 8,
    }
    with pytest.raises(UsageError, match=words):
        FluidNetwork(simpy.Environment(), cluster).collective(Transfer(**{**fields, **change}))  # type: ignore[arg-type]


def test_algorithms_and_protocols_can_be_forced() -> None:
    """--algo and --proto are taken; an unknown one is named with the known."""
    cluster = load_cluster("dgx-h100:2")
    env = simpy.Environment()
    network = FluidNetwork(env, cluster, algo="tree", proto="ll128")
    timing = env.run(network.collective(Transfer("all_reduce", "nccl", tuple(cluster.devices), 1 << 30)))
    assert (timing.algo, timing.proto) == ("Tree", "LL128")
    with pytest.raises(UsageError, match=r"an algorithm of NCCL \(Tree, Ring, .*got 'star'"):
        FluidNetwork(env, cluster, algo="star")


def test_explain_marks_the_one_that_is_taken() -> None:
    """Every candidate has a cost or a reason, and exactly one is chosen: the one that then runs."""
    cluster = load_cluster("dgx-h100:2")
    env = simpy.Environment()
    network = FluidNetwork(env, cluster)
    transfer = Transfer("all_reduce", "nccl", tuple(cluster.devices), 1 << 24)
    rows = Compiler(cluster).explain(transfer)
    (chosen,) = [row for row in rows if row.chosen]
    assert all(row.predicted_s is not None or row.why for row in rows)
    timing = env.run(network.collective(transfer))
    assert (timing.algo, timing.proto) == (chosen.algo, chosen.proto)
    assert timing.end_s == pytest.approx(chosen.predicted_s)


@pytest.mark.parametrize("fidelity", NETWORKS)
def test_every_network_does_all_that_is_asked_of_one(fidelity: str) -> None:
    """Collectives, sends, links that fail and come back, and what was moved: through the protocol alone."""
    cluster = load_cluster("dgx-h100:2")
    network: Network = make_network(simpy.Environment(), cluster, fidelity=fidelity, algo="ring")
    ring = Transfer("all_reduce", "nccl", (cluster.devices[0], cluster.devices[8]), 64 * MIB)
    assert network.fidelity_of(ring) == fidelity
    cables = [link.index for link in cluster.links if link.name == "n0/nic0->leaf0"]
    network.set_link(cables[0], up=False)
    both = network.env.all_of([network.collective(ring), network.send(cluster.devices[0], cluster.devices[1], MIB)])
    network.env.run(until=1.0)
    assert not both.processed
    assert network.stalled() == cables
    assert network.statistics().num_active_flows
    network.set_link(cables[0])
    network.env.run(both)
    assert network.stalled() == []
    assert (network.statistics().num_collectives, network.statistics().num_sends) == (1, 1)
    assert cables[0] in {busy.index for busy in network.links_busy()}
    assert network.utilisation_samples(1)


def test_what_has_no_messages_is_fluid_at_any_fidelity() -> None:
    """NVLS has no form message by message: both networks say so, and take the same time."""
    cluster = load_cluster("dgx-h100:1")
    transfer = Transfer("all_reduce", "nccl", tuple(cluster.devices), 64 * MIB)
    ends = []
    for fidelity in NETWORKS:
        network = make_network(simpy.Environment(), cluster, fidelity=fidelity, algo="nvls")
        assert network.fidelity_of(transfer) == "fluid"
        timing = network.env.run(network.collective(transfer))
        ends.append(timing.end_s)
    assert ends[0] == ends[1]


def test_an_unknown_fidelity_is_a_users_mistake() -> None:
    """Named with those there are."""
    with pytest.raises(UsageError, match="expected fidelity fluid or message, got 'exact'"):
        make_network(simpy.Environment(), load_cluster("dgx-h100:1"), fidelity="exact")


@pytest.mark.parametrize(("name", "num_ranks"), [("dgx-h100:1", 2), ("pcie-4090:1", 8)])
def test_a_collective_of_no_bytes_ends_at_any_fidelity(name: str, num_ranks: int) -> None:
    """Message by message, too, though none takes any time."""
    cluster = load_cluster(name)
    for op in ("all_reduce", "all_gather", "broadcast"):
        transfer = Transfer(op, "nccl", tuple(cluster.devices[:num_ranks]), 0)
        ends = []
        for fidelity in NETWORKS:
            env = simpy.Environment()
            ends.append(env.run(make_network(env, cluster, fidelity=fidelity).collective(transfer)).end_s)
        assert ends[1] == pytest.approx(ends[0], rel=0.5)


def test_a_plan_of_other_parts_goes_on_in_its_own() -> None:
    """Where a way around makes a ring one of more or fewer parts, what is under way moves its own bytes, over the new
    links: at the same speed it ends when it would have."""
    cluster = load_cluster("dgx-h100:2")
    old, new = (np.array([link]) for link in range(2))
    one, rate = np.ones(1), float(cluster.links.bandwidth_bytes_per_s[0])

    def phase(links: np.ndarray, parts: int, beside: bool) -> PlanPhase:
        loads = Loads(links, one)
        then = (phase(links, parts - 1, False),) if parts > 1 else ()
        quick = Overlap(loads, 1.0, 1.0, 1, 0.0, 0.0, 0.0, 0.0) if beside else None
        return PlanPhase(loads, rate * 1e-3, then=then, overlap=quick)

    def run(first: PlanPhase, second: PlanPhase) -> float:
        env = simpy.Environment()
        network = FluidNetwork(env, cluster)
        plans = [Plan("ring", "Simple", 1, 0.0, (one_of_two,)) for one_of_two in (second, first)]
        under_way = FluidRun(network, plans.pop, done := env.event())
        env.run(0.5e-3)
        under_way.lead_anew()
        env.run(done)
        return float(env.now)

    for beside in (False, True):
        for parts, others in ((3, 1), (1, 3)):
            first = phase(old, parts, beside)
            alone_s = run(first, first)
            assert run(first, phase(new, others, not beside)) == pytest.approx(alone_s)
            assert alone_s >= parts * 1e-3
