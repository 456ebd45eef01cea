"""The fluid model against its referee, message by message."""

from __future__ import annotations

import pytest
import simpy

from distsim.cluster import load_cluster
from distsim.network import Transfer, make_network
from tests.kin import one_in

QUICK = [
    ("dgx-h100:1", "all_reduce", "ring"),
    ("dgx-h100:2", "all_reduce", "ring"),
    ("dgx-h100:2", "all_reduce", "tree"),
    ("dgx-h100:2", "all_gather", "ring"),
    ("snellius-h100:2", "all_gather", "ring"),
    ("polaris:4", "reduce_scatter", "ring"),
    ("dgx-a100:4", "all_to_all", None),
]
LONG = [
    ("dgx-h100:8", "all_reduce", "ring"),
    ("dgx-h100:8", "all_reduce", "tree"),
    ("dgx-h100:8", "all_to_all", None),
    ("polaris:16", "all_reduce", "ring"),
    ("dgx-a100:5", "all_reduce", "tree"),
]

SIZES = (1 << 12, 1 << 20, 1 << 26)


def differs(preset: str, op: str, algo: str | None, size: int, version: str | None) -> float:
    """Relative difference of the two fidelities."""
    cluster = load_cluster(preset)
    times = []
    for fidelity in ("fluid", "message"):
        env = simpy.Environment()
        network = make_network(env, cluster, fidelity=fidelity, algo=algo, nccl_version=version)
        times.append(env.run(network.collective(Transfer(op, "nccl", tuple(cluster.devices), size))).end_s)
    return abs(times[0] / times[1] - 1.0)


@pytest.mark.parametrize(
    ("preset", "op", "algo", "size", "version"),
    one_in(5, [pytest.param(*case, size, version) for size in SIZES for case in QUICK for version in (None, "ideal")]),
)
def test_fluid_agrees_with_messages(preset: str, op: str, algo: str | None, size: int, version: str | None) -> None:
    """Ring, tree and all-to-all take the same time within 1 %, small or large, in NCCL's terms and in plain ones; 2.5 %
    where pieces are as long on the way between nodes as in their queue there: the fluid has the longer of the two."""
    plain = (preset, version) == ("snellius-h100:2", "ideal")
    assert differs(preset, op, algo, size, version) < (0.025 if plain else 0.01)


def test_edges_that_are_nearly_as_slow_as_the_slowest_bound_a_ring_too() -> None:
    """NVLink carries LL128 in as long as EFA does, but for 7 %."""
    assert differs("aws-p5:2", "all_reduce", "ring", 1 << 22, None) < 0.005


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "op", "algo", "size"),
    one_in(15, [pytest.param(*case, size) for size in SIZES for case in LONG], first=4),
)
def test_fluid_agrees_with_messages_up_to_64_ranks(preset: str, op: str, algo: str | None, size: int) -> None:
    """The same on 40 and 64 ranks; 2.5 % for trees of Hopper nodes, whose pieces are as long on the
    way as in their queue."""
    assert differs(preset, op, algo, size, None) < (0.025 if (preset, algo) == ("dgx-h100:8", "tree") else 0.01)
