"""What NCCL and RCCL do on nodes and fabrics, by their own sources, held to figures that were published.

Most of the figures are not fitted: argonne-lcf/alcf-nccl-tests at 385be33 (Polaris),
boeschf/nccl-benchmark-on-alps-2025 at 897cff4 (Alps), hisohara/ai-scripts at 7b8b1ec (MI300X, MI325X),
dstackai/dstack and NVIDIA/nccl-tests issue 309 (H100), oracle-quickstart/oci-hpc-oke (GB200), the others are those of
calibration/tables.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from distsim.calibration.compare import Bench, data_folder, read_tables
from distsim.cluster import Cluster, load_cluster
from distsim.collectives import Compiler, Plan, Transfer
from distsim.collectives.algorithms.ring import ring_loads
from distsim.collectives.algorithms.tree import tree_loads
from distsim.collectives.members import LinkArrays, Members
from distsim.errors import UsageError
from tests.cluster.made import made

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
RACKS = f"{data_folder() / 'tables' / 'oci_gb200.toml'}:32"


def plan(on: str | Cluster, op: str, nbytes: int, per_node: int | None = None, **forced: Any) -> tuple[Plan, float]:
    """What is done for a collective over all GPUs (or *per_node* a node) and how many us it takes alone."""
    if settings := forced.pop("settings", None):
        on = with_settings(str(on), **settings)
    cluster = load_cluster(on) if isinstance(on, str) else on
    compiler = Compiler(cluster, **forced)
    devices = tuple(slot.device for slot in cluster.place(cluster.num_nodes, per_node))
    planned = compiler.compile(Transfer(op, "nccl", devices, nbytes))
    return planned, planned.alone_s(compiler.links.capacity) * 1e6


def with_settings(on: str, **settings: str) -> Cluster:
    """A preset with other entries in nccl.settings."""
    preset, _, nodes = on.partition(":")
    return made(preset, int(nodes or 1), nccl={"settings": settings})


AR, AG, A2A, SEND = "all_reduce", "all_gather", "all_to_all", "sendrecv"
V218, V221, V226 = ({"nccl_version": version} for version in ("2.18.6", "2.21.5", "2.26.2"))
COPIED = "FI_CXI_SAFE_DEVMEM_COPY_THRESHOLD"
TIMES: dict[str, list[tuple[str, str, int, float, float, dict[str, Any]]]] = {
    "all_to_all pays 4 to 10 us for each message to another node on Slingshot, more where the host sends it": [
        ("polaris:setup4:8", A2A, 4 * KIB, 510.0, 0.25, {}), ("polaris:setup4:8", A2A, 8 * KIB, 127.0, 0.25, {}),
        ("polaris:setup5:8", A2A, 4 * KIB, 633.0, 0.25, {}), ("polaris:setup5:8", A2A, 8 * KIB, 290.0, 0.25, {}),
        ("polaris:setup5:256", A2A, 64 * KIB, 23_400.0, 0.25, {}), ("polaris:setup5:256", A2A, MIB, 10_500.0, 0.25, {}),
    ],
    "an exchange's messages are beside its bytes: what takes longer, not both": [
        ("polaris:setup4:8", A2A, 2 * MIB, 432.2, 0.3, {}), ("polaris:setup5:256", A2A, GIB, 245_042.0, 0.3, {}),
    ],
    "a ring's step is as long as it has messages: one a channel in use, two where it is sliced": [
        ("polaris:setup5:8", AG, 16 * KIB, 265.0, 0.3, {}), ("polaris:setup5:8", AG, 512 * KIB, 886.0, 0.3, {}),
        ("polaris:setup5:8", AG, 2 * MIB, 955.0, 0.3, {}), ("polaris:setup5:256", AG, 64 * KIB, 8034.0, 0.3, {}),
        ("polaris:setup5:256", AG, 16 * MIB, 27_900.0, 0.3, {}), ("polaris:setup5:8", AG, 16 * MIB, 1266.0, 0.28, {}),
    ],
    "sockets or the host's matching take one message after the other, on two nodes as on eight": [
        ("polaris:setup1:8", AG, 512 * KIB, 1022.1, 0.25, {}), ("polaris:setup1:8", AG, 2 * MIB, 2147.1, 0.25, {}),
        ("polaris:setup5:2", AG, 128 * KIB, 177.4, 0.25, {}), ("polaris:setup5:2", AG, 512 * KIB, 240.9, 0.25, {}),
        ("polaris:setup1:128", A2A, 32 * KIB, 8254.0, 0.15, V218), ("polaris:setup1:128", A2A, MIB, 9235.0, 0.15, V218),
    ],
    "sockets of 2.18 are slower than later ones, unless it is told that NICs may differ": [
        ("polaris:setup1:2", AG, 32 * MIB, 4300.0, 0.15, V218), ("polaris:setup1:2", AG, 32 * MIB, 9550.0, 0.15, V221),
        ("polaris:setup2:8", AG, 32 * MIB, 11_211.0, 0.15, V218), ("polaris:setup2:8", AG, GIB, 310_185.0, 0.15, V218),
    ],
    "a hop on Slingshot goes by who matches messages, and a NIC matches those of so many ranks": [
        ("polaris:setup4:2", AR, 8, 19.2, 0.2, {}), ("polaris:setup5:8", AR, 8, 73.0, 0.2, {}),
        ("polaris:setup5:256", AR, 8, 184.0, 0.2, {}), ("polaris:setup4:256", AG, MIB, 8230.0, 0.2, {}),
        ("polaris:setup4:256", A2A, MIB, 10_483.0, 0.2, {}),
    ],
    "a fabric's hop holds for two operations": [
        ("gcp-a3mega:2", AG, 2 * KIB, 85.0, 0.2, {}), ("gcp-a3mega:2", AR, 2 * KIB, 123.0, 0.2, {}),
        ("gcp-a3ultra:2", AG, 2 * KIB, 56.0, 0.2, {}), ("aws-p4de:2", AR, 2 * KIB, 161.0, 0.2, {}),
        ("sophia:2", AG, 2 * KIB, 36.0, 0.2, {}), ("sophia:2", AR, 2 * KIB, 36.0, 0.2, {}),
    ],
    "NCCL halves the channels of a send, so that all peers fit into one round": [
        (on, SEND, GIB, GIB / gbps / 1e3, 0.15, {"per_node": per_node, "nccl_version": "2.29.2"})
        for on, per_node, gbps in
        (("dgx-h100:2", 8, 45.9), ("dgx-h100:10", 4, 26.2), ("dgx-h100:10", 8, 15.2), ("dgx-b200:16", 8, 14.4))
    ],
    "a NIC on the processor's own lanes of PCIe 4 reads 18.6 GB/s, beside a switch or on PCIe 5 22.9": [
        ("polaris:8", AG, GIB, GIB * 31 / 32 / 37.3e3, 0.06, {"algo": "ring"}),
        ("perlmutter:2", AR, GIB, GIB * 14 / 8 / 74.4e3, 0.06, {"algo": "ring"}),
        ("kestrel:16", AG, GIB, GIB * 63 / 64 / 45.7e3, 0.06, {"algo": "ring"}),
    ],
    "NVLS trees move whole chunks": [
        ("dgx-h100:2", AR, MIB, 77.8, 0.2, V226), ("dgx-h100:2", AR, 4 * MIB, 110.1, 0.2, V226),
        ("dgx-h100:2", AR, 16 * MIB, 201.0, 0.2, V226), ("dgx-h100:2", AR, 64 * MIB, 472.4, 0.2, V226),
        ("dgx-h100:4", AR, 16 * MIB, 258.3, 0.2, V226),
    ],
    "a chain of 64 GPUs without NVLink SHARP passes on what a warp has, and waits for no whole piece": [
        (RACKS, AR, 8, 183.8, 0.15, {}), (RACKS, AR, 64 * KIB, 202.9, 0.15, {}), (RACKS, AR, 4 * MIB, 314.1, 0.15, {}),
        (RACKS, AR, 16 * MIB, 394.5, 0.15, {}), (RACKS, AR, 64 * MIB, 654.1, 0.15, {}),
    ],
    "a tree in LL is stored before a NIC sends it": [
        ("polaris:setup4:256", AR, 512 * KIB, 615.3, 0.1, V221), ("polaris:setup4:256", AR, MIB, 757.4, 0.1, V221),
        ("polaris:setup5:540", AR, 128 * KIB, 748.9, 0.1, V221), ("polaris:setup5:540", AR, MIB, 1067.0, 0.1, V221),
    ],
    "NCCL_BUFFSIZE makes pieces of 16 MiB: 50 us a MiB up to there, and then 6": [
        ("gcp-a3mega:2", AR, MIB, 203.2, 0.25, {}), ("gcp-a3mega:2", AR, 4 * MIB, 356.6, 0.25, {}),
        ("gcp-a3mega:2", AR, 16 * MIB, 951.6, 0.25, {}), ("gcp-a3mega:2", AR, 64 * MIB, 1261.6, 0.25, {}),
        ("gcp-a3mega:2", AR, 512 * MIB, 3817.5, 0.25, {}),
    ],
    "a tree is not corrected beyond 256 MiB": [
        ("snellius-h100:2", AR, 512 * MIB, 6224.0, 0.1, {"nccl_version": "2.22.3"}),
    ],
    "LL128 reaches a Grace host's NICs from 2.27 on": [
        ("alps-gh200:2", AR, 4 * MIB, 151.0, 0.3, {"nccl_version": version}) for version in ("2.26.6", "2.30.4")
    ],
    "a ring of a machine that trains at 50 us a rank, and what the fabric loses; 157, 403 and 629 MB are layers": [
        ("leonardo:64", AG, 157_286_400, 17_300.0, 0.1, {}), ("leonardo:64", AG, 402_653_184, 24_000.0, 0.12, {}),
        ("leonardo:64", AG, 629_145_600, 32_000.0, 0.12, {}), ("leonardo:16", AG, 157_286_400, 7_600.0, 0.12, {}),
    ],
    "1,984 ranks: 350 GB/s at 512 MiB, which a ring cannot reach (NVIDIA/nccl-tests issue 283)": [
        ("dgx-h200:248", AR, 512 * MIB, 3_066.0, 0.3, {}),
    ],
    "what a provider copies by itself is a setting": [
        ("alps-gh200:2", AR, nbytes, us, 0.2, {"settings": {COPIED: copied}, "nccl_version": "2.23.4"})
        for copied, nbytes, us in
        (("4096", 4 * KIB, 37.8), ("16777216", 4 * KIB, 27.0), ("16777216", 64 * KIB, 57.0))
    ],
    "a Grace host launches in half the time": [
        ("alps-gh200:1", AR, 8, 8.8, 0.15, {}), ("dgx-h100:1", AR, 8, 14.0, 0.14, {}),
    ],
    "two nodes of MI300X: a tree, first in one piece, a ring from 256 MiB on": [
        ("mi300x:2", AR, 4 * MIB, 337.9, 0.2, {}), ("mi300x:2", AR, 16 * MIB, 497.3, 0.2, {}),
        ("mi300x:2", AR, 64 * MIB, 821.9, 0.2, {}), ("mi300x:2", AR, 128 * MIB, 1448.8, 0.08, {}),
        ("mi300x:2", AR, 256 * MIB, 1713.4, 0.05, {}), ("mi300x:2", AR, 16384 * MIB, 90_115.0, 0.05, {}),
    ],
    "MSCCL's two exchanges take a third of what fourteen steps of a ring would": [
        ("mi300x:1", AR, 64 * KIB, 14.25, 0.2, {}), ("mi300x:1", AR, 256 * KIB, 17.46, 0.2, {}),
        ("mi300x:1", AR, MIB, 28.39, 0.2, {}), ("mi300x:1", AR, 4 * MIB, 52.96, 0.2, {}),
        ("mi300x:1", AR, 16 * MIB, 149.9, 0.2, {}),
    ],
}  # fmt: skip
"""Why -> cluster, operation, bytes, measured us, how near, and what else is said."""


@pytest.mark.parametrize("why", TIMES)
def test_published_times(why: str) -> None:
    """By the mechanism that explains them."""
    for on, op, nbytes, us, within, how in TIMES[why]:
        assert plan(on, op, nbytes, **how)[1] == pytest.approx(us, rel=within), (on, op, nbytes)


H2 = "dgx-h100:2"
CHOICES: list[tuple[str, str, int, str, dict[str, Any]]] = [
    ("mi300x:1", AR, 512, "Ring LL", {}), ("mi300x:1", AR, KIB, "MSCCL LL", {}),
    ("mi300x:1", AR, 512 * KIB, "MSCCL Simple", {}), ("mi300x:1", AR, 32 * MIB, "Ring Simple", {}),
    ("mi355x:1", AR, 256 * KIB, "Ring LL", {}), ("mi355x:2", AR, 128 * KIB - 1, "Tree LL", {}),
    ("mi355x:2", AR, 128 * KIB, "Tree LL128", {}), ("mi355x:2", AR, 32 * MIB, "Tree Simple", {}),
    ("mi355x:4", AR, 32 * MIB, "Tree LL128", {}), ("mi355x:2", AR, 128 * MIB, "Tree Simple", {}),
    ("mi355x:2", AR, 256 * MIB, "Ring Simple", {}), ("mi355x:2", AG, 16 * 8 * MIB, "Ring LL128", {}),
    ("mi355x:2", AG, 16 * 16 * MIB, "Ring Simple", {}), ("mi355x:2", "broadcast", 32 * KIB, "Ring LL", {}),
    ("mi355x:2", "reduce_scatter", 16 * (128 * KIB - 1), "Ring LL", {}),
    ("mi355x:2", "reduce_scatter", 16 * 4 * MIB, "Ring LL128", {}),
    ("mi355x:2", "reduce_scatter", 16 * 4 * MIB + 16, "Ring Simple", {}),
    ("mi300x:2", AR, 4 * MIB, "Tree Simple", V221), ("mi300x:2", AR, 256 * MIB, "Tree Simple", V221),
    ("mi300x:2", AR, 256 * MIB, "Ring Simple", {"nccl_version": "2.22.3"}),
    ("mi300x:2", AR, 4 * MIB, "Tree LL128", V226), ("mi300x:2", AR, MIB, "Tree LL", V226),
    ("mi300x:2", "reduce_scatter", 16 * 3211264, "Ring LL128", V226),
    ("mi300x:2", "reduce_scatter", 16 * 3211265, "Ring Simple", V226),
    ("frontier:8", AR, KIB, "Tree LL", {}), ("frontier:8", AR, 64 * KIB, "Tree LL", {}),
    ("frontier:8", AR, 64 * MIB, "Tree Simple", {}), ("frontier:8", AR, GIB, "Ring Simple", {}),
    ("alps-gh200:4", AR, MIB, "Ring LL", {"nccl_version": "2.23.4"}),
    ("alps-gh200:4", AR, 2 * MIB, "Tree Simple", {"nccl_version": "2.23.4"}),
    ("alps-gh200:2", AR, 4 * MIB, "Tree Simple", {"nccl_version": "2.26.6"}),
    ("alps-gh200:2", AR, 4 * MIB, "Tree LL128", {"nccl_version": "2.30.4"}),
    ("snellius-h100:2", AR, 256 * MIB, "Tree LL128", {"nccl_version": "2.22.3"}),
    ("snellius-h100:2", AR, 512 * MIB, "Tree Simple", {"nccl_version": "2.22.3"}),
    (H2, AR, 512 * KIB, "NVLSTree Simple", V226), ("gcp-a3mega:2", AR, MIB, "Tree Simple", {}),
    ("polaris:setup4:256", AR, MIB, "Tree LL", V221), (H2, AR, KIB, "Tree LL", {}),
    (H2, AR, KIB, "NVLSTree Simple", {"settings": {"NCCL_PROTO": "Simple"}}),
    (H2, AR, KIB, "Tree LL128", {"settings": {"NCCL_PROTO": "^LL"}}),
    (H2, AR, KIB, "Ring LL", {"settings": {"NCCL_ALGO": "ring", "NCCL_PROTO": "ll,simple"}}),
    (H2, AG, KIB, "Ring LL", {"settings": {"NCCL_ALGO": "Tree"}}), (H2, AR, 512 * MIB, "NVLSTree Simple", {}),
    (H2, AR, 512 * MIB, "Ring Simple", {"settings": {"NCCL_ALGO": "Ring,Tree"}}),
    (H2, AR, 512 * MIB, "Ring Simple", {"settings": {"NCCL_NVLS_ENABLE": "0"}}),
    ("gcp-a3mega:2", AR, KIB, "Tree LL", {"algo": "tree", "proto": "ll"}),
    ("dgx-h200:128", AR, 512 * MIB, "NVLSTree Simple", {}), ("leonardo:16", AG, 64 * MIB, "Ring Simple", {}),
    ("sophia:2", AG, 8 * MIB, "Ring LL128", {}),
    ("aws-p5:2", AR, 32 * MIB, "NVLSTree Simple", {}), ("gcp-a3high:2", AG, 64 * MIB, "Ring Simple", {}),
]  # fmt: skip
"""By the tables and thresholds of the library's sources, its release, its settings, and what was asked for."""


@pytest.mark.parametrize(("on", "op", "nbytes", "chosen", "how"), CHOICES)
def test_choices(on: str, op: str, nbytes: int, chosen: str, how: dict[str, Any]) -> None:
    """Algorithm and protocol."""
    planned, _ = plan(on, op, nbytes, **how)
    assert f"{planned.algo} {planned.proto}" == chosen


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"NCCL_ALGO": "Rings"}, "nccl.settings.NCCL_ALGO: expected names of Tree, Ring"),
        ({"NCCL_PROTO": "allreduce:LL"}, "nccl.settings.NCCL_PROTO: expected names of LL, LL128, Simple"),
        ({"NCCL_BUFFSIZE": "4MiB"}, "nccl.settings.NCCL_BUFFSIZE: expected bytes of a buffer, got '4MiB'"),
        ({"NCCL_MIN_CTAS": "many"}, "NCCL_MIN_CTAS: expected a number of channels from 1 to 32, got '?"),
        ({COPIED: "4 KiB"}, f"{COPIED}: expected bytes, got '4 KiB'"),
    ],
)
def test_settings_that_are_not_read_are_named(settings: dict[str, str], words: str) -> None:
    """One line: the key, what may stand there, what does."""
    with pytest.raises(UsageError, match=words):
        plan("alps-gh200:2" if COPIED in settings else H2, AR, 8, settings=settings)


def test_channels_that_settings_leave() -> None:
    """A ring over NVLinks is as fast as its channels, LL between nodes has a rate for each; the minimum is last."""
    for name in ("NCCL_MAX_CTAS", "NCCL_MAX_NCHANNELS"):
        planned, us = plan("dgx-h100:1", AG, GIB, proto="Simple", settings={name: "4"})
        assert planned.channels == 4
        assert us == pytest.approx(GIB * 7 / 8 / (4 * 38.7e9) * 1e6, rel=0.05)
    few, more = (
        plan(H2, AR, MIB, algo="Tree", proto="LL", settings={"NCCL_MAX_NCHANNELS": "2", "NCCL_MIN_CTAS": least})
        for least in ("1", "8")
    )
    assert [few[0].channels, more[0].channels] == [2, 8]
    assert few[1] > 2 * more[1]


def test_a_ring_in_ll_opens_a_channel_for_each_4_kib_a_rank() -> None:
    """enqueue.cc: 8 bytes a thread of 512, times the ranks of a ring. One process drives 8 A100s."""
    bench = Bench.of(next(table for table in read_tables() if table.name == "superbench_a100_n1x8_all_reduce"))
    compiled = [bench.compiler.compile(Transfer(AR, "nccl", bench.devices, size * KIB)) for size in (64, 768)]
    assert [planned.proto for planned in compiled] == ["LL", "LL"]
    (fewer,), (more,) = (planned.phases for planned in compiled)
    assert more.cap_bytes_per_s / fewer.cap_bytes_per_s == pytest.approx(12.0)


def test_a_tree_of_one_piece_pays_for_every_hop() -> None:
    """32 nodes of Alps: up to 4 MiB each channel has one piece, which waits to be whole at each hop (measured: 98 us a
    MiB, and 35 later); releases before 2.20 cut it."""

    def us(size: int, **version: str) -> float:
        return plan("alps-gh200:32", AR, size * MIB, algo="tree", proto="simple", **version)[1]

    assert (us(4) - us(1)) / 3 > 2.5 * (us(128) - us(64)) / 64
    assert us(4, nccl_version="2.19.4") < 0.8 * us(4, nccl_version="2.23.4")


def test_what_is_stored_takes_as_long_on_either_generation() -> None:
    """Two more nodes cost A100s and H100s the same for each byte in LL: the host's memory is written, not NVLink."""

    def each_us(on: str) -> float:
        two, four = (
            plan(f"{on}:{nodes}", AR, 16 * 8 * KIB, **V221, algo="tree", proto="LL")[1]
            - plan(f"{on}:{nodes}", AR, 16 * 4 * KIB, **V221, algo="tree", proto="LL")[1]
            for nodes in (2, 4)
        )
        return four - two

    assert each_us("sophia") == pytest.approx(each_us("dgx-h100"), rel=0.1)


def test_rings_and_sends_lose_little_with_nodes() -> None:
    """Their neighbours are the same: 8 nodes of MI325X give what 2 do, 4 of B200 send 44 GB/s; a ring loses 8 %."""
    two, eight, many = (
        plan(f"dgx-h100:{nodes}", AG, 8 * GIB, algo="Ring", proto="Simple")[1] / (1 - 1 / (8 * nodes))
        for nodes in (2, 8, 32)
    )
    assert eight == pytest.approx(two, rel=0.05)
    assert many > 1.08 * two
    sent = [plan(f"dgx-b200:{nodes}", SEND, 256 * MIB, nccl_version="2.29.7")[1] for nodes in (2, 4)]
    assert sent[1] == pytest.approx(sent[0], rel=0.03)


def test_relations_between_operations_and_fabrics() -> None:
    """What a message, a launch and a switch cost beside each other."""

    def us(on: str, op: str, nbytes: int, **how: Any) -> float:
        return plan(on, op, nbytes, **how)[1]

    assert us("alps-gh200:32", A2A, 16 * KIB) <= us("alps-gh200:32", A2A, 64 * KIB), "a Grace host reads GPU memory"
    assert us("polaris:setup4:256", AR, KIB) < 0.7 * us("polaris:setup5:256", AR, KIB), "a tree's few ranks are matched"
    assert us("dgx-h200:1", A2A, 4 * KIB) < 1.1 * us("dgx-h200:1", AR, 8), "deepseek-ai/DeepEP issue 303"
    shared = {on: [us(on, op, 4 * KIB, launcher="shared") for op in (A2A, AR)] for on in ("mi355x:1", "dgx-a100:1")}
    assert shared["mi355x:1"][0] == pytest.approx(shared["mi355x:1"][1], rel=0.1), "RCCL launches it as one call"
    assert shared["dgx-a100:1"][0] > 1.5 * shared["dgx-a100:1"][1]
    four, eight = (us("dgx-h100:1", AR, GIB, per_node=size, algo="NVLS") for size in (4, 8))
    assert four / eight == pytest.approx(1.25 / 1.125, rel=0.03), "each GPU's own part crosses its link as well"
    usual, slow = (
        plan(made("dgx-h100", 8, node={"nic": {"collnet": True} | nic}), AR, GIB, algo="NVLS")
        for nic in ({}, {"bandwidth": "50Gbps"})
    )
    assert slow[1] > 4 * usual[1], "SHARP goes over the NICs"


@pytest.mark.parametrize("preset", ["mi300x:1", "mi300x:2", "polaris:2"])
def test_trees_use_all_pairs_of_a_mesh(preset: str) -> None:
    """Chains from all heads use the links of each pair alike."""
    cluster = load_cluster(preset)
    loads = tree_loads(Compiler(cluster).group(tuple(cluster.devices), 0))
    pairs = cluster.links.are(("nvlink",))[loads.links]
    if preset != "polaris:2":  # two NICs for four GPUs: heads are not all of them
        assert pairs.sum() == cluster.num_nodes * 56
        assert np.ptp(loads.weights[pairs]) < 1e-9
    assert pairs.sum() > cluster.num_nodes * 3


def test_rings_of_eight_use_all_pairs_alike() -> None:
    """Where eight GPUs are linked pairwise, as on MI300X, each of the 56 links carries the same."""
    cluster = made("dgx-h100", node={"gpu": {"nvlink": {"topology": "mesh", "sharp": False}}})
    loads = ring_loads(Members(cluster, tuple(cluster.devices), 0, LinkArrays(cluster)))
    assert len(loads.links) == 56
    assert loads.weights.tolist() == pytest.approx([1 / 7] * 56)
