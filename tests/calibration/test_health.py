"""Nodes compared with nodes: who is slow in runs of pairs, which pair is, whose runs fail."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from distsim.calibration.compare import Bench, read_tables
from distsim.calibration.expectation import compare
from distsim.cli.dispatch import main
from distsim.cluster import load_cluster
from distsim.collectives.constants import nccl_constants
from distsim.network.bench import expected_interval
from tests.calibration.logs import log
from tests.documents import checked

Pair = tuple[int, int]
SIZES = (1 << 25, 1 << 28, 1 << 30)
TIME_US = 1000.0


def write(
    folder: Path, nodes: int, factor: Callable[[Pair], float], *, failed: tuple[Pair, ...] = (), op: str = "sendrecv"
) -> None:
    """Logs of all pairs of nodes, with noise of 0.5%; *factor* of a pair's time."""
    draw = random.Random(3)
    for pair in combinations(range(1, nodes + 1), 2):
        slower = factor(pair) * draw.lognormvariate(0.0, 0.005)
        times = [] if pair in failed else [(size, TIME_US * size / SIZES[0] * slower) for size in SIZES]
        text = log(op, times, nodes=2, gpus=1)
        for number, node in enumerate(pair):
            text = text.replace(f"     node{number} device", f"  gpu-{node:02} device")
        (folder / f"{op}_{pair[0]}_{pair[1]}.log").write_text(text)


def run(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, list[dict[str, object]]]]:
    code = main(["health", str(folder), "--json"])
    return code, checked(capsys.readouterr().out)


@pytest.mark.parametrize(("nodes", "ops", "certain"), [(8, 1, False), (8, 2, True), (17, 1, True)])
@pytest.mark.parametrize("sick", [1, 5, 8])
def test_a_node_ten_percent_slower_is_named(
    nodes: int, ops: int, certain: bool, sick: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It and no other, although some pairs of healthy nodes are twice as slow. Of few nodes, two operations decide."""
    for op in ("sendrecv", "alltoall")[:ops]:
        write(tmp_path, nodes, lambda pair: 1.1 if sick in pair else 2.0 if pair in ((2, 3), (4, 7)) else 1.0, op=op)
    code, found = run(tmp_path, capsys)
    assert [node["node"] for node in found["slow_nodes"]] == [f"gpu-{sick:02}"] * ops
    for node in found["slow_nodes"]:
        assert (node["pairs"], node["is_certain"]) == (nodes - 1, certain)
        assert node["slower"] == pytest.approx(0.1, abs=0.03)
    assert code == (5 if certain else 0)


def test_a_node_alone_behind_a_switch_is_doubted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is slow in one operation and not in the other one."""
    write(tmp_path, 8, lambda pair: 1.1 if 3 in pair else 1.0)
    write(tmp_path, 8, lambda pair: 1.0, op="alltoall")
    code, found = run(tmp_path, capsys)
    assert [(node["node"], node["is_certain"]) for node in found["slow_nodes"]] == [("gpu-03", False)]
    assert code == 0


@pytest.mark.parametrize("slow", [(), ((1, 2),), ((1, 2), (3, 4), (5, 6))])
def test_slow_pairs_accuse_no_node(slow: tuple[Pair, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are listed, the slowest first."""
    write(tmp_path, 8, lambda pair: 1.5 + 0.1 * pair[0] if pair in slow else 1.0)
    code, found = run(tmp_path, capsys)
    assert (code, found["slow_nodes"]) == (0, [])
    named = [tuple(int(name[-2:]) for name in pair["nodes"]) for pair in found["slow_pairs"]]  # type: ignore[attr-defined]
    assert named == list(reversed(slow))


def test_a_few_nodes_do_not_decide(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Five may show one that stands out, which may be alone behind a switch; three show nothing."""
    for nodes in (3, 5):
        folder = tmp_path / str(nodes)
        folder.mkdir()
        write(folder, nodes, lambda pair: 1.2 if 2 in pair else 1.0)
        assert main(["health", str(folder)]) == 0
    few, some = capsys.readouterr().out.split("3 nodes, 3 logs")
    assert few == ""
    assert "3 nodes: expected 5 and more to compare" in some
    assert "gpu-02  sendrecv     1  > 16 MiB  4 of 4 ?" in some
    assert "?: a node that is alone behind another switch looks the same" in some


def test_two_kinds_of_pairs_have_no_usual_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two halves behind two switches: half of all pairs are slow, and no verdict is given."""
    write(tmp_path, 8, lambda pair: 1.4 if (pair[0] <= 4) != (pair[1] <= 4) else 1.0)
    assert main(["health", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "no usual time" in text
    assert "slow pairs" not in text


def test_whose_runs_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With most of its partners; two failures elsewhere are counted, and named by nobody."""
    failed = (*((4, other) for other in range(5, 11)), (1, 2), (3, 7))
    write(tmp_path, 10, lambda pair: 1.0, failed=failed)
    code, found = run(tmp_path, capsys)
    assert (code, [(one["node"], one["failed"], one["tried"]) for one in found["failing"]]) == (5, [("gpu-04", 6, 9)])
    assert found["failed_runs"] == 8


@pytest.mark.parametrize(
    "line",
    [
        "gpu-01: Test NCCL failure common.cu:1279 'remote process exited / '",
        " .. gpu-01 pid 7: Test failure common.cu:718",
    ],
)
def test_what_nccl_tests_print_of_a_failure(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After some figures, too."""
    write(tmp_path, 5, lambda pair: 1.0)
    path = tmp_path / "sendrecv_1_2.log"
    path.write_text(path.read_text().replace("# Out of bounds", f"{line}\n# Out of bounds"))
    assert run(tmp_path, capsys)[1]["failed_runs"] == 1


def test_nodes_that_ran_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One log a node: the one whose time stands out."""
    for node in range(1, 9):
        text = log("all_reduce", [(size, TIME_US * (1.1 if node == 3 else 1 + node / 2000)) for size in SIZES], gpus=8)
        (tmp_path / f"{node}.log").write_text(text.replace("    node0 device", f"   gpu-{node:02} device"))
    code, found = run(tmp_path, capsys)
    assert (code, [node["node"] for node in found["slow_nodes"]]) == (5, ["gpu-03"])


def test_a_slow_pair_with_few_partners_is_to_be_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One round, in which each node is in one pair: which runs would decide."""
    write(tmp_path, 16, lambda pair: 1.5 if pair == (1, 2) else 1.0)
    for path in tmp_path.glob("*.log"):
        first, second = map(int, path.stem.split("_")[1:])
        if second != first + 1 or first % 2 == 0:
            path.unlink()
    assert main(["health", str(tmp_path)]) == 0
    assert "run these to decide: gpu-01 with gpu-03, gpu-01 with gpu-04" in capsys.readouterr().out


def test_logs_of_two_clusters_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, with a file of each."""
    write(tmp_path, 5, lambda pair: 1.0)
    (tmp_path / "other.log").write_text(log("sendrecv", [(SIZES[0], 900.0)], nodes=2, gpus=1, gpu="NVIDIA A100-SXM4"))
    assert main(["health", str(tmp_path)]) == 2
    assert "the logs are of several GPUs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["/nowhere"], "no such folder: /nowhere"),
        (["{}"], "no log of nccl-tests"),
        (["{}", "--on", "dgx-h100:2"], "no log of nccl-tests"),
    ],
)
def test_what_cannot_be_compared_is_one_line(
    words: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No folder, no logs."""
    assert main(["health", *(word.format(tmp_path) for word in words)]) == 2
    assert text in capsys.readouterr().err


TABLES = [table for table in read_tables() if table.rows]


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_no_healthy_table_is_below_the_model(factor: float) -> None:
    """Of 29 machines; nearly all are, if they take twice as long."""
    below, compared = 0, 0
    for table in TABLES:
        rows = tuple(replace(row, time_us=factor * row.time_us) for row in table.rows)
        bench = Bench.of(replace(table, rows=rows))
        bench.use(bench.own(nccl_constants()))
        cells = compare(bench)
        compared += bool(cells)
        below += any(cell.is_below for cell in cells)
    assert compared > 80
    assert below == 0 if factor == 1.0 else below >= 0.95 * compared


def model_us(size: int) -> float:
    cluster = load_cluster("dgx-h100:2")
    around = expected_interval("sendrecv", cluster, size, (0, 8))
    assert around is not None
    return around.high_s * 1e6


@pytest.mark.parametrize(
    ("slower", "verdict", "code"), [(0.9, "", 0), (1.03, "slower", 0), (1.12, "low", 0), (1.6, "below", 5)]
)
def test_all_nodes_are_compared_with_the_model(
    slower: float, verdict: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Five equal nodes: none stands out. Three times the interval is a warning, one time a sentence."""
    for pair in combinations(range(1, 6), 2):
        text = log("sendrecv", [(size, slower * model_us(size)) for size in SIZES], nodes=2, gpus=1)
        for number, node in enumerate(pair):
            text = text.replace(f"     node{number} device", f"  gpu-{node:02} device")
        (tmp_path / f"{pair[0]}_{pair[1]}.log").write_text(text)
    assert main(["health", str(tmp_path), "--on", "dgx-h100", "--json"]) == code
    (cell,) = checked(capsys.readouterr().out)["expected"]
    assert cell["verdict"] == verdict
    assert cell["longer"] == pytest.approx(slower - 1, abs=0.02)
    assert main(["health", str(tmp_path), "--on", "dgx-h100"]) == code
    out = capsys.readouterr().out
    assert ("longer than 8 of 10 machines like dgx-h100" in out) is bool(verdict)
    assert ("below what dgx-h100 does: sendrecv 2 x 1" in out) is bool(code)


def test_another_machine_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Named by the flag that was given."""
    write(tmp_path, 5, lambda pair: 1.0)
    assert main(["health", str(tmp_path), "--on", "dgx-a100:2"]) == 2
    assert "--on dgx-a100:2: its GPUs are a100, those of the logs" in capsys.readouterr().err
