"""`distsim calibrate --from LOGS`: an afternoon of nccl-tests becomes a cluster file."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from pathlib import Path

import pytest

from distsim.cli import main
from distsim.cluster import load_cluster
from distsim.collectives.constants import nccl_constants, read_constants
from distsim.network.bench import bench
from tests.calibration.logs import log
from tools.fitting.fit import main as fit_main

TRUTH = {"launch.process_intel": 1.5, "ib.hop": 3.0, "ib.efficiency": 0.7}
"""A cluster whose launches, hops and network are so many times the preset's."""
SIZES = [8 << (3 * power) for power in range(10)]


def _cluster(folder: Path, factors: Mapping[str, float], name: str = "truth") -> Path:
    """A preset with some constants multiplied."""
    known = nccl_constants().values
    lines = [f'"{key}" = {{ value = {known[key] * factor} }}' for key, factor in factors.items()]
    path = folder / f"{name}.toml"
    path.write_text("\n".join(['base = "dgx-h100"', f'name = "{name}"', "[constants]", *lines]) + "\n")
    return path


def _logs(folder: Path, truth: Path, runs: list[tuple[str, int]], sizes: list[int] = SIZES) -> Path:
    """What nccl-tests would print there."""
    folder.mkdir(exist_ok=True)
    for op, nodes in runs:
        rows = bench(op, load_cluster(f"{truth}:{nodes}"), sizes)
        times = [(row.size_bytes, row.time_us) for row in rows if row.size_bytes]
        (folder / f"{op}_{nodes}.log").write_text(log(op, times, nodes=nodes))
    return folder


def _off(path: Path, truth: Path, op: str, nodes: int) -> float:
    """The largest error of any size."""
    found, meant = (bench(op, load_cluster(f"{one}:{nodes}"), SIZES[1:]) for one in (path, truth))
    return max(abs(a.time_us / b.time_us - 1) for a, b in zip(found, meant, strict=True))


@pytest.mark.slow
def test_a_teams_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Logs of 1, 2 and 4 nodes: the file predicts 8, which no log has, and says what was fitted, and to what."""
    truth, ours, plot = _cluster(tmp_path, TRUTH), tmp_path / "ours.toml", tmp_path / "ours.svg"
    logs = _logs(tmp_path / "logs", truth, [(op, n) for op in ("all_reduce", "all_gather") for n in (1, 2, 4)])
    monkeypatch.setenv("COLUMNS", "80")
    argv = ["calibrate", "--from", str(logs), "--like", "dgx-h100", "-o", str(ours), "--plot", str(plot)]
    assert main(argv) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 110
    assert "6 runs in 6 logs: all_gather on 1 x 8, 2 x 8 and 4 x 8, all_reduce on 1 x 8, 2 x 8 and 4 x 8" in said
    assert "4 nodes, predicted from logs of fewer: median error" in said
    assert "cannot be determined from these logs, kept from dgx-h100:" in said
    plain = Path(_cluster(tmp_path, {}, "plain"))
    for op in ("all_reduce", "all_gather"):
        assert _off(ours, truth, op, 8) < 0.15
        assert _off(plain, truth, op, 8) > 0.25
    cluster = load_cluster(str(ours))
    assert (cluster.name, cluster.num_nodes, cluster.nccl.version) == ("ours", 4, "2.27.3")
    known = nccl_constants().values
    for name in ("launch.process_intel", "ib.hop", "ib.efficiency"):
        assert cluster.constants[name].value == pytest.approx(known[name] * TRUTH[name], rel=0.1)
        assert 0 < cluster.constants[name].uncertainty < 0.3
    assert "p2p.base" not in cluster.constants, "no log has a message in it"
    assert "ib.told_us" not in cluster.constants, "what a plugin tells of a hop is not what a hop takes"
    assert cluster.measured.startswith("all_gather on 1 x 8, 2 x 8 and 4 x 8, all_reduce on")
    drawn = ET.parse(plot).getroot()
    assert len(drawn.findall(".//{*}g")) == 6
    assert len(drawn.findall(".//{*}circle")) >= 50


def test_with_too_little_data_nothing_is_fitted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One small size tells what a launch costs, and nothing of bandwidth; the file says so, and is read."""
    truth, ours = _cluster(tmp_path, {"launch.process_intel": 1.5}), tmp_path / "ours.toml"
    logs = _logs(tmp_path / "logs", truth, [("all_reduce", 1)], [1024])
    assert main(["calibrate", "--from", str(logs), "--like", "dgx-h100", "-o", str(ours)]) == 0
    said = capsys.readouterr().out
    assert "the logs have one number of nodes only, so they do not show how well others are predicted" in said
    fitted = load_cluster(str(ours)).constants
    assert set(fitted) <= {"launch.process_intel", "launch.LL", "hopper.hop_LL"}


def test_a_calibrated_file_is_calibrated_further(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--like FILE starts from what that file was fitted to, and keeps what the new logs do not tell."""
    before, ours = _cluster(tmp_path, {"ib.hop": 2.0, "launch.process_intel": 1.2}, "before"), tmp_path / "ours.toml"
    logs = _logs(tmp_path / "logs", _cluster(tmp_path, {"launch.process_intel": 1.5}), [("all_reduce", 1)], SIZES[:4])
    assert main(["calibrate", "--from", str(logs), "--like", str(before), "-o", str(ours)]) == 0
    constants = load_cluster(f"{ours}:2").constants
    known = nccl_constants().values
    assert constants["ib.hop"].value == pytest.approx(2.0 * known["ib.hop"])
    assert constants["launch.process_intel"].value == pytest.approx(1.5 * known["launch.process_intel"], rel=0.1)
    assert load_cluster(str(ours)).measured.endswith(f"everything else comes from {before}")


def test_without_an_output_the_file_is_printed_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is told goes to stderr: `distsim calibrate ... > ours.toml` is a cluster file."""
    truth, ours = _cluster(tmp_path, {"launch.process_intel": 1.5}), tmp_path / "ours.toml"
    logs = _logs(tmp_path / "logs", truth, [("all_reduce", 1)], SIZES[:3])
    assert main(["calibrate", "--from", str(logs), "--like", "dgx-h100"]) == 0
    printed = capsys.readouterr()
    assert "before -> after" in printed.err
    ours.write_text(printed.out)
    assert load_cluster(f"{ours}:2").name == "dgx-h100-measured"


def test_tables_of_ones_own_are_validated_on_the_file_beside_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`validate --from` finds the cluster file that the index names in its own folder."""
    truth = _cluster(tmp_path, TRUTH)
    (row,) = bench("all_reduce", load_cluster(f"{truth}:2"), [1 << 20])
    (tmp_path / "_index.csv").write_text(
        "file,op,on,nnodes,nproc_per_node,launcher,algo,nccl,use\na.csv,all_reduce,truth.toml,2,8,process,,,check\n"
    )
    (tmp_path / "a.csv").write_text(f"size_bytes,time_us\n{row.size_bytes},{row.time_us}\n")
    assert main(["validate", "--from", str(tmp_path), "--rows"]) == 0
    assert "+0.0%" in capsys.readouterr().out


def test_tables_are_not_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What compares them, and what fits the model to them, is named."""
    (tmp_path / "_index.csv").write_text("file,op,on,nnodes,nproc_per_node,launcher\n")
    assert main(["calibrate", "--from", str(tmp_path), "--like", "dgx-h100"]) == 2
    told = capsys.readouterr().err
    assert "expected logs of nccl-tests, got tables with an _index.csv" in told
    assert f"python -m tools.fitting.fit --from {tmp_path}" in told
    assert told.count("\n") == 1


def test_the_model_is_fitted_to_tables_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hops inside a node of half more than the shipped ones: the tool writes constants with longer ones."""
    name = "hopper.hop_LL"
    truth, output = _cluster(tmp_path, {name: 1.5}), tmp_path / "nccl.toml"
    (tmp_path / "_index.csv").write_text(
        "file,op,on,nnodes,nproc_per_node,launcher,use\na.csv,all_reduce,dgx-h100,1,8,process,fit\n"
    )
    rows = [f"{row.size_bytes},{row.time_us}" for row in bench("all_reduce", load_cluster(str(truth)), [256, 1 << 20])]
    (tmp_path / "a.csv").write_text("\n".join(["size_bytes,time_us", *rows]) + "\n")
    monkeypatch.setattr(sys, "argv", ["fit.py", "--from", str(tmp_path), "--rounds", "2", "-o", str(output)])
    fit_main()
    assert name in capsys.readouterr().out
    assert read_constants(output).values[name] > 1.1 * nccl_constants().values[name]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--plot", "a.png"], "--plot a.png: expected a file ending in .svg"),
        ([], "expected --like CLUSTER, the most similar cluster"),
        (["--like", "dgx-h100", "-o", "no/such/file.toml"], "-o no/such/file.toml: no folder no/such; create it first"),
        (["--like", "dgx-h100", "-o", "/tmp"], "-o /tmp: expected a file, got a folder; try -o /tmp/cluster.toml"),
        (["--like", "dgx-h100", "-o", "/proc/x.toml"], "-o /proc/x.toml: cannot be written"),
        (["--like", "dgx-h100", "--plot", "no/fit.svg"], "--plot no/fit.svg: no folder no; create it first"),
        (["--like", "dgx-h10"], "unknown cluster 'dgx-h10'"),
    ],
)
def test_mistakes_are_one_line(argv: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2."""
    (tmp_path / "a.log").write_text(log("all_reduce", [(1024, 30.0)]))
    assert main(["calibrate", "--from", str(tmp_path), *argv]) == 2
    told = capsys.readouterr()
    assert said in told.err.splitlines()[-1]
    if "/" in said:  # a path is told before the work
        assert told.err.count("\n") == 1
        assert told.out == ""


def test_what_a_fit_makes_worse_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two operations that cannot both be had: the one that the fit gave up is named, with both errors."""
    logs = tmp_path / "logs"
    logs.mkdir()
    sizes = [1 << power for power in range(25, 31)]
    for op, factor in (("all_gather", 1.0), ("reduce_scatter", 1.6)):
        rows = bench(op, load_cluster("dgx-h100:2"), sizes)
        (logs / f"{op}.log").write_text(log(op, [(row.size_bytes, row.time_us * factor) for row in rows], nodes=2))
    assert main(["calibrate", "--from", str(logs), "--like", "dgx-h100", "-o", str(tmp_path / "ours.toml")]) == 0
    warned = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning:")]
    assert len(warned) == 1
    assert warned[0].startswith("warning: the fit made this worse: all_gather on 2 x 8, > 16 MiB: 0.0% off as dgx-h100")
    assert warned[0].endswith("(too slow)")


def test_a_fit_that_agrees_warns_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Logs of what the preset says."""
    truth, ours = _cluster(tmp_path, {}), tmp_path / "ours.toml"
    logs = _logs(tmp_path / "logs", truth, [("all_reduce", 2)])
    assert main(["calibrate", "--from", str(logs), "--like", "dgx-h100", "-o", str(ours)]) == 0
    assert "warning" not in capsys.readouterr().out
