"""What NCCL does on many nodes and other fabrics, each held to figures that were measured (calibration/tables)."""

from __future__ import annotations

import json
import tempfile

import pytest

from distsim.cluster import Cluster, load_cluster
from distsim.collectives import Compiler, Transfer
from distsim.collectives.algorithms.ring import ring_loads
from distsim.collectives.libraries.nccl_channels import sent_channels
from distsim.collectives.members import LinkArrays, Members
from distsim.collectives.plan import Plan
from tests.kin import one_in

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def plan(on: str | Cluster, op: str, nbytes: int, per_node: int | None = None, **forced: str) -> tuple[Plan, float]:
    """What is done for a collective over all GPUs (or *per_node* a node) and how many us it takes alone."""
    cluster = load_cluster(on) if isinstance(on, str) else on
    compiler = Compiler(cluster, **forced)  # type: ignore[arg-type]
    devices = tuple(slot.device for slot in cluster.place(cluster.num_nodes, per_node))
    made = compiler.compile(Transfer(op, "nccl", devices, nbytes))
    return made, made.alone_s(compiler.links.capacity) * 1e6


def changed(preset: str, nodes: int, table: str, **keys: object) -> Cluster:
    """A preset with other values in one table of its file."""
    lines = [
        f'base = "{preset}"',
        f"nodes = {nodes}",
        f"[{table}]",
        *(f"{key} = {json.dumps(keys[key])}" for key in keys),
    ]
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write("\n".join(lines))
        file.flush()
        return load_cluster(file.name)


@pytest.mark.parametrize(
    ("on", "per_node", "gbps"),
    [("dgx-h100:2", 8, 45.9), ("dgx-h100:10", 4, 26.2), ("dgx-h100:10", 8, 15.2), ("dgx-b200:16", 8, 14.4)],
)
def test_a_send_has_fewer_channels_as_peers_grow(on: str, per_node: int, gbps: float) -> None:
    """sendrecv of 1 GiB: NCCL halves the channels a peer, so that all peers fit into one round."""
    _, us = plan(on, "sendrecv", GIB, per_node, nccl_version="2.29.2")
    assert GIB / us / 1e3 == pytest.approx(gbps, rel=0.15)


def test_channels_of_a_send_by_release() -> None:
    """Two before 2.20 whatever comes; then one beyond 32 ranks on 16 channels; from 2.29 on four at 400 Gb/s."""
    ranks = (16, 40, 80)
    assert [sent_channels((2, 18), 16, size, 50.0, 1.0) for size in ranks] == [2, 2, 2]
    assert [sent_channels((2, 21), 16, size, 50.0, 1.0) for size in ranks] == [2, 1, 1]
    assert [sent_channels((2, 29), 16, size, 50.0, 1.0) for size in ranks] == [4, 2, 1]


def test_sharp_goes_over_the_nics() -> None:
    """1 GiB reduced in the fabric takes a quarter of the NICs' speed four times as long."""
    usual = plan(changed("dgx-h100", 8, "node.nic", collnet=True), "all_reduce", GIB)
    slow = plan(changed("dgx-h100", 8, "node.nic", collnet=True, bandwidth="50Gbps"), "all_reduce", GIB, algo="NVLS")
    assert usual[0].algo == slow[0].algo == "NVLS"
    assert slow[1] > 4 * usual[1]


@pytest.mark.parametrize("nbytes", [8, 512 * KIB, 256 * MIB])
@pytest.mark.parametrize(
    ("preset", "collnet"),
    one_in(
        4,
        [
            pytest.param("polaris", False),
            pytest.param("dgx-h100", True),
            pytest.param("dgx-h100", False),
            pytest.param("gcp-a3mega", False),
            pytest.param("aws-p4d", False),
        ],
    ),
)
def test_more_nodes_are_never_quicker(preset: str, collnet: bool, nbytes: int) -> None:
    """The same buffer over more nodes takes as long or longer, whatever the operation and the algorithm."""
    ops = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
    for op in ops:
        for algo in ("Ring", "Tree", "NVLS", "NVLSTree")[: 4 if op == "all_reduce" and preset == "dgx-h100" else 1]:
            if algo == "NVLS" and not collnet:
                continue
            for proto in ("LL", "Simple") if algo in ("Ring", "Tree") else ("Simple",):
                times = [
                    plan(changed(preset, nodes, "node.nic", collnet=collnet), op, nbytes, algo=algo, proto=proto)[1]
                    for nodes in (2, 3, 8, 16)
                ]
                assert times == sorted(times), (op, algo, proto, times)


def test_rings_of_eight_use_all_pairs_alike() -> None:
    """Where eight GPUs are linked pairwise, as on MI300X, each of the 56 links carries the same."""
    cluster = changed("dgx-h100", 1, "node.gpu.nvlink", topology="mesh", switches=0, sharp=False)
    loads = ring_loads(Members(cluster, tuple(cluster.devices), 0, LinkArrays(cluster)))
    assert len(loads.links) == 56
    assert loads.weights.tolist() == pytest.approx([1 / 7] * 56)


@pytest.mark.parametrize(
    ("on", "nbytes", "us"),
    [
        ("polaris:setup4:8", 4 * KIB, 510.0),
        ("polaris:setup4:8", 8 * KIB, 127.0),
        ("polaris:setup5:8", 4 * KIB, 633.0),
        ("polaris:setup5:8", 8 * KIB, 290.0),
        ("polaris:setup5:256", 64 * KIB, 23_400.0),
        ("polaris:setup5:256", MIB, 10_500.0),
    ],
)
def test_all_to_all_pays_for_each_remote_message(on: str, nbytes: int, us: float) -> None:
    """On Slingshot a message to another node costs 4 to 10 us, and more where it is so short that the host sends it."""
    assert plan(on, "all_to_all", nbytes)[1] == pytest.approx(us, rel=0.25)


def test_tiny_messages_of_a_grace_host_cost_no_more_than_others() -> None:
    """It reads GPU memory by itself: an all_to_all is not quicker for more bytes, as it is on Polaris."""
    assert plan("alps-gh200:32", "all_to_all", 16 * KIB)[1] <= plan("alps-gh200:32", "all_to_all", 64 * KIB)[1]


@pytest.mark.parametrize(
    ("on", "nbytes", "us"),
    [
        ("polaris:setup5:8", 16 * KIB, 265.0),
        ("polaris:setup5:8", 512 * KIB, 886.0),
        ("polaris:setup5:8", 2 * MIB, 955.0),
        ("polaris:setup5:256", 64 * KIB, 8034.0),
        ("polaris:setup5:256", 16 * MIB, 27_900.0),
    ],
)
def test_a_ring_pays_for_each_message_of_a_step(on: str, nbytes: int, us: float) -> None:
    """all_gather: a step between nodes is as long as it has messages: one a channel in use, two where it is sliced."""
    assert plan(on, "all_gather", nbytes)[1] == pytest.approx(us, rel=0.3)


def test_messages_of_simple_cost_what_two_machines_say_together() -> None:
    """all_gather of 16 MiB: 1,632 us on 8 nodes of Polaris, 956 on 16 of Kestrel."""
    assert 900.0 < plan("polaris:setup5:8", "all_gather", 16 * MIB)[1] < 1632.0


@pytest.mark.parametrize(
    ("on", "us"), [("polaris:setup4:2", 19.2), ("polaris:setup5:8", 73.0), ("polaris:setup5:256", 184.0)]
)
def test_a_hop_on_slingshot_goes_by_who_matches_messages(on: str, us: float) -> None:
    """all_reduce of 8 bytes: the NIC matches in setup 4, the host in setup 5."""
    assert plan(on, "all_reduce", 8)[1] == pytest.approx(us, rel=0.2)


@pytest.mark.parametrize(
    ("on", "op", "us"),
    [
        ("gcp-a3mega:2", "all_gather", 85.0),
        ("gcp-a3mega:2", "all_reduce", 123.0),
        ("gcp-a3ultra:2", "all_gather", 56.0),
        ("aws-p4de:2", "all_reduce", 161.0),
        ("sophia:2", "all_gather", 36.0),
        ("sophia:2", "all_reduce", 36.0),
    ],
)
def test_a_fabrics_hop_holds_for_two_operations(on: str, op: str, us: float) -> None:
    """2 KiB over two nodes of each fabric."""
    assert plan(on, op, 2 * KIB)[1] == pytest.approx(us, rel=0.2)


def test_a_tuner_keeps_to_nccls_bounds_for_ll() -> None:
    """On a network whose maker tunes NCCL, LL does not reach to sizes that NCCL's own thresholds end far below."""
    for on in ("gcp-a3mega:2", "gcp-a3high:2", "aws-p5:2"):
        assert plan(on, "all_reduce", 32 * MIB)[0].proto != "LL"
        assert plan(on, "all_gather", 64 * MIB)[0].proto != "LL"


def test_choices_are_those_of_the_release() -> None:
    """On 4 nodes of Alps 2.23 takes LL's ring to 1 MiB and a tree beyond; before 2.23 a tree in Simple was shunned."""
    chosen = {nbytes: plan("alps-gh200:4", "all_reduce", nbytes, nccl_version="2.23.4")[0] for nbytes in (MIB, 2 * MIB)}
    assert (chosen[MIB].algo, chosen[MIB].proto) == ("Ring", "LL")
    assert (chosen[2 * MIB].algo, chosen[2 * MIB].proto) == ("Tree", "Simple")
    assert plan("alps-gh200:4", "all_reduce", 2 * MIB, nccl_version="2.21.5")[0].algo == "Ring"


@pytest.mark.parametrize(("nodes", "nbytes", "us"), [(128, 32 * KIB, 8254.0), (128, MIB, 9235.0)])
def test_a_thread_sends_through_sockets_one_message_after_the_other(nodes: int, nbytes: int, us: float) -> None:
    """alltoall on Polaris without a plugin, 2.18 (argonne-lcf/alcf-nccl-tests at 385be33: not fitted, only 2 nodes of
    2.21 are): 16 us a message, whatever starts the kernel."""
    assert plan(f"polaris:setup1:{nodes}", "all_to_all", nbytes, nccl_version="2.18.6")[1] == pytest.approx(
        us, rel=0.15
    )


@pytest.mark.parametrize("nbytes", [32 * MIB, 1024 * MIB])
def test_sockets_of_2_18_are_as_slow_as_later_ones_with_nics_told(nbytes: int) -> None:
    """all_gather on 8 nodes of Polaris, setup 2 (argonne-lcf/alcf-nccl-tests at 385be33: not fitted)."""
    us = {32 * MIB: 11_211.0, 1024 * MIB: 310_185.0}[nbytes]
    assert plan("polaris:setup2:8", "all_gather", nbytes, nccl_version="2.18.6")[1] == pytest.approx(us, rel=0.15)


def test_a_send_inside_a_node_starts_no_later_than_a_collective() -> None:
    """alltoall of 8 H20 takes 10.5 us to 4 KiB (deepseek-ai/DeepEP issue 303); it was said to take 28."""
    assert plan("dgx-h200:1", "all_to_all", 4 * KIB)[1] < 1.1 * plan("dgx-h200:1", "all_reduce", 8)[1]


def test_rccl_launches_an_all_to_all_as_one_call() -> None:
    """alltoall of 8 MI355X in one process takes 30 us to 128 KiB, an all_reduce 33 (tables/_read.csv); NCCL's takes
    twice its all_reduce."""
    times = {
        on: [plan(on, op, 4 * KIB, launcher="shared")[1] for op in ("all_to_all", "all_reduce")]
        for on in ("mi355x:1", "dgx-a100:1")
    }
    assert times["mi355x:1"][0] == pytest.approx(times["mi355x:1"][1], rel=0.1)
    assert times["dgx-a100:1"][0] > 1.5 * times["dgx-a100:1"][1]


def test_sockets_of_two_releases_differ() -> None:
    """32 MiB of all_gather on 2 nodes of Polaris without a plugin: 4.3 ms with 2.18, 9.6 ms with 2.21."""
    old = plan("polaris:setup1:2", "all_gather", 32 * MIB, nccl_version="2.18.6")[1]
    new = plan("polaris:setup1:2", "all_gather", 32 * MIB, nccl_version="2.21.5")[1]
    assert old == pytest.approx(4300, rel=0.15)
    assert new == pytest.approx(9550, rel=0.15)


def test_a_ring_loses_with_nodes() -> None:
    """1 GiB of all_gather over 32 nodes of InfiniBand takes over 8 % more than its share of two nodes' time."""
    two, many = (plan(f"dgx-h100:{nodes}", "all_gather", GIB, algo="Ring", proto="Simple")[1] for nodes in (2, 32))
    assert many / two > 1.08 * (255 / 256) / (15 / 16)


def test_nvls_gives_less_to_four_gpus_than_to_eight() -> None:
    """Each GPU's link carries the buffer and its own part of it: 1 + 1/n."""
    four, eight = (plan("dgx-h100:1", "all_reduce", GIB, size, algo="NVLS")[1] for size in (4, 8))
    assert four / eight == pytest.approx(1.25 / 1.125, rel=0.03)


def test_a_grace_host_launches_in_half_the_time() -> None:
    """Up to 8 KiB inside a node: 7.8 to 9.6 us on GH200, 13 us and more on an x86 host."""
    assert plan("alps-gh200:1", "all_reduce", 8)[1] == pytest.approx(8.8, rel=0.15)
    assert plan("dgx-h100:1", "all_reduce", 8)[1] > 12.0
