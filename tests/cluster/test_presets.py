"""The clusters that come with distsim."""

from __future__ import annotations

import re

import pytest

from distsim.cluster import load_cluster, preset_names
from distsim.cluster.files.load import preset_text
from distsim.cluster.graph.cluster import connections

WANTED = {
    "dgx-a100",
    "dgx-h100",
    "dgx-h200",
    "dgx-b200",
    "grand-teton",
    "gb200-nvl72",
    "aws-p4d",
    "aws-p4de",
    "aws-p5",
    "gcp-a3high",
    "gcp-a3mega",
    "gcp-a3ultra",
    "gcp-a4",
    "snellius-h100",
    "alps-gh200",
    "polaris",
    "sophia",
    "pcie-4090",
    "ethernet-cpu",
    "ethernet-cpu-100g",
    "azure-nd-a100-v4",
    "azure-nd-h100-v5",
    "oci-a100",
    "oci-h100",
    "hgx-a100-hdr4",
    "hgx-a100-roce4",
    "hgx-h100-roce",
    "hgx-h100-sharp",
    "gb300-nvl72",
    "dgx-b300",
    "mi300x",
    "mi355x",
    "leonardo",
    "frontier",
    "perlmutter",
    "kestrel",
}

# By hand from the makers' figures: GPUs a node, GB/s of a GPU's NVLinks (specified, one direction), NICs a
# node, Gb/s of a NIC.
FIGURES = {
    "dgx-a100": (8, 300, 8, 200),
    "dgx-h100": (8, 450, 8, 400),
    "dgx-h200": (8, 450, 8, 400),
    "dgx-b200": (8, 900, 8, 400),
    "grand-teton": (8, 450, 8, 400),
    "gb200-nvl72": (4, 900, 4, 400),
    "aws-p4d": (8, 300, 4, 100),
    "aws-p5": (8, 450, 8, 400),
    "gcp-a3high": (8, 450, 4, 200),
    "gcp-a3mega": (8, 450, 8, 200),
    "gcp-a3ultra": (8, 450, 8, 400),
    "gcp-a4": (8, 900, 8, 400),
    "snellius-h100": (4, 450, 4, 200),
    "alps-gh200": (4, 450, 4, 200),
    "polaris": (4, 300, 2, 200),
    "pcie-4090": (8, 0, 1, 25),
    "ethernet-cpu": (0, 0, 1, 25),
    "ethernet-cpu-100g": (0, 0, 1, 100),
    "azure-nd-a100-v4": (8, 300, 8, 200),
    "azure-nd-h100-v5": (8, 450, 8, 400),
    "oci-a100": (8, 300, 8, 200),
    "oci-h100": (8, 450, 8, 400),
    "hgx-a100-hdr4": (8, 300, 4, 200),
    "hgx-a100-roce4": (8, 300, 4, 100),
    "hgx-h100-roce": (8, 450, 8, 400),
    "hgx-h100-roce800": (8, 450, 8, 100),
    "gb300-nvl72": (4, 900, 4, 800),
    "dgx-b300": (8, 900, 8, 800),
    "mi300x": (8, 448, 8, 400),
    "mi355x": (8, 537.6, 8, 400),
    "leonardo": (4, 300, 4, 100),
    "frontier": (8, 350, 4, 200),
    "perlmutter": (4, 300, 4, 200),
    "kestrel": (4, 450, 2, 200),
}

# By hand, GB/s: (cluster, halves' cut).
BISECTIONS = [
    ("dgx-h100", 4 * 18 * 25 * 0.824),  # half the GPUs' NVLinks
    ("dgx-a100", 4 * 12 * 25 * 0.8),
    ("snellius-h100", 4 * 18 * 25 * 0.824 / 3),  # mesh: 2 x 2 pairs, a third of a GPU's links each
    ("polaris", 4 * 12 * 25 * 0.8 / 3),
    ("pcie-4090", 72),  # the sockets' interconnect, narrower than 4 slots of 26.24
    ("dgx-h100:4", 2 * 8 * 50 * 0.97),  # half the nodes' NICs: non-blocking
    ("dgx-h100:128", 64 * 8 * 50 * 0.97),
    ("gb200-nvl72:1", 36 * 18 * 50 * 0.802),  # a rack: NVLink of half its 72 GPUs
    ("gb200-nvl72:2", 18 * 4 * 50 * 0.97),  # two racks: NICs of one
    ("gb200-nvl72:3", 18 * 4 * 50 * 0.97),  # racks stay whole
    ("ethernet-cpu:80", 40 * 25 / 8 * 0.94 / 3),  # two full leaves, 3:1
    ("ethernet-cpu:2", 25 / 8 * 0.94),
    ("dgx-h100:3", 8 * 50 * 0.97),  # the smaller half: one node
]


def test_the_presets_are_these() -> None:
    """Every cluster that was asked for is there."""
    assert set(preset_names()) >= WANTED


@pytest.mark.parametrize("name", preset_names())
def test_every_number_of_a_preset_names_its_source(name: str) -> None:
    """A line with a number has a comment behind it, and the file names its source."""
    bare = [
        line
        for line in preset_text(name).splitlines()
        if re.match(r'(?!description)\w+ = "?[\d.]', line) and not re.search(r"  # \S.{2,}", line)
    ]
    assert bare == []
    assert preset_text(name).startswith("# ")
    assert load_cluster(name).source


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_loads_and_connects_its_devices(name: str) -> None:
    """Two units of each: every pair of some far apart devices has a route whose links follow each other."""
    cluster = load_cluster(f"{name}:2")
    assert cluster.name == name
    assert cluster.description
    assert len(cluster.devices) == cluster.num_nodes * cluster.node.ranks_per_node
    assert [link.index for link in cluster.links] == list(range(len(cluster.links)))
    some = cluster.devices[:: max(1, len(cluster.devices) // 8)]
    for src in some:
        for dst in some:
            links = [cluster.links[index] for index in cluster.route(src, dst)]
            here = src
            for link in links:
                assert link.src == here
                here = link.dst
            assert here == dst


@pytest.mark.parametrize("name", sorted(FIGURES))
def test_figures_are_the_makers(name: str) -> None:
    """GPUs, NVLink, NICs as specified."""
    node = load_cluster(name).node
    figures = (
        node.num_gpus,
        node.nvlink_spec_bytes_per_s * 1e-9,
        node.num_nics,
        node.nic_spec_bytes_per_s * 8e-9,
    )
    assert figures == pytest.approx(FIGURES[name])


@pytest.mark.parametrize(("name", "gigabytes_per_s"), BISECTIONS)
def test_bisection_is_what_one_computes_by_hand(name: str, gigabytes_per_s: float) -> None:
    """Half the devices' narrowest cut."""
    bisection = load_cluster(name).bisection_bandwidth_bytes_per_s()
    assert bisection == pytest.approx(gigabytes_per_s * 1e9, rel=1e-6)


def test_a_rack_of_gb200_is_one_nvlink_domain() -> None:
    """`gb200-nvl72:2` is two racks of 18 nodes; inside a rack GPUs talk through its NVSwitch."""
    cluster = load_cluster("gb200-nvl72:2")
    assert (cluster.num_nodes, len(cluster.devices), cluster.node.nvlink_domain_nodes) == (36, 144, 18)
    inside = [cluster.links[i].name for i in cluster.route("n0/gpu1", "n17/gpu2")]
    assert inside == ["n0/gpu1->nvswitch0", "nvswitch0->n17/gpu2"]
    across = [cluster.links[i].kind for i in cluster.route("n0/gpu1", "n18/gpu1")]
    assert "nvlink" not in across
    assert across.count("nic") == 2


def test_a_node_has_what_nccl_asks_for() -> None:
    """NVLS on Hopper with NVSwitch only; the vendor and class of the processor; the network plugin."""
    h100, a100, mesh = load_cluster("dgx-h100"), load_cluster("dgx-a100"), load_cluster("snellius-h100")
    assert (h100.node.nvls, a100.node.nvls, mesh.node.nvls) == (True, False, False)
    assert (h100.node.nvlink, mesh.node.nvlink) == ("nvswitch", "mesh")
    assert mesh.node.nvlink_pair_bytes_per_s == pytest.approx(6 * 25e9 * 0.824)
    assert (h100.nccl.cpu_vendor, h100.nccl.cpu_class) == ("intel", "srp")
    aws = load_cluster("aws-p5").nccl
    assert (aws.cpu_vendor, aws.cpu_class, aws.net) == ("amd", "", "efa")
    assert (h100.nccl.compute_capability, load_cluster("ethernet-cpu").nccl.compute_capability) == (90, 0)


def test_every_preset_says_what_was_measured() -> None:
    """One with a table of measurements says on how many nodes; the others from where what they cost is borrowed. None
    takes over what was measured on the preset it is based on."""
    from distsim.calibration.compare import read_tables

    on = {table.on.partition(":")[0] for table in read_tables()}
    for name in preset_names():
        cluster = load_cluster(name)
        if not cluster.node.num_gpus:
            continue
        assert cluster.measured, name
        assert cluster.measured.startswith("nothing") != (name in on or bool(cluster.errors)), name


def test_amd_has_its_own_library() -> None:
    """And says so in what an answer assumed."""
    assert load_cluster("mi300x").nccl.software.startswith("RCCL 2.")
    assert load_cluster("hgx-h100-sharp").nccl.software.endswith("nccl-rdma-sharp-plugins, NCCL_COLLNET_ENABLE=1")


@pytest.mark.parametrize(
    ("preset", "row"),
    [
        ("dgx-h100", "GPU0 X NV18 NV18 NV18 NV18 NV18 NV18 NV18 PIX PIX NODE NODE SYS SYS SYS SYS"),
        ("perlmutter", "GPU0 X NV4 NV4 NV4 PHB PHB PHB PHB"),
        ("pcie-4090", "GPU0 X PHB PHB PHB SYS SYS SYS SYS PHB"),
        ("ethernet-cpu", "NIC0 X"),
    ],
)
def test_how_a_device_is_connected(preset: str, row: str) -> None:
    """By NVLink, else by what both share: a PCIe switch, a host bridge, a socket, nothing."""
    name, kinds, socket = connections(load_cluster(preset))[0]
    assert " ".join([name, *kinds]) == row
    assert socket == 0
