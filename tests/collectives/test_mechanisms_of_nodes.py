"""What NCCL and RCCL do between nodes by their own sources, held to published logs, most of which are not fitted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distsim.calibration.compare import Bench, read_tables
from distsim.calibration.constants import data_folder
from distsim.cluster import load_cluster
from distsim.collectives import Compiler, Transfer
from distsim.collectives.libraries.nccl_channels import nvls_tree_loop_bytes, searched, tree_parts
from distsim.collectives.libraries.nccl_tuning import Machine
from distsim.errors import UsageError
from tests.collectives.test_mechanisms import GIB, KIB, MIB, changed, plan


def machine(on: str, version: str) -> Machine:
    """What NCCL's tuning reads of all GPUs of a cluster."""
    cluster = load_cluster(on)
    compiler = Compiler(cluster, nccl_version=version)
    return compiler._nccl.machine(compiler.group(tuple(cluster.devices), 0))


@pytest.mark.parametrize(
    ("nodes", "nbytes", "us"),
    [(2, 1 * MIB, 77.8), (2, 4 * MIB, 110.1), (2, 16 * MIB, 201.0), (2, 64 * MIB, 472.4), (4, 16 * MIB, 258.3)],
)
def test_nvls_trees_move_whole_chunks(nodes: int, nbytes: int, us: float) -> None:
    """all_reduce of 2 nodes of H100 at Nebius (dstackai/dstack, examples/clusters/nebius: not fitted) and of 4
    (NVIDIA/nccl-tests issue 309)."""
    made, found = plan(f"dgx-h100:{nodes}", "all_reduce", nbytes, nccl_version="2.26.2")
    assert made.algo == "NVLSTree"
    assert found == pytest.approx(us, rel=0.2)


def test_chunks_of_an_nvls_tree() -> None:
    """enqueue.cc of v2.26.2: 128 KiB for each of 16 channels and 8 heads, less of little and on more nodes."""
    two, four = machine("dgx-h100:2", "2.26.2"), machine("dgx-h100:4", "2.26.2")
    assert [nvls_tree_loop_bytes(two, size * MIB) / 128 / KIB for size in (64, 16, 4)] == [128, 64, 32]
    assert [nvls_tree_loop_bytes(four, size * MIB) / 128 / KIB for size in (64, 16, 4)] == [64, 64, 32]


@pytest.mark.parametrize(
    ("nbytes", "us"), [(8, 183.8), (64 * KIB, 202.9), (4 * MIB, 314.1), (16 * MIB, 394.5), (64 * MIB, 654.1)]
)
def test_a_chain_of_64_gpus_passes_on_what_a_warp_has(nbytes: int, us: float) -> None:
    """Two racks of 16 nodes of GB200 without NVLink SHARP (oracle-quickstart/oci-hpc-oke): 126 hops inside racks, none
    of which waits for a whole piece."""
    racks = f"{data_folder() / 'tables' / 'oci_gb200.toml'}:32"
    assert plan(racks, "all_reduce", nbytes)[1] == pytest.approx(us, rel=0.15)


def test_parts_of_a_piece() -> None:
    """A warp's share of LL128 is 1,920 bytes, of LL 256; Simple passes on whole pieces."""
    assert [tree_parts(machine("dgx-h100:2", "2.26.2"), 8 * MIB, proto) for proto in ("LL", "LL128", "Simple")] == [
        128,
        38,
        1,
    ]


def test_trees_are_not_corrected_beyond_256_mib() -> None:
    """tuning.cc's table ends there: two nodes of 4 H100 take Simple from 512 MiB on (measured at SURF: 6,224 us)."""
    assert plan("snellius-h100:2", "all_reduce", 256 * MIB, nccl_version="2.22.3")[0].proto == "LL128"
    made, us = plan("snellius-h100:2", "all_reduce", 512 * MIB, nccl_version="2.22.3")
    assert (made.algo, made.proto) == ("Tree", "Simple")
    assert us == pytest.approx(6224.0, rel=0.1)


def test_hopper_takes_the_simpler_tree() -> None:
    """From Hopper on (search.cc) where each GPU has its NIC: two nodes leave LL128 at 512 KiB."""
    assert machine("dgx-h100:2", "2.26.2").simple_tree
    assert not machine("sophia:2", "2.21.5").simple_tree
    assert plan("dgx-h100:2", "all_reduce", 512 * KIB, nccl_version="2.26.2")[0].algo == "NVLSTree"


def test_speeds_that_the_search_tries_on_blackwell() -> None:
    """96 GB/s a channel came with 2.28, 86 and 80 with 2.30."""
    of = {
        version: searched(3, 721.8, 90.0, 4, 4, version).ring_gbps for version in ((2, 26), (2, 27), (2, 28), (2, 30))
    }
    assert of == {(2, 26): 24.0, (2, 27): 23.95, (2, 28): 24.0, (2, 30): 43.0}


@pytest.mark.parametrize(("version", "proto"), [("2.26.6", "Simple"), ("2.30.4", "LL128")])
def test_ll128_reaches_a_grace_hosts_nics_from_2_27_on(version: str, proto: str) -> None:
    """4 MiB on two nodes of GH200; 151 us were measured with 2.30.4 at Olivia (NRIS, not fitted)."""
    made, us = plan("alps-gh200:2", "all_reduce", 4 * MIB, nccl_version=version)
    assert made.proto == proto
    assert us == pytest.approx(151.0, rel=0.3)


@pytest.mark.parametrize(
    ("on", "nodes", "nbytes", "us"),
    [
        ("polaris:setup1", 8, 512 * KIB, 1022.1),
        ("polaris:setup1", 8, 2 * MIB, 2147.1),
        ("polaris:setup5", 2, 128 * KIB, 177.4),
        ("polaris:setup5", 2, 512 * KIB, 240.9),
    ],
)
def test_a_host_takes_one_message_after_the_other(on: str, nodes: int, nbytes: int, us: float) -> None:
    """all_gather where sockets or the host's matching take messages, on two nodes as on eight
    (argonne-lcf/alcf-nccl-tests at 385be33, NCCL 2.21: not fitted)."""
    assert plan(f"{on}:{nodes}", "all_gather", nbytes)[1] == pytest.approx(us, rel=0.25)


@pytest.mark.parametrize(("op", "nbytes", "us"), [("all_gather", MIB, 8230.0), ("all_to_all", MIB, 10483.0)])
def test_a_nic_matches_messages_of_so_many_ranks(op: str, nbytes: int, us: float) -> None:
    """1,024 ranks of Polaris with setup 4 wait for the host as those with setup 5 do, not those of a tree."""
    assert plan("polaris:setup4:256", op, nbytes)[1] == pytest.approx(us, rel=0.2)
    trees = [plan(f"polaris:setup{number}:256", "all_reduce", 1 * KIB)[1] for number in (4, 5)]
    assert trees[0] < 0.7 * trees[1]


@pytest.mark.parametrize(
    ("on", "nbytes", "us"), [("polaris:setup4:8", 2 * MIB, 432.2), ("polaris:setup5:256", GIB, 245_042.0)]
)
def test_an_exchanges_messages_are_beside_its_bytes(on: str, nbytes: int, us: float) -> None:
    """all_to_all: what takes longer, not both."""
    assert plan(on, "all_to_all", nbytes)[1] == pytest.approx(us, rel=0.3)


def test_rings_lose_little_with_nodes() -> None:
    """A ring's neighbours are the same however many nodes: 8 of MI325X give what 2 do (hisohara/ai-scripts)."""
    two, eight = (plan(f"dgx-h100:{nodes}", "all_gather", 8 * GIB, algo="ring")[1] for nodes in (2, 8))
    assert eight / (63 / 64) == pytest.approx(two / (15 / 16), rel=0.05)


@pytest.mark.parametrize(
    ("nbytes", "chosen"), [(1 * KIB, "Tree LL"), (64 * KIB, "Tree LL"), (64 * MIB, "Tree Simple"), (GIB, "Ring Simple")]
)
def test_frontier_takes_rccls_tuning_model_3(nbytes: int, chosen: str) -> None:
    """8 GCDs of MI250X and 4 NICs: rome_model_74 (RCCL 0cbce2a, rome_models.cc and tuning.cc)."""
    made, _ = plan("frontier:8", "all_reduce", nbytes)
    assert f"{made.algo} {made.proto}" == chosen


def test_a_ring_in_ll_opens_a_channel_for_each_4_kib_a_rank() -> None:
    """enqueue.cc: 8 bytes a thread of 512, times the ranks of a ring. One process drives 8 A100s."""
    bench = Bench.of(next(table for table in read_tables() if table.name == "superbench_a100_n1x8_all_reduce"))
    few, many = (Transfer("all_reduce", "nccl", bench.devices, size) for size in (64 * KIB, 768 * KIB))
    compiled = [bench.compiler.compile(one) for one in (few, many)]
    assert [plan.proto for plan in compiled] == ["LL", "LL"]
    (fewer,), (more,) = (plan.phases for plan in compiled)
    assert more.cap_bytes_per_s / fewer.cap_bytes_per_s == pytest.approx(12.0)


@pytest.mark.parametrize(("on", "gbps"), [("polaris:8", 37.3), ("perlmutter:2", 74.4), ("kestrel:16", 45.7)])
def test_a_nic_across_the_root_ports_of_pcie_4_reads_less(on: str, gbps: float) -> None:
    """Slingshot carries 18.6 GB/s a NIC where it is on the processor's own lanes of PCIe 4, 22.9 beside a switch or on
    PCIe 5: 36.0 GB/s of bus bandwidth on 8 nodes of Polaris, 74.4 on 2 of Perlmutter, 45.7 on 16 of Kestrel."""
    cluster = load_cluster(on)
    op = "all_gather" if on != "perlmutter:2" else "all_reduce"
    _, us = plan(on, op, GIB, algo="ring")
    ranks = len(cluster.devices)
    factor = (ranks - 1) / ranks * (2 if op == "all_reduce" else 1)
    assert GIB * factor / us / 1e3 == pytest.approx(gbps, rel=0.06)


def test_a_trees_receiver_waits_as_long_for_a_flag_on_a_slow_network() -> None:
    """Simple takes NCCL's 9 us a hop more than LL (tuning.cc: 14 and 5), on whatever a hop is: not a multiple of it."""
    timing = {on: Compiler(load_cluster(on))._nccl.timing for on in ("dgx-h100:2", "gcp-a4:2")}
    more = [
        one.hops_s(machine(on, "2.26.2"), "tree", "Simple")[1] - one.hops_s(machine(on, "2.26.2"), "tree", "LL")[1]
        for on, one in timing.items()
    ]
    assert more == pytest.approx([9e-6, 9e-6], rel=0.2)


def test_messages_of_a_step_are_dealt_to_the_nics() -> None:
    """With a NIC a GPU twice as many channels send beside each other; sockets send one after the other all the same."""
    four, two = machine("perlmutter:2", "2.21.5"), machine("polaris:2", "2.21.5")
    assert (four.nics, two.nics, four.channels, two.channels) == (4, 2, 8, 4)
    fast = Compiler(load_cluster("perlmutter:2"))._nccl.timing
    slow = Compiler(load_cluster("polaris:setup1:2"))._nccl.timing
    assert fast.messages_s(replace(four, nics=8), MIB, "LL") == pytest.approx(fast.messages_s(four, MIB, "LL") / 2)
    assert slow.messages_s(replace(two, nics=8), MIB, "LL") == pytest.approx(slow.messages_s(two, MIB, "LL"))


@pytest.mark.parametrize(
    ("on", "nbytes", "us"),
    [
        ("polaris:setup4:256", 512 * KIB, 615.3),
        ("polaris:setup4:256", 1 * MIB, 757.4),
        ("polaris:setup5:540", 128 * KIB, 748.9),
        ("polaris:setup5:540", 1 * MIB, 1067.0),
    ],
)
def test_a_tree_in_ll_is_stored_before_a_nic_sends_it(on: str, nbytes: int, us: float) -> None:
    """Each of 16 to 18 messages on the way waits for a whole piece, and a node inside a tree sends two down
    (argonne-lcf/alcf-nccl-tests at 385be33, NCCL 2.21: not fitted)."""
    made, found = plan(on, "all_reduce", nbytes, nccl_version="2.21.5")
    assert (made.algo, made.proto) == ("Tree", "LL")
    assert found == pytest.approx(us, rel=0.1)


def test_what_is_stored_takes_as_long_on_either_generation() -> None:
    """Two more nodes cost A100s and H100s the same for each byte: the host's memory is written, not NVLink."""

    def each_us(on: str) -> float:
        two, four = (
            (plan(f"{on}:{nodes}", "all_reduce", 16 * 8 * KIB, nccl_version="2.21.5", algo="tree", proto="LL")[1])
            - plan(f"{on}:{nodes}", "all_reduce", 16 * 4 * KIB, nccl_version="2.21.5", algo="tree", proto="LL")[1]
            for nodes in (2, 4)
        )
        return four - two

    assert each_us("sophia") == pytest.approx(each_us("dgx-h100"), rel=0.1)


def test_sends_to_a_neighbour_lose_as_little_with_nodes_as_a_ring() -> None:
    """4 nodes of B200 send 44 GB/s to the next rank (together-b200), over a NIC of 50."""
    two, four = (plan(f"dgx-b200:{nodes}", "sendrecv", 256 * MIB, nccl_version="2.29.7")[1] for nodes in (2, 4))
    assert four == pytest.approx(two, rel=0.03)


@pytest.mark.parametrize(
    ("copied", "nbytes", "us"), [("4096", 4 * KIB, 37.8), ("16777216", 4 * KIB, 27.0), ("16777216", 64 * KIB, 57.0)]
)
def test_what_a_provider_copies_by_itself_is_a_setting(copied: str, nbytes: int, us: float) -> None:
    """2 nodes of Alps with either threshold (boeschf/nccl-benchmark-on-alps-2025 at 897cff4: not fitted)."""
    cluster = changed("alps-gh200", 2, "nccl.settings", FI_CXI_SAFE_DEVMEM_COPY_THRESHOLD=copied)
    assert plan(cluster, "all_reduce", nbytes, nccl_version="2.23.4")[1] == pytest.approx(us, rel=0.2)


def test_a_threshold_that_is_no_number_is_named() -> None:
    """In one line, where the cluster is used."""
    cluster = changed("alps-gh200", 2, "nccl.settings", FI_CXI_SAFE_DEVMEM_COPY_THRESHOLD="4 KiB")
    with pytest.raises(UsageError, match="FI_CXI_SAFE_DEVMEM_COPY_THRESHOLD: expected bytes, got '4 KiB'"):
        plan(cluster, "all_reduce", 8)


@pytest.mark.parametrize("name", ["NCCL_MAX_CTAS", "NCCL_MAX_NCHANNELS"])
def test_fewer_channels_carry_less(name: str) -> None:
    """A ring over NVLinks is as fast as its channels: NCCL assumes 38.7 GB/s for each of Hopper's in Simple."""
    made, us = plan(changed("dgx-h100", 1, "nccl.settings", **{name: "4"}), "all_gather", GIB, proto="Simple")
    assert made.channels == 4
    assert us == pytest.approx(GIB * 7 / 8 / (4 * 38.7e9) * 1e6, rel=0.05)
    assert us > 2 * plan("dgx-h100:1", "all_gather", GIB, proto="Simple")[1]


def test_more_channels_carry_more_where_they_are_the_limit() -> None:
    """LL between nodes has a rate for each channel; the minimum counts after the maximum."""
    few, more = ({"NCCL_MAX_NCHANNELS": "2", "NCCL_MIN_CTAS": least} for least in ("1", "8"))
    plans = [
        plan(changed("dgx-h100", 2, "nccl.settings", **settings), "all_reduce", MIB, algo="Tree", proto="LL")
        for settings in (few, more)
    ]
    assert [made.channels for made, _ in plans] == [2, 8]
    assert plans[0][1] > 2 * plans[1][1]


@pytest.mark.parametrize("given", ["0", "33", "many"])
def test_a_number_of_channels_is_checked(given: str) -> None:
    """NCCL has 1 to 32 channels."""
    with pytest.raises(UsageError, match=r"NCCL_MIN_CTAS: expected a number of channels from 1 to 32, got '?"):
        plan(changed("dgx-h100", 1, "nccl.settings", NCCL_MIN_CTAS=given), "all_gather", GIB)
