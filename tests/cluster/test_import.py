"""Clusters from other programs' files, and to them."""

from __future__ import annotations

import json
from pathlib import Path

import networkx
import pytest

from distsim.cluster import load_cluster
from distsim.cluster.files.graph_files import to_graphml, to_node_link
from distsim.errors import UsageError
from tests.cluster.made import hop_names

# Two GPUs, each behind a PCIe switch of its own socket with a NIC, NVLinks to two switches; one slow NIC.
GPU = """
    <pci busid="0000:{b}6:00.0" class="0x060400" link_speed="32.0 GT/s PCIe" link_width="16">
      <pci busid="0000:{b}8:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16">
        <gpu dev="{k}" sm="90" rank="{k}" gdr="1">
          <nvlink target="0000:07:00.0" count="9" tclass="0x068000"/>
          <nvlink target="0000:06:00.0" count="9" tclass="0x068000"/>
        </gpu>
      </pci>
      <pci busid="0000:{b}9:00.0" class="0x020000" link_speed="16.0 GT/s PCIe" link_width="16">
        <nic><net name="mlx5_{k}" dev="{k}" speed="400000" port="1" latency="0.000000" gdr="1"/></nic>
      </pci>
    </pci>"""
CPU = '<cpu host_hash="0x16" numaid="{k}" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="207">'
SLOW = '<nic><net name="eth0" dev="2" speed="25000" port="1" latency="0.0" gdr="0"/></nic>'
HOPPER = (
    '<system version="1">'
    + CPU.format(k=0)
    + GPU.format(b=1, k=0)
    + f"{SLOW}</cpu>"
    + CPU.format(k=1)
    + GPU.format(b=8, k=1)
    + "</cpu></system>"
)

# Two A100 joined directly (the dump names the pair at both ends), PCIe not reported, one Ethernet NIC.
AMPERE = """<system version="1">
  <cpu numaid="0" affinity="ff" arch="x86_64" vendor="AuthenticAMD" familyid="175" modelid="1">
    <pci busid="0001:00:00.0" class="0x030200" link_speed="" link_width="0">
      <gpu dev="0" sm="80" rank="0" gdr="1"><nvlink target="0002:00:00.0" count="12" tclass="0x030200"/></gpu>
    </pci>
    <pci busid="0002:00:00.0" class="0x030200" link_speed="" link_width="0">
      <gpu dev="1" sm="80" rank="1" gdr="1"><nvlink target="0001:00:00.0" count="12" tclass="0x030200"/></gpu>
    </pci>
    <nic><net name="eth0" dev="0" speed="100000" port="0" latency="0.000000" gdr="0"/></nic>
  </cpu>
</system>"""

ASTRA = """# made for a test
topology: [ Switch, Ring ]  # Ring, FullyConnected, Switch
npus_count: [ 4, 6 ]
bandwidth: [ 400.0, 50.0 ]  # GB/s
latency: [ 900.0, 500.0 ]  # ns
"""


def _file(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_dump_of_nccl_becomes_a_host(tmp_path: Path) -> None:
    """NVLink at NCCL's bandwidth, PCIe at its reckoning of GT/s, the fastest NICs, two sockets."""
    cluster = load_cluster(_file(tmp_path, "topo.xml", HOPPER))
    node = cluster.node
    assert (cluster.name, cluster.num_nodes, cluster.devices) == ("topo", 1, ["n0/gpu0", "n0/gpu1"])
    assert (node.gpu_model, node.nvlink, node.nvlinks_per_gpu, node.nvls) == ("h100", "nvswitch", 18, True)
    assert node.nvlink_bytes_per_s == pytest.approx(18 * 20.6e9)
    assert (node.num_nics, node.nic_spec_bytes_per_s, cluster.nccl.net) == (2, 50e9, "ib")
    assert (cluster.nccl.cpu_vendor, cluster.cpu.num_sockets, node.pcie_generation) == ("intel", 2, 5)
    rates = {link.name: link.bandwidth_bytes_per_s for link in cluster.links}
    assert rates["n0/gpu0->n0/nvswitch0"] == pytest.approx(370.8e9)
    assert rates["n0/gpu0->n0/pcie0"] == pytest.approx(48e9)
    assert rates["n0/nic1->n0/pcie1"] == pytest.approx(24e9)
    assert hop_names(cluster, "n0/gpu0", "n0/gpu1") == ["n0/gpu0", "n0/nvswitch0", "n0/gpu1"]


def test_a_dump_can_be_repeated_on_one_switch(tmp_path: Path) -> None:
    """`topo.xml:4` is four such hosts; each GPU uses the NIC beside it."""
    cluster = load_cluster(_file(tmp_path, "topo.xml", HOPPER) + ":4")
    assert len(cluster.devices) == 8
    hops = hop_names(cluster, "n0/gpu1", "n3/gpu0")
    assert hops == ["n0/gpu1", "n0/pcie1", "n0/nic1", "leaf0", "n3/nic0", "n3/pcie0", "n3/gpu0"]


def test_gpus_joined_directly_are_a_mesh_without_nvls(tmp_path: Path) -> None:
    """12 links of SM80 between the pair, once each way; PCIe that is not reported counts as Gen3 x16."""
    cluster = load_cluster(_file(tmp_path, "a.xml", AMPERE))
    assert (cluster.node.nvlink, cluster.node.nvls, cluster.node.gpu_model) == ("mesh", False, "a100")
    nvlinks = [link for link in cluster.links if link.kind == "nvlink"]
    assert [(link.src, link.dst) for link in nvlinks] == [("n0/gpu0", "n0/gpu1"), ("n0/gpu1", "n0/gpu0")]
    assert {link.bandwidth_bytes_per_s for link in nvlinks} == {240e9}
    assert (cluster.nccl.cpu_vendor, cluster.nccl.net) == ("amd", "tcp")
    assert (
        next(link for link in cluster.links if link.src == "n0/gpu0" and link.kind == "pcie").bandwidth_bytes_per_s
        == 12e9
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HOPPER[:700], r"not well-formed XML \(cut off\?\)"),
        (
            '<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]><system>&b;</system>',
            "line 1: a DTD is not allowed",
        ),
        ('<!DOCTYPE system SYSTEM "file:///etc/passwd"><system/>', "a DTD is not allowed"),
        ("<graph/>", "expected NCCL's <system>, got <graph>"),
        ('<system version="1"><cpu/></system>', "expected at least one <gpu>"),
        (AMPERE.replace('dev="1" sm', 'dev="x" sm'), "line 7: <gpu dev>: expected a whole number, got 'x'"),
        (AMPERE.replace('dev="1" sm', 'dev="0" sm'), "line 7: <gpu dev>: 0 is already taken"),
        (HOPPER.replace("0x16", "0x17", 1), "expected one host, got 2"),
        ("<a>" * 100, "nested more than 64 deep"),
    ],
)
def test_a_broken_dump_is_refused_in_clear_words(text: str, message: str, tmp_path: Path) -> None:
    """Cut off, with a DTD (entities are never expanded), of something else, or inconsistent."""
    with pytest.raises(UsageError, match=message) as caught:
        load_cluster(_file(tmp_path, "t.xml", text))
    assert str(caught.value).startswith(str(tmp_path))


def test_node_link_json_goes_out_and_comes_back(tmp_path: Path) -> None:
    """The same devices, links, facts and bisection; routes between the same ends with the same bottleneck."""
    cluster = load_cluster("dgx-a100:2")
    again = load_cluster(_file(tmp_path, "c.json", json.dumps(to_node_link(cluster))))
    assert again.links == cluster.links
    assert again.devices == cluster.devices
    assert (again.name, again.cpu, again.node, again.nccl) == (
        cluster.name,
        cluster.cpu,
        cluster.node,
        cluster.nccl,
    )
    assert again.bisection_bandwidth_bytes_per_s() == cluster.bisection_bandwidth_bytes_per_s()
    for src, dst in (("n0/gpu0", "n0/gpu1"), ("n0/gpu2", "n1/gpu2")):
        slowest = [min(c.links[i].bandwidth_bytes_per_s for i in c.route(src, dst)) for c in (cluster, again)]
        assert slowest[0] == slowest[1]
    with pytest.raises(UsageError, match="imported as a graph and has no TOML form"):
        again.to_toml()


def test_networkx_reads_what_is_written(tmp_path: Path) -> None:
    """node_link_graph and read_graphml give the same graph."""
    cluster = load_cluster("snellius-h100:2")
    linked = networkx.node_link_graph(to_node_link(cluster), edges="edges")
    to_graphml(cluster, tmp_path / "c.graphml")
    marked = networkx.read_graphml(tmp_path / "c.graphml")
    assert set(linked.edges) == set(cluster.graph.edges)
    assert set(marked.edges) == set(cluster.graph.edges)
    assert marked.edges["n0/gpu0", "n0/gpu1"]["bandwidth_bytes_per_s"] == pytest.approx(6 * 20.6e9)


def test_any_graph_of_networkx_will_do(tmp_path: Path) -> None:
    """The older key `links`, an undirected graph, units as text; a tie between two ways goes by the flow."""
    data = {
        "directed": False,
        "nodes": [
            {"id": "a", "kind": "gpu", "host": 0},
            {"id": "b", "kind": "gpu", "host": 1},
            {"id": "s"},
            {"id": "t"},
        ],
        "links": [
            {"source": x, "target": y, "bandwidth": "80Gbps", "latency": "1us"}
            for x, y in (("a", "s"), ("s", "b"), ("a", "t"), ("t", "b"))
        ],
    }
    cluster = load_cluster(_file(tmp_path, "g.json", json.dumps(data)))
    assert (cluster.num_nodes, cluster.devices, len(cluster.links)) == (2, ["a", "b"], 8)
    assert {hop_names(cluster, "a", "b", key)[1] for key in range(16)} == {"s", "t"}
    assert cluster.bisection_bandwidth_bytes_per_s() == 20e9
    assert cluster.links[0].latency_s == 1e-6


@pytest.mark.parametrize(
    ("nodes", "edges", "paths"),
    [
        (
            [{"id": "a", "kind": "gpu", "host": -1}, {"id": [1]}, {"id": "c", "kind": "toaster"}, 7],
            [{"source": "a", "target": "c"}, {"source": "c", "target": "a", "bandwidth": "slow", "latency": -1}],
            [
                *("nodes[0].host", "nodes[1].id", "nodes[2].kind", "nodes[3]"),
                *("edges[0].bandwidth_bytes_per_s", "edges[1].bandwidth", "edges[1].latency"),
            ],
        ),
        (
            [{"id": "a", "kind": "gpu", "host": 0}, {"id": "a"}, {"id": "c"}],
            [{"source": "a", "target": end, "bandwidth": "10Gbps"} for end in ("z", "c", "c")],
            ["nodes[1].id", "edges[0].target", "edges[2]"],
        ),
    ],
    ids=["values", "connections"],
)
def test_faults_of_a_graph_come_all_at_once(
    nodes: list[object], edges: list[object], paths: list[str], tmp_path: Path
) -> None:
    """Each with its place in the lists; first those of single values, then what does not fit together."""
    data = {"nodes": nodes, "edges": edges}
    with pytest.raises(UsageError) as caught:
        load_cluster(_file(tmp_path, "g.json", json.dumps(data)))
    lines = [line.strip() for line in str(caught.value).splitlines()[1:]]
    assert [line.partition(":")[0] for line in lines] == paths


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"nodes": [', r"not valid JSON \(cut off\?\)"),
        ("[1]", "expected node-link JSON with a list 'nodes'"),
        ('{"nodes": []}', "edges: expected a value, got nothing"),
        ('{"nodes": [{"id": "s"}], "edges": []}', "expected nodes of kind 'gpu' or 'cpu'"),
        (
            '{"nodes": [{"id": "a", "kind": "gpu"}], "edges": []}',
            "expected a host number for every device, got none for a",
        ),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_what_is_no_graph_is_one_clear_line(text: str, message: str, tmp_path: Path) -> None:
    """Cut off, something else, or without a place for ranks."""
    with pytest.raises(UsageError, match=message) as caught:
        load_cluster(_file(tmp_path, "g.json", text))
    assert "\n" not in str(caught.value)


def test_hosts_of_different_sizes_are_refused(tmp_path: Path) -> None:
    """Ranks are placed so many a node."""
    nodes = [{"id": f"g{k}", "kind": "gpu", "host": k // 2} for k in range(3)]
    with pytest.raises(UsageError, match="the same number of devices on every host, got 1 to 2"):
        load_cluster(_file(tmp_path, "g.json", json.dumps({"nodes": nodes, "edges": []})))


def test_an_astra_sim_network(tmp_path: Path) -> None:
    """First dimension inside a host, the others between; GB/s and ns; a ring goes both ways."""
    cluster = load_cluster(_file(tmp_path, "net.yml", ASTRA))
    assert (cluster.num_nodes, len(cluster.devices), cluster.node.num_gpus) == (6, 24, 4)
    assert len(cluster.links) == 6 * 4 * 2 + 4 * 6 * 2
    inside = [cluster.links[i] for i in cluster.route("n0/gpu0", "n0/gpu3")]
    assert [(link.bandwidth_bytes_per_s, link.latency_s) for link in inside] == [(400e9, pytest.approx(900e-9))] * 2
    assert hop_names(cluster, "n0/gpu1", "n5/gpu1") == ["n0/gpu1", "n5/gpu1"]
    assert len(cluster.route("n0/gpu1", "n2/gpu1")) == 2
    assert cluster.bisection_bandwidth_bytes_per_s() == pytest.approx(4 * 2 * 50e9)


def test_an_astra_sim_network_in_block_lists(tmp_path: Path) -> None:
    """YAML's other way of writing a list; a full mesh."""
    text = "topology:\n  - FullyConnected\nnpus_count:\n  - 5\nbandwidth:\n  - 10\nlatency:\n  - '7'\n"
    cluster = load_cluster(_file(tmp_path, "net.yaml", text))
    assert len(cluster.links) == 20
    assert hop_names(cluster, "n0/gpu0", "n0/gpu4") == ["n0/gpu0", "n0/gpu4"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            ASTRA.replace("Ring ]", "Torus ]"),
            r"topology\[1\]: expected 'Ring', 'FullyConnected' or 'Switch', got 'Torus'",
        ),
        (ASTRA.replace("[ 4, 6 ]", "[ 4 ]"), "got topology 2, npus_count 1, bandwidth 2, latency 2"),
        (ASTRA.replace("50.0 ]", "-1 ]"), r"bandwidth\[1\]: expected greater than 0, got '-1'"),
        (ASTRA.replace("[ 4, 6 ]", "[ 4, 2.5 ]"), r"npus_count\[1\]: expected an integer, .*got '2.5'"),
        (ASTRA.replace("[ 4, 6 ]", "[ 4, 60000 ]"), "at most 65536 NPUs"),
        (ASTRA.partition("latency")[0], "latency: expected a value, got nothing"),
        (ASTRA[:-9], "a list without its closing"),
        ("hello\n", "line 1: expected 'key:"),
    ],
)
def test_a_broken_astra_sim_network_is_refused(text: str, message: str, tmp_path: Path) -> None:
    """Which key, what was expected, what came."""
    with pytest.raises(UsageError, match=message):
        load_cluster(_file(tmp_path, "net.yml", text))


def test_a_graph_says_itself_how_many_nodes_it_has(tmp_path: Path) -> None:
    """`net.yml:3` makes no sense."""
    with pytest.raises(UsageError, match="says itself how many nodes there are: leave out ':3'"):
        load_cluster(_file(tmp_path, "net.yml", ASTRA) + ":3")


@pytest.mark.parametrize(
    ("table", "key", "value", "said"),
    [
        ("nccl", "net", "t-1cp", r"nccl\.net: expected 'none', 'ib', .*got 't-1cp'"),
        ("node", "nvlink", "mesh", r"node\.nvls: expected false without an NVSwitch \(nvlink is mesh\)"),
        ("node", "nic_bytes_per_s", 0, r"node\.nic_bytes_per_s: expected a number above zero, got 0"),
        ("cpu", "flops_per_s", 0, r"cpu\.flops_per_s: expected greater than 0, got 0"),
    ],
)
def test_facts_that_no_machine_has_are_refused(table: str, key: str, value: object, said: str, tmp_path: Path) -> None:
    """Those of a node-link file: each by its path, alone or beside what it contradicts."""
    data = to_node_link(load_cluster("dgx-h100:1"))
    data["graph"]["distsim"][table][key] = value
    with pytest.raises(UsageError, match=rf"graph\.distsim\.{said}"):
        load_cluster(_file(tmp_path, "c.json", json.dumps(data)))
