"""Several jobs on one fabric: the fluid model against its referee, message by message."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import simpy

from distsim.cluster import Cluster, load_cluster
from distsim.network import Transfer, make_network
from tests.cluster.made import made
from tests.kin import one_in

MIB = 1 << 20
EVEN, ODD = (0, 2, 4, 6), (1, 3, 5, 7)
WIDTH = 2
"""GPUs a node in the jobs, that the referee has not too many messages."""


@dataclass(frozen=True)
class Send:
    """A point-to-point transfer."""

    src: str
    dst: str
    nbytes: int


@dataclass
class Jobs:
    """Jobs on a cluster: each does one thing after the other, all begin at once."""

    cluster: Cluster
    lists: list[list[Transfer | Send]] = field(default_factory=list)

    def add(self, places: Sequence[int], nbytes: int, op: str = "all_reduce", times: int = 1) -> None:
        """A job that does a collective on the devices at *places*, again and again."""
        devices = tuple(self.cluster.devices[place] for place in places)
        self.lists.append([Transfer(op, "nccl", devices, nbytes, key=len(self.lists))] * times)

    def ends(self, fidelity: str, **how: Any) -> list[float]:
        """When each job ends."""
        env = simpy.Environment()
        network = make_network(env, self.cluster, fidelity=fidelity, **how)

        def job(steps: list[Transfer | Send]) -> Iterator[simpy.Event]:
            for step in steps:
                if isinstance(step, Send):
                    yield network.send(step.src, step.dst, step.nbytes)
                else:
                    yield network.collective(step)
            return env.now

        running = [env.process(job(steps)) for steps in self.lists]  # type: ignore[arg-type]
        env.run(env.all_of(running))
        return [process.value for process in running]


def gpus(nodes: Sequence[int], width: int = WIDTH) -> list[int]:
    """Positions of the first GPUs of DGX nodes."""
    return [8 * node + place for node in nodes for place in range(width)]


def spine(routing: str, oversubscription: int = 8) -> Cluster:
    """Eight nodes, two a leaf, under two spines that carry an eighth of what comes from below."""
    figures = {"nodes_per_leaf": 2, "spines": 2, "oversubscription": oversubscription}
    return made(nodes=8, fabric={"kind": "leaf-spine", "routing": routing, **figures})


def dragonfly(routing: str) -> Cluster:
    """Four groups of two switches, two cables between every two."""
    figures = {"bandwidth": "25GB/s", "global_bandwidth": "12.5GB/s", "global_links": 2}
    return made(
        nodes=8,
        fabric={"kind": "dragonfly", "nodes_per_switch": 1, "switches_per_group": 2, "routing": routing, **figures},
    )


def two_jobs(cluster: Cluster, size: int) -> Jobs:
    """On every other node each."""
    jobs = Jobs(cluster)
    jobs.add(gpus(EVEN), size, times=2)
    jobs.add(gpus(ODD), size, times=2)
    return jobs


def later(cluster: Cluster, size: int) -> Jobs:
    """The second of two jobs begins on half of its nodes, so that they meet in the middle."""
    jobs = Jobs(cluster)
    jobs.add(gpus(EVEN), size, times=2)
    jobs.add(gpus(ODD[:2]), size)
    jobs.add(gpus(ODD), size)
    jobs.lists[1:] = [jobs.lists[1] + jobs.lists[2]]
    return jobs


def exchange(cluster: Cluster, size: int) -> Jobs:
    """An all_to_all beside an all_reduce."""
    jobs = Jobs(cluster)
    jobs.add(gpus(EVEN), size, "all_to_all")
    jobs.add(gpus(ODD), size)
    return jobs


def tensor_and_data(cluster: Cluster, size: int) -> Jobs:
    """Tensor parallel inside each of four nodes, data parallel across them."""
    jobs = Jobs(cluster)
    for node in range(4):
        jobs.add(range(8 * node, 8 * node + 8), size // 2, times=4)
    for place in range(8):
        jobs.add(range(place, 32, 8), size)
    return jobs


def sharded(cluster: Cluster, size: int) -> Jobs:
    """All_reduces inside two nodes while parameters are gathered over both, on the same NVLinks."""
    jobs = Jobs(cluster)
    for node in range(2):
        jobs.add(gpus([node], 4), size // 2, times=3)
    jobs.add(gpus((0, 1), 4), 2 * size, "all_gather")
    return jobs


def incast(cluster: Cluster, size: int) -> Jobs:
    """Seven nodes send to one at once, whose NIC is also in a ring over all."""
    jobs = Jobs(cluster)
    jobs.lists = [[Send(cluster.devices[8 * node], cluster.devices[0], size)] for node in range(1, 8)]
    jobs.add(range(0, 64, 8), size)
    return jobs


def gathered(cluster: Cluster, size: int) -> Jobs:
    """The same by a gather."""
    jobs = Jobs(cluster)
    jobs.add(range(0, 64, 8), size, "gather")
    jobs.add(range(0, 64, 8), size)
    return jobs


LOADS = {
    "two jobs on a spine by ECMP": (lambda: spine("ecmp"), two_jobs),
    "two jobs on a spine, adaptive": (lambda: spine("adaptive"), two_jobs),
    "one job later, adaptive": (lambda: spine("adaptive"), later),
    "all_to_all beside a ring, ECMP": (lambda: spine("ecmp"), exchange),
    "all_to_all beside a ring, adaptive": (lambda: spine("adaptive"), exchange),
    "two jobs on a dragonfly by ECMP": (lambda: dragonfly("ecmp"), two_jobs),
    "two jobs on a dragonfly, adaptive": (lambda: dragonfly("adaptive"), two_jobs),
    "all_to_all on a dragonfly, adaptive": (lambda: dragonfly("adaptive"), exchange),
    "tensor and data parallel": (lambda: load_cluster("dgx-h100:4"), tensor_and_data),
    "tensor parallel beside FSDP": (lambda: load_cluster("dgx-h100:2"), sharded),
    "incast of sends": (lambda: load_cluster("dgx-h100:8"), incast),
    "incast of a gather": (lambda: load_cluster("dgx-h100:8"), gathered),
}
SIZES = (4 * MIB, 32 * MIB)


def both(name: str, size: int, **how: Any) -> tuple[list[float], list[float]]:
    """When each job ends, fluid and message by message."""
    cluster, load = LOADS[name]
    jobs = load(cluster(), size)
    return jobs.ends("fluid", **how), jobs.ends("message", **how)


KINDS: list[dict[str, Any]] = [{"nccl_version": "ideal"}, {"algo": "ring"}]
CASES = [
    pytest.param(name, size, how, id=f"{name}, {size // MIB} MiB, {next(iter(how.values()))}")
    for size in SIZES
    for name in LOADS
    for how in KINDS
    if "FSDP" not in name and not ("all_to_all on a dragonfly" in name and "algo" in how)
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size", "how"), one_in(4, CASES))
def test_every_job_ends_when_its_messages_do(name: str, size: int, how: dict[str, str]) -> None:
    """Rings, all-to-alls, gathers and sends that share links: each job's end within 3 %."""
    fluid, messages = both(name, size, **how)
    assert fluid == pytest.approx(messages, rel=0.03)


BESIDE = [(size * MIB, how) for size in (32, 16, 8, 4) for how in ({"algo": "ring"}, KINDS[0], {})]
BESIDE.remove((4 * MIB, {"algo": "ring"}))  # 4 %: which pieces meet in the launch of the next call


@pytest.mark.slow
@pytest.mark.parametrize(("size", "how"), one_in(3, [pytest.param(*case) for case in BESIDE]))
def test_a_gather_of_parameters_beside_tensor_parallel_groups(size: int, how: dict[str, str]) -> None:
    """On the same NVLinks: what the gather has to carry there comes in pieces and can wait for its NICs, and the groups
    leave the links when they are launched and while their pieces travel. Each job's end within 3 %."""
    fluid, messages = both("tensor parallel beside FSDP", size, **how)
    assert fluid == pytest.approx(messages, rel=0.03)


TREES = [name for name in LOADS if "FSDP" not in name]


@pytest.mark.slow
@pytest.mark.parametrize("name", one_in(len(TREES), TREES, first=4))
def test_the_last_of_many_trees_ends_when_its_messages_do(name: str) -> None:
    """Double trees that share links: the end of all within 3 %."""
    fluid, messages = both(name, 32 * MIB, algo="tree")
    assert max(fluid) == pytest.approx(max(messages), rel=0.03)


BESIDE_A_TREE = ["all_to_all beside a ring, ECMP", "all_to_all beside a ring, adaptive", "incast of a gather"]


@pytest.mark.slow
@pytest.mark.parametrize("name", one_in(3, BESIDE_A_TREE))
def test_what_is_beside_a_tree_has_its_share_of_what_is_on_the_wire(name: str) -> None:
    """An exchange or a gather beside a double tree, which has more bytes on the wire for each of payload and goes up
    before it comes down: each ends within 3 % of its messages."""
    fluid, messages = both(name, 4 * MIB, algo="tree")
    assert fluid == pytest.approx(messages, rel=0.03)


def test_a_stream_of_each_job_has_the_same_share_of_a_nic() -> None:
    """A ring over one NIC a node, beside one over all eight of both nodes: each NIC is shared by two streams."""
    cluster = load_cluster("dgx-h100:2")
    alone, beside = Jobs(cluster), Jobs(cluster)
    alone.add([0, 8], 64 * MIB)
    beside.add([0, 8], 64 * MIB)
    beside.add(range(16), 1024 * MIB, "all_gather")
    (first,) = alone.ends("fluid", nccl_version="ideal")
    slowed = beside.ends("fluid", nccl_version="ideal")[0]
    assert slowed == pytest.approx(2 * first, rel=0.02)
    assert slowed == pytest.approx(beside.ends("message", nccl_version="ideal")[0], rel=0.03)


def test_a_ring_that_waits_for_its_pieces_leaves_the_links_to_others() -> None:
    """Two small all_reduces over one spine take no longer than one: each has links idle while pieces travel."""
    jobs = two_jobs(spine("adaptive", 2), 4 * MIB)
    alone = Jobs(jobs.cluster, jobs.lists[:1])
    fluid = jobs.ends("fluid", nccl_version="ideal")
    assert fluid == pytest.approx(jobs.ends("message", nccl_version="ideal"), rel=0.03)
    assert fluid[0] == pytest.approx(alone.ends("fluid", nccl_version="ideal")[0], rel=0.01)
