"""From what a user types to a cluster, or to one clear line."""

from __future__ import annotations

from pathlib import Path

import pytest

from distsim.cluster import load_cluster
from distsim.errors import UsageError
from distsim.kernels import Gpu

pytestmark = pytest.mark.smoke

FIVE_FAULTS = """
base = "dgx-h100"
nodes = -2
[node]
gpuz = 3
[node.gpu.nvlink]
bandwidth = "fast"
links = "18"
[fabric]
kind = "rail-optimized"
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "dgx-h10:2",
            r"^unknown cluster 'dgx-h10'; did you mean 'dgx-h100'\? "
            r"expected a preset \(alps-gh200, .*\) or a TOML file$",
        ),
        ("h100:8", r"^unknown cluster 'h100'; did you mean 'dgx-h100'\? "),
        ("zzz", r"^unknown cluster 'zzz': expected a preset \(.*\) or a TOML file$"),
        ("dgx-h100:0", r"^dgx-h100:0: expected 1 to 32768 nodes, got 0$"),
        ("dgx-h100:-1", r"^dgx-h100:-1: expected 1 to 32768 nodes, got -1$"),
        ("dgx-h100:x", r"^dgx-h100:x: expected a number of nodes after ':', got 'x' \(as in dgx-h100:2\)$"),
        ("dgx-h100:", r"^dgx-h100:: expected a number of nodes after ':', got ''"),
        ("dgx-h100:1000001", r"expected 1 to 32768 nodes"),
        ("", r"^expected a cluster: .*got an empty name$"),
        (":3", r"^expected a cluster before ':3'"),
        ("nowhere/x.toml", r"^no such file: nowhere/x.toml"),
    ],
)
def test_a_wrong_name_is_one_clear_line(name: str, message: str) -> None:
    """What was expected, what came, and the nearest preset."""
    with pytest.raises(UsageError, match=message) as caught:
        load_cluster(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty: expected a cluster file"),
        (b"\xff\xfe\x00", "expected UTF-8 text, got byte 0xff at 0"),
        (b"a = [1,", "not valid TOML"),
        (b'base = "dgx-h1000"', "base: unknown cluster 'dgx-h1000'.*did you mean 'dgx-h100'"),
    ],
)
def test_a_broken_file_is_one_clear_line(content: bytes, message: str, tmp_path: Path) -> None:
    """Empty, not text, not TOML, an unknown base: the line begins with the file."""
    path = tmp_path / "c.toml"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message) as caught:
        load_cluster(str(path))
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_a_directory_and_a_foreign_file_are_refused(tmp_path: Path) -> None:
    """What is there but is no cluster file."""
    with pytest.raises(UsageError, match="is a directory: expected a cluster file"):
        load_cluster(str(tmp_path))
    (tmp_path / "train.py").write_text("print()")
    with pytest.raises(UsageError, match=r"got the Python script .*train\.py; the script comes last"):
        load_cluster(str(tmp_path / "train.py"))


def test_all_faults_of_a_file_come_at_once_each_with_its_path(tmp_path: Path) -> None:
    """A file with five faults is repaired in one go."""
    path = tmp_path / "c.toml"
    path.write_text(FIVE_FAULTS)
    with pytest.raises(UsageError) as caught:
        load_cluster(str(path))
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{path}: 5 faults"
    assert sorted(line.strip().partition(":")[0] for line in lines[1:]) == [
        "fabric.kind",
        "node.gpu.nvlink.bandwidth",
        "node.gpu.nvlink.links",
        "node.gpuz",
        "nodes",
    ]
    text = str(caught.value)
    assert (
        "node.gpu.nvlink.bandwidth: expected a bandwidth such as '400Gbps' (bits) or '50GBps' (bytes), "
        "got 'fast'" in text
    )
    assert "node.gpu.nvlink.links: expected an integer, got '18' (str)" in text
    assert "got 'rail-optimized'; did you mean 'rail-optimised'?" in text
    assert (
        "node.gpuz: unknown key (expected one of gpus, gpu, cpu, pcie, nic, storage_write, storage_read); "
        "did you mean 'gpu'?" in text
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("node = 3", "node: expected a table, got 3"),
        (
            '[fabric]\nkind = "torus"\ndims = [2, 2]',
            r"fabric.dims: expected room for 8 nodes, got 4 \(\[2, 2\]\)",
        ),
        ('[fabric]\nkind = "torus"\ndims = []', "fabric.dims: expected a list"),
        ('[fabric]\nkind = "torus"', "fabric.dims: expected a value, got nothing"),
        (
            "[node.nic]\nefficiency = 1.5",
            r"node.nic.efficiency: expected less than or equal to 1, got 1.5 \(float\)",
        ),
        ("[node.gpu.flops]\nbf17 = 1", "node.gpu.flops.bf17: expected 'fp64'.*got 'bf17'"),
        (
            "[node.gpu.nvlink]\ntopology = 'mesh'\ndomain_nodes = 8",
            "node.gpu.nvlink.domain_nodes: expected 1",
        ),
        ("[calibration]\nx = 'y'", "calibration.x: expected a number"),
        ("[node.cpu]\nmemory = '2TB'", "node.cpu.memory: unknown key"),
        ("[node.gpu.nvlink]\nswitches = 4", "node.gpu.nvlink.switches: unknown key"),
    ],
)
def test_a_fault_says_where_and_what_was_expected(text: str, message: str, tmp_path: Path) -> None:
    """One fault is one line with the path of the key."""
    path = tmp_path / "c.toml"
    path.write_text(f'base = "dgx-h100"\nnodes = 8\n{text}')
    with pytest.raises(UsageError, match=message) as caught:
        load_cluster(str(path))
    assert "\n" not in str(caught.value)


def test_several_nodes_need_a_nic(tmp_path: Path) -> None:
    """Hosts that nothing connects are a fault of the file, unless one NVLink domain holds them all."""
    text = load_cluster("gb200-nvl72").to_toml()
    head, _, rest = text.partition("[node.nic]")
    path = tmp_path / "c.toml"
    path.write_text(head + rest[rest.index("[fabric]") :])
    assert load_cluster(str(path)).num_nodes == 18
    with pytest.raises(UsageError, match=r"node\.nic: expected a table for a cluster of 36 nodes"):
        load_cluster(f"{path}:2")


def test_a_file_may_change_a_preset_in_part(tmp_path: Path) -> None:
    """`base` and what differs; a fabric of another kind takes nothing over from the base's."""
    path = tmp_path / "mine.toml"
    path.write_text(
        'base = "dgx-h100"\nname = "mine"\nnodes = 4\n[node.nic]\nbandwidth = "200Gbps"\n'
        '[fabric]\nkind = "star"\n[calibration]\n'
        + "".join(
            f"gloo_all_reduce_{key} = 3e-6\n" for key in ("launch_s", "s_per_byte", "more_s_per_byte", "knee_bytes")
        )
    )
    cluster = load_cluster(str(path))
    assert (cluster.name, cluster.num_nodes, len(cluster.devices)) == ("mine", 4, 32)
    assert cluster.node.nic_spec_bytes_per_s == 25e9
    assert cluster.node.nic_bytes_per_s == 25e9 * 0.97
    assert cluster.node.nvlink_bytes_per_s == pytest.approx(370.8e9)
    assert set(cluster.calibration.values()) == {3e-6}
    assert [vertex.name for vertex in cluster.vertices if vertex.host is None] == ["leaf0"]
    assert load_cluster(f"{path}:2").num_nodes == 2


def test_another_gpu_takes_nothing_over_from_the_bases(tmp_path: Path) -> None:
    """Its data file has its memory and its rates; the same GPU keeps the base's figures beside its own."""
    path = tmp_path / "mine.toml"
    path.write_text('base = "dgx-h100"\nname = "mine"\n[node.gpu]\nmodel = "b200"\n')
    gpu = load_cluster(str(path)).node.gpu
    assert gpu is not None
    assert (gpu.memory_bytes, gpu.memory_bytes_per_s, gpu.flops_per_s) == (None, None, {})
    own = Gpu.named("b200")
    assert (Gpu.of(gpu).memory_bytes, Gpu.of(gpu).peak_flops) == (own.memory_bytes, own.peak_flops)
    path.write_text(
        'base = "dgx-h100"\nname = "mine"\n[node.gpu]\nmodel = "h100"\n[node.gpu.flops]\nbf16 = "148TFLOPS"\n'
    )
    gpu, base = load_cluster(str(path)).node.gpu, load_cluster("dgx-h100").node.gpu
    assert gpu is not None
    assert base is not None
    assert (gpu.memory_bytes, gpu.flops_per_s) == (base.memory_bytes, {**base.flops_per_s, "bf16": 148e12})


VARIANTS = """
base = "dgx-h100"
name = "mine"
description = "HGX"
variant = "plain"
[variants.plain]
description = "InfiniBand"
[variants.slow]
description = "sockets"
[variants.slow.node.nic]
net = "tcp"
[variants.slow.nccl]
version = "2.18.3"
plugin = "none at all"
settings = { NCCL_IB_DISABLE = "1" }
"""


def test_a_variant_is_named_behind_the_cluster(tmp_path: Path) -> None:
    """Its tables are laid on the file; the usual one stands for the name alone; a file may have one as its base."""
    path = tmp_path / "c.toml"
    path.write_text(VARIANTS)
    usual, slow = load_cluster(f"{path}:2"), load_cluster(f"{path}:slow:2")
    assert (usual.name, usual.variant, usual.description, usual.nccl.net) == ("mine", "plain", "HGX; InfiniBand", "ib")
    assert (slow.name, slow.variant, slow.description, slow.nccl.net) == ("mine:slow", "slow", "HGX; sockets", "tcp")
    assert (usual.num_nodes, slow.num_nodes, load_cluster(f"{path}:slow").num_nodes) == (2, 2, 1)
    assert slow.nccl.software == "NCCL 2.18.3, none at all, NCCL_IB_DISABLE=1"
    again = tmp_path / "again.toml"
    again.write_text(slow.to_toml())
    assert load_cluster(str(again)).nccl == slow.nccl


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "{file}:fast",
            r"expected a variant of its software \(plain, slow\) or a number of nodes after ':', got 'fast'",
        ),
        ("{file}:fast:2", r"expected a variant of its software \(plain, slow\)"),
        ("dgx-h100:slow:2", "expected a number of nodes after ':', got 'slow'"),
        ("{file}:slow:x", "'.*:slow'|no such file"),
    ],
)
def test_a_variant_that_is_not_there_is_one_clear_line(name: str, message: str, tmp_path: Path) -> None:
    """What there is, and what came."""
    path = tmp_path / "c.toml"
    path.write_text(VARIANTS)
    with pytest.raises(UsageError, match=message) as caught:
        load_cluster(name.format(file=path))
    assert "\n" not in str(caught.value)


def test_variants_that_are_no_tables_are_one_line(tmp_path: Path) -> None:
    """In a file of one's own."""
    path = tmp_path / "c.toml"
    path.write_text('base = "dgx-h100"\nvariants = 3\n')
    with pytest.raises(UsageError, match="variants: expected a table of tables, got 3"):
        load_cluster(str(path))


def test_constants_of_a_cluster_file_are_the_models(tmp_path: Path) -> None:
    """What a file was fitted to replaces the model's own; a name that the model has not is refused when it is used."""
    from distsim.network.bench import bench

    path = tmp_path / "c.toml"
    head = 'base = "dgx-h100"\nnodes = 2\n[constants]\n'
    path.write_text(head + '"ib.hop" = { value = 200.0 }\n')
    slow, usual = load_cluster(str(path)), load_cluster("dgx-h100:2")
    assert slow.constants["ib.hop"].value == 200.0
    times = [bench("all_reduce", cluster, [8], proto="LL")[0].time_us for cluster in (slow, usual)]
    assert times[0] > times[1] + 150
    path.write_text(head + '"ib.hop_L" = { value = 200.0 }\n')
    with pytest.raises(UsageError, match=r"constants\.ib\.hop_L: this distsim's model.*did you mean 'ib\.hop'") as told:
        bench("all_reduce", load_cluster(str(path)), [8])
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("name", ["dgx-h100:2", "gb200-nvl72:2", "ethernet-cpu:3", "alps-gh200:5", "pcie-4090"])
def test_a_cluster_printed_as_toml_reads_back_the_same(name: str, tmp_path: Path) -> None:
    """`topo show --toml` is complete."""
    cluster = load_cluster(name)
    path = tmp_path / "c.toml"
    path.write_text(cluster.to_toml(), encoding="utf-8")
    again = load_cluster(str(path))
    assert again.links == cluster.links
    assert again.devices == cluster.devices
    assert (again.cpu, again.node, again.nccl) == (cluster.cpu, cluster.node, cluster.nccl)
    assert again.to_toml() == cluster.to_toml()


def test_place_gives_every_rank_its_device() -> None:
    """All devices by default; the first of each node where fewer are asked for."""
    cluster = load_cluster("dgx-h100:2")
    slots = cluster.place()
    assert [slot.device for slot in slots] == cluster.devices
    assert [(slot.rank, slot.host, slot.local_rank) for slot in slots] == [(r, r // 8, r % 8) for r in range(16)]
    few = cluster.place(nnodes=2, nproc_per_node=3)
    assert [slot.device for slot in few] == ["n0/gpu0", "n0/gpu1", "n0/gpu2", "n1/gpu0", "n1/gpu1", "n1/gpu2"]


def test_sockets_take_up_to_a_rank_a_core() -> None:
    """A node without accelerators has a rank a socket by default, more on request, in blocks."""
    cluster = load_cluster("ethernet-cpu:2")
    assert [slot.device for slot in cluster.place()] == ["n0/cpu0", "n0/cpu1", "n1/cpu0", "n1/cpu1"]
    assert [slot.device for slot in cluster.place(1, 4)] == ["n0/cpu0", "n0/cpu0", "n0/cpu1", "n0/cpu1"]
    with pytest.raises(UsageError, match=r"asked for 65 ranks \(1 node x 65\), the cluster ethernet-cpu has 128"):
        cluster.place(1, 65)


def test_a_placement_that_does_not_fit_names_both_numbers() -> None:
    """What was asked for and what there is."""
    cluster = load_cluster("dgx-h100:2")
    with pytest.raises(
        UsageError, match=r"asked for 20 ranks \(2 nodes x 10\), the cluster dgx-h100 has 16 \(2 nodes x 8"
    ):
        cluster.place(2, 10)
    with pytest.raises(UsageError, match=r"asked for 24 ranks \(3 nodes x 8\), the cluster dgx-h100 has 16"):
        cluster.place(3)
    with pytest.raises(UsageError, match="at least one node and one rank"):
        cluster.place(0)


def test_the_processor_is_shared_among_the_ranks_of_a_node() -> None:
    """Twice as many ranks have half the arithmetic, bandwidth and memory each."""
    cpu = load_cluster("ethernet-cpu").cpu
    assert cpu.ranks_per_node == 2
    assert cpu.flops_per_s == 4.1e12 * 0.5
    half = cpu.share(4)
    assert half.flops_per_s == cpu.flops_per_s / 2
    assert half.memory_bytes_per_s == cpu.memory_bytes_per_s / 2
    assert half.op_overhead_s == cpu.op_overhead_s
