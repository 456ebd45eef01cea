"""Collectives at once: one test for each resource they can share."""

from __future__ import annotations

import pytest
import simpy

from distsim.cluster import Cluster, load_cluster
from distsim.network import Timing, Transfer, make_network

pytestmark = pytest.mark.smoke

MIB = 1 << 20


def together(cluster: Cluster, transfers: list[Transfer], **how: str) -> list[float]:
    """Seconds that each takes when all start at once."""
    env = simpy.Environment()
    network = make_network(env, cluster, **how)
    events = [network.collective(transfer) for transfer in transfers]
    env.run(env.all_of(events))
    timings: list[Timing] = [event.value for event in events]
    return [timing.end_s - timing.start_s for timing in timings]


def reduce_over(cluster: Cluster, positions: list[int], nbytes: int, op: str = "all_reduce") -> Transfer:
    """A collective over devices by position."""
    return Transfer(op, "nccl", tuple(cluster.devices[place] for place in positions), nbytes)


def test_two_all_reduces_over_one_nic_slow_each_other() -> None:
    """Two rings between the same two NICs take twice as long as one."""
    cluster = load_cluster("dgx-h100:2")
    one = reduce_over(cluster, [0, 8], 256 * MIB)
    other = Transfer("all_reduce", "nccl", one.devices, 256 * MIB, key=1)
    (alone,) = together(cluster, [one], nccl_version="ideal")
    both = together(cluster, [one, other], nccl_version="ideal")
    assert both == pytest.approx([2 * alone, 2 * alone], rel=0.01)


def test_rails_do_not_disturb_each_other() -> None:
    """All_reduces over different NICs of a rail-optimised cluster take what each takes alone."""
    cluster = load_cluster("dgx-h100:2")
    rails = [reduce_over(cluster, [k, 8 + k], 256 * MIB) for k in range(8)]
    (alone,) = together(cluster, rails[:1], nccl_version="ideal")
    assert together(cluster, rails, nccl_version="ideal") == pytest.approx([alone] * 8, rel=0.01)


def test_tensor_parallel_inside_and_data_parallel_across_share_nothing_but_nvlink() -> None:
    """An all_reduce inside a node and one across nodes use other links: neither waits for the other."""
    cluster = load_cluster("dgx-h100:2")
    inside = reduce_over(cluster, list(range(8)), 256 * MIB)
    across = reduce_over(cluster, [0, 8], 64 * MIB)
    alone = [together(cluster, [one], nccl_version="ideal")[0] for one in (inside, across)]
    assert together(cluster, [inside, across], nccl_version="ideal") == pytest.approx(alone, rel=0.01)


def test_an_incast_takes_the_receivers_nic_for_all_senders() -> None:
    """Seven nodes that send to one GPU at once each get a seventh of its NIC."""
    cluster = load_cluster("dgx-h100:8")
    env = simpy.Environment()
    network = make_network(env, cluster, nccl_version="ideal")
    target = cluster.devices[0]
    sends = [network.send(cluster.devices[8 * node], target, 64 * MIB) for node in range(1, 8)]
    env.run(env.all_of(sends))
    expected_s = 7 * 64 * MIB / cluster.node.nic_bytes_per_s
    assert [send.value.end_s for send in sends] == pytest.approx([expected_s] * 7, rel=0.01)


def test_an_oversubscribed_spine_slows_what_crosses_it() -> None:
    """Behind a 3:1 spine, forty pairs of CPU nodes on different leaves are slower than forty under one
    leaf each."""
    cluster = load_cluster("ethernet-cpu:80")
    per_node = len(cluster.devices) // cluster.num_nodes

    def slowest(pairs: list[tuple[int, int]]) -> float:
        transfers = [reduce_over(cluster, [a * per_node, b * per_node], 16 * MIB) for a, b in pairs]
        return max(together(cluster, transfers, nccl_version="ideal"))

    near = slowest([(2 * pair, 2 * pair + 1) for pair in range(40)])
    far = slowest([(pair, pair + 40) for pair in range(40)])
    assert far > 2.0 * near


CASES = {
    "one NIC": ("dgx-h100:2", [([0, 8], 64 * MIB, "all_reduce"), ([0, 8], 64 * MIB, "all_reduce")]),
    "one switch": (
        "dgx-h100:1",
        [(list(range(8)), 64 * MIB, "all_reduce"), (list(range(8)), 64 * MIB, "all_to_all")],
    ),
    "inside and across": (
        "dgx-h100:2",
        [(list(range(8)), 64 * MIB, "all_reduce"), (list(range(16)), 64 * MIB, "all_reduce")],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_referee_agrees_on_contended_cases(name: str) -> None:
    """Fluid and message by message, the last of the contenders ends at the same time within 3 %."""
    preset, groups = CASES[name]
    cluster = load_cluster(preset)
    transfers = [
        Transfer(op, "nccl", tuple(cluster.devices[place] for place in places), nbytes, key=number)
        for number, (places, nbytes, op) in enumerate(groups)
    ]
    fluid = max(together(cluster, transfers, nccl_version="ideal"))
    referee = max(together(cluster, transfers, nccl_version="ideal", fidelity="message"))
    assert fluid == pytest.approx(referee, rel=0.03)
