"""Clusters with several kinds of node: names, routes, placement, computation, and what cannot be one cluster."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distsim.cluster import Cluster, load_cluster
from distsim.cluster.show import render_cluster
from distsim.debug.report.console import Console
from distsim.errors import UsageError
from distsim.sim import RunRequest, run_program, simulate

MIXED = """
name = "mixed"
base = "dgx-h100"
[[node]]
count = 3
[[node]]
base = "dgx-a100"
[[node]]
nic.count = 7
"""


def cluster_of(text: str, tmp_path: Path, suffix: str = "") -> Cluster:
    file = tmp_path / "mixed.toml"
    file.write_text(text)
    return load_cluster(f"{file}{suffix}")


def test_each_node_has_its_own_parts(tmp_path: Path) -> None:
    """A node's GPU, NICs and links are those of its kind; names and ranks go on as on equal nodes."""
    cluster = cluster_of(MIXED, tmp_path)
    kinds = [(node.gpu_model, node.num_nics, hosts) for node, hosts in cluster.kinds]
    assert kinds == [("h100", 8, [0, 1, 2]), ("a100", 8, [3]), ("h100", 7, [4])]
    names = {vertex.name for vertex in cluster.vertices}
    assert "n3/nic7" in names
    assert "n4/nic7" not in names
    assert cluster.graph.number_of_nodes() == len(names)
    assert [slot.device for slot in cluster.place()][::8] == ["n0/gpu0", "n1/gpu0", "n2/gpu0", "n3/gpu0", "n4/gpu0"]
    one = load_cluster("dgx-h100:5")
    assert len(cluster.links) < len(one.links)
    assert (cluster.node.num_nics, one.node.num_nics) == (7, 8)


@pytest.mark.parametrize(
    ("src", "dst", "rail", "nics", "slowest"),
    [
        ("n0/gpu7", "n1/gpu7", None, ["n0/nic7", "n1/nic7"], "dgx-h100"),
        ("n0/gpu7", "n4/gpu7", 7, ["n0/nic7", "n4/nic6"], "dgx-h100"),
        ("n4/gpu7", "n0/gpu0", None, ["n4/nic6", "n0/nic0"], "dgx-h100"),
        ("n0/gpu1", "n3/gpu1", None, ["n0/nic1", "n3/nic1"], "dgx-a100"),
        ("n3/gpu1", "n3/gpu2", None, [], "dgx-a100"),
        ("n4/gpu1", "n4/gpu2", None, [], "dgx-h100"),
    ],
)
def test_a_route_takes_the_links_of_its_nodes(
    src: str, dst: str, rail: int | None, nics: list[str], slowest: str, tmp_path: Path
) -> None:
    """It leaves and arrives by NICs that are there, and its slowest link is that of the slower node."""
    cluster = cluster_of(MIXED, tmp_path)
    links = [cluster.links[index] for index in cluster.route(src, dst, rail=rail)]
    assert [link.src for link in links][1:] == [link.dst for link in links][:-1]
    ends = [(link.src, link.dst) for link in links if link.kind == "nic"]
    assert [next(name for name in pair if "/nic" in name) for pair in ends] == nics
    equal = load_cluster(f"{slowest}:2")
    other = equal.route("n0/gpu1", "n0/gpu2") if not nics else equal.route("n0/gpu1", "n1/gpu1")
    assert min(link.bandwidth_bytes_per_s for link in links) == min(
        equal.links[index].bandwidth_bytes_per_s for index in other
    )
    rows = cluster.routes(*(_position(cluster, [name]) for name in (src, dst)), 0, _rails(rail))
    assert [int(index) for index in rows[0] if index >= 0] == [link.index for link in links]


def _position(cluster: Cluster, names: list[str]) -> torch.Tensor:
    return torch.tensor([cluster.positions[name] for name in names]).numpy()  # type: ignore[return-value]


def _rails(rail: int | None) -> torch.Tensor:
    return torch.tensor([-1 if rail is None else rail]).numpy()  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("text", "suffix", "message"),
    [
        ("[[node]]\ncount = 0", "", r"node\[0\]\.count: expected 1 to 32768 nodes, got 0$"),
        ("[[node]]\ncount = 'two'", "", r"node\[0\]\.count: expected 1 to 32768 nodes, got two"),
        ("[[node]]\n[[node]]\ngpus = 4", "", r"node\[1\]\.gpus: expected 8 as in node\[0\], got 4$"),
        ("[[node]]\n[[node]]\nnic.net = 'efa'", "", r"node\[1\]\.nic\.net: expected ib as in node\[0\], got efa$"),
        ("[[node]]\n[[node]]\ngpuz = 4", "", r"node\[1\]: node\.gpuz: unknown key"),
        ("[[node]]\n[[node]]\nbase = 'dgx-h10'", "", r"base: unknown cluster 'dgx-h10'; did you mean 'dgx-h100'"),
        ("nodes = 5\n[[node]]\n[[node]]", "", r"nodes: expected 2, the sum of all node\.count, or nothing, got 5$"),
        ("[[node]]\n[[node]]", ":4", r"says itself how many nodes there are of each kind: leave out ':4'$"),
        (
            "fabric.kind = 'rail-only'\n[[node]]\n[[node]]",
            "",
            r"expected one kind of node with a fabric of",
        ),
        ("node = [3]", "", r"node: expected tables \[\[node\]\], got \[3\]$"),
    ],
)
def test_kinds_that_are_no_cluster_are_one_line(text: str, suffix: str, message: str, tmp_path: Path) -> None:
    """What was expected, and what came."""
    with pytest.raises(UsageError, match=message) as error:
        cluster_of(f'name = "mixed"\nbase = "dgx-h100"\n{text}', tmp_path, suffix)
    assert "\n" not in str(error.value)


def test_one_table_is_a_cluster_of_equal_nodes(tmp_path: Path) -> None:
    """`[[node]]` with a count is the same as `nodes`."""
    one = cluster_of('name = "x"\nbase = "dgx-h100"\n[[node]]\ncount = 2', tmp_path)
    assert one.links == load_cluster("dgx-h100:2").links
    assert len(one.kinds) == 1


def test_topo_show_names_the_kinds(tmp_path: Path) -> None:
    """Each kind has its nodes, its GPU and its NICs."""
    shown = io.StringIO()
    Console(file=shown, width=120).print(render_cluster(cluster_of(MIXED, tmp_path)))
    assert "n0-2: h100, 8 NICs" in shown.getvalue()
    assert "n4: h100, 7 NICs" in shown.getvalue()


def multiply() -> float:
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank() % 8)
    x = torch.empty(8192, 8192, device="cuda", dtype=torch.bfloat16)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    x @ x
    end.record()
    torch.cuda.synchronize()
    dist.all_reduce(x)
    return begin.elapsed_time(end)


def test_a_product_takes_what_its_gpu_needs(tmp_path: Path) -> None:
    """Ranks of the A100 are two to four times as slow, and all others as on equal nodes."""
    file = tmp_path / "mixed.toml"
    file.write_text(MIXED)
    times = simulate(multiply, str(file)).results
    alone = simulate(multiply, "dgx-h100:5").results[0]
    assert [times[rank] for rank in (0, 23, 39)] == pytest.approx([alone] * 3)
    assert 2 * alone < times[24] == times[31] < 4 * alone


@pytest.mark.slow
def test_a_sample_has_ranks_of_each_kind(tmp_path: Path) -> None:
    """The slow node paces the step although only some ranks run, and the report says which kinds there are."""
    (tmp_path / "mixed.toml").write_text(MIXED)
    script = tmp_path / "train.py"
    script.write_text(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('nccl')\n"
        "torch.cuda.set_device(int(os.environ['LOCAL_RANK']))\n"
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4096, 4096).cuda())\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for _ in range(3):\n"
        "    model(torch.randn(4096, 4096, device='cuda')).sum().backward()\n"
        "    optimizer.step()\n"
    )
    request = RunRequest(str(script), on=str(tmp_path / "mixed.toml"), budget_s=0.0, sample_is_enough=True)
    outcome = run_program(request)
    assert outcome.exit_code == 0
    traced = set(range(40)) - set(outcome.not_traced)
    assert all(traced & set(ranks) for ranks in (range(24), range(24, 32), range(32, 40)))
    assert outcome.training is not None
    assert outcome.training.pacing is not None
    assert outcome.training.pacing.rank in range(24, 32)
    assert [note for note in outcome.notes if note.startswith("nodes of 3 kinds (3 nodes with h100 and 8 NICs")]
