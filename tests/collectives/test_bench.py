"""distsim bench: nccl-tests' table."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from distsim.calibration.compare import data_folder
from distsim.cli import main
from distsim.cluster import load_cluster
from distsim.collectives.uncertainty import MOST_NODES, interval
from distsim.errors import UsageError
from distsim.network.bench import bench_op, busbw_factor, counted

ROW = re.compile(
    r"^ +(\d+) +(\d+) +(\w+) +(\w+) +(-?\d+)"
    + r" +([\d.]+) +([\d.]+) +([\d.]+) +N/A" * 2
    + r"(?: +\([\d.,]+-[\d.,]+\))?$"
)


def table(capsys: pytest.CaptureFixture[str], *argv: str) -> list[tuple[str, ...]]:
    """The rows that a command prints."""
    assert main(["bench", *argv]) == 0
    out = capsys.readouterr().out
    return [match.groups() for line in out.splitlines() if (match := ROW.match(line))]


def test_the_table_is_read_as_nccl_tests_own(capsys: pytest.CaptureFixture[str]) -> None:
    """Size, count, type, redop, root, then time, algbw and busbw out of place and in place, and the
    average."""
    assert main(["bench", "all_reduce", "--on", "dgx-h100:2", "-b", "8", "-e", "8G", "-f", "4"]) == 0
    out = capsys.readouterr().out
    rows = [match.groups() for line in out.splitlines() if (match := ROW.match(line))]
    assert [int(row[0]) for row in rows] == [8 << (2 * k) for k in range(16)]
    assert all(row[2:5] == ("float", "sum", "-1") for row in rows)
    assert re.search(r"^# Avg bus bandwidth    : [\d.]+$", out, re.M)
    assert all(line.startswith("#") or ROW.match(line) for line in out.splitlines() if line)


def test_bus_bandwidth_is_algorithm_bandwidth_times_the_factor(capsys: pytest.CaptureFixture[str]) -> None:
    """2 (n - 1) / n for all_reduce, (n - 1) / n for what spreads its buffer, 1 for the others."""
    for op, factor in (
        ("all_reduce", 1.875),
        ("all_gather", 0.9375),
        ("alltoall", 0.9375),
        ("broadcast", 1.0),
        ("sendrecv", 1.0),
    ):
        assert busbw_factor(op, 16) == factor
        main(["bench", op, "--on", "dgx-a100:2", "--sizes", "256M", "--json"])
        (row,) = json.loads(capsys.readouterr().out)["rows"]
        assert row["algbw_GBps"] == pytest.approx(row["size_bytes"] / row["time_us"] / 1e3)
        assert row["busbw_GBps"] == pytest.approx(row["algbw_GBps"] * factor)


@pytest.mark.parametrize(
    ("op", "size", "ranks", "expected"),
    [
        ("all_reduce", 1001, 16, (1000, 250)),
        ("all_gather", 1 << 20, 16, (1 << 20, 1 << 14)),
        ("all_gather", 1000, 16, (768, 12)),
        ("reduce_scatter", 100, 16, (0, 0)),
        ("alltoall", 100, 16, (64, 1)),
        ("broadcast", 10, 3, (8, 2)),
    ],
)
def test_sizes_are_rounded_as_nccl_tests_rounds(op: str, size: int, ranks: int, expected: tuple[int, int]) -> None:
    """To whole elements, and for spread buffers to multiples of ranks (of 16 bytes each in all_gather)."""
    assert counted(op, size, ranks, 4) == expected


def test_the_json_has_what_the_table_has(capsys: pytest.CaptureFixture[str]) -> None:
    """Operation, cluster, ranks, version and rows with algorithm, protocol and channels."""
    assert main(["bench", "allreduce", "--on", "dgx-h100:1", "--sizes", "1024,3M", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["op"], found["cluster"], found["ranks"]) == ("all_reduce", "dgx-h100", 8)
    assert [row["size_bytes"] for row in found["rows"]] == [1024, 3 << 20]
    assert {"time_us", "algbw_GBps", "busbw_GBps", "algo", "proto", "channels"} <= set(found["rows"][0])


def test_flags_without_effect_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """nccl-tests' iterations and checks are taken, and a comment says what they mean here."""
    assert main(["bench", "all_reduce", "-b", "1M", "-e", "1M", "-g", "1", "-n", "20", "-w", "5", "-c", "1"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^# -n 20 has no effect: ", out, re.M)
    assert re.search(r"^# -c 1 has no effect: no values are computed", out, re.M)


def test_settings_of_nccl_without_effect_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """nccl-tests obeys NCCL's environment; the table says what of it no time follows."""
    monkeypatch.setenv("NCCL_NTHREADS", "256")
    assert main(["bench", "all_reduce", "--on", "dgx-h100:1", "-b", "8", "-e", "8"]) == 0
    assert "# NCCL_NTHREADS=256 in the environment has no effect on simulated times" in capsys.readouterr().out


def test_sizes_that_are_faster_on_more_nodes_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """NCCL prefers NVLSTree on 2 nodes where LL128 is quicker, and takes LL128 on 4."""
    assert main(["bench", "all_reduce", "--on", "dgx-h100:4", "-b", "512K", "-e", "256M", "-f", "8"]) == 0
    note = re.search(r"^# faster than on 2 nodes, .*: (.*)$", capsys.readouterr().out, re.M)
    assert note is not None
    assert note[1] == "524288 B (Tree/LL128 here, NVLSTree/Simple there)"


def test_rows_without_messages_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """At fidelity message a ring is simulated so; NVLS, which has no such form, says that it is fluid."""
    assert main(["bench", "all_reduce", "--on", "dgx-h100:1", "--sizes", "8,1G", "--fidelity", "message"]) == 0
    assert "# NVLS cannot be simulated by messages: its rows use flows" in capsys.readouterr().out
    main(["bench", "all_reduce", "--on", "dgx-h100:1", "--sizes", "8,1G", "--fidelity", "message", "--json"])
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["fidelity"] for row in rows] == ["message", "fluid"]


def test_explain_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    """--explain lists the candidates with costs and reasons, the chosen one first."""
    assert main(["bench", "all_reduce", "--on", "dgx-h100:2", "--sizes", "64M", "--explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith(" -> ")
    assert any("NVLSTree is Simple only" in line for line in lines)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["all_reduse"], "did you mean all_reduce"),
        (["all_reduce", "--sizes", "10Q"], "expected a size in bytes"),
        (["all_reduce", "-b", "1G", "-e", "1M"], "-b no larger than -e"),
        (["all_reduce", "-b", "8", "-e", "8G", "-i", "8"], "use -f 2"),
        (["all_reduce", "-f", "1"], "step factor of 2 or more"),
        (["all_reduce", "-d", "float3"], "expected a type"),
        (["all_reduce", "-o", "xor"], "expected a reduction"),
        (["broadcast", "-r", "99"], "root from 0 to 7"),
        (["all_reduce", "--on", "gloo"], "bench simulates"),
        (["all_reduce", "--on", "dgx-h100:1", "--nproc-per-node", "16"], "the cluster dgx-h100 has 8"),
        (["all_reduce", "--algo", "star"], "an algorithm of NCCL"),
        (["all_reduce", "-g", "zero"], "a number of GPUs"),
        (["all_reduce", "--on", "dgx-h100:64", "--fidelity", "message", "--sizes", "8"], "at most 256 ranks"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What was expected, what came, what to do."""
    assert main(["bench", *argv]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_usual_spellings_are_known() -> None:
    """nccl-tests', torch's and hyphenated names."""
    for name in ("allreduce", "all-reduce", "all_reduce_perf", "ALL_REDUCE"):
        assert bench_op(name) == "all_reduce"
    assert bench_op("all_to_all_single") == bench_op("all_to_all") == "alltoall"
    with pytest.raises(UsageError):
        bench_op("")


SPREAD = """
base = "dgx-h100"
name = "measured"
[errors]
"1 node, < 64 KiB" = { low = 0.5, high = 1.25 }
"2 nodes, > 16 MiB" = { low = 0.8, high = 1.5 }
"""


def test_a_calibrated_cluster_has_the_interval_of_its_own_logs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the classes of nodes and sizes that they had; the table and JSON say it, and what it is of."""
    path = tmp_path / "measured.toml"
    path.write_text(SPREAD)
    assert main(["bench", "all_reduce", "--on", f"{path}:1", "--sizes", "1K", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["low_us"], row["high_us"]) == pytest.approx((0.5 * row["time_us"], 1.25 * row["time_us"]))
    assert row["interval_from"] == "this cluster's logs, inside a node, 1 node"
    assert main(["bench", "all_reduce", "--on", f"{path}:2", "--sizes", "1G"]) == 0
    out = capsys.readouterr().out
    time_us = float(next(row for line in out.splitlines() if (row := ROW.match(line)))[6])
    low, high = (float(f"{time_us * factor:.3g}") for factor in (0.8, 1.5))
    assert f"({low:,.0f}-{high:,.0f})" in out
    assert "# 8 of 10 measured times lie within the interval, from errors of this cluster's logs, ib, 2 nodes" in out


def test_an_interval_widens_beyond_the_largest_table(capsys: pytest.CaptureFixture[str]) -> None:
    """Each doubling of its nodes adds the width once more; the table says that nothing of this size was measured."""
    lines = (data_folder() / "tables" / "_index.csv").read_text(encoding="utf-8").splitlines()
    rows = csv.DictReader(line for line in lines if not line.startswith("#"))
    assert max(int(row["nnodes"]) for row in rows) == MOST_NODES
    cluster = load_cluster("dgx-h100:1024")
    at, twice = (interval(cluster, 1 << 20, nodes, 1.0) for nodes in (MOST_NODES, 2 * MOST_NODES))
    assert at is not None
    assert twice is not None
    assert (twice.low_s, twice.high_s) == (pytest.approx(at.low_s**2), pytest.approx(at.high_s**2))
    assert main(["bench", "all_reduce", "--on", "dgx-h100:512", "--sizes", "1M"]) == 0
    out = capsys.readouterr().out
    assert "# no measurement at this size (256 nodes at most): the interval is widened, from errors of " in out
    assert "8 of 10 measured times lie" not in out


def test_more_racks_than_any_table_has_get_no_interval(capsys: pytest.CaptureFixture[str]) -> None:
    """Two racks were measured; of three nobody knows how far a time may be off, and the table says so."""
    racks = load_cluster("gb200-nvl72:3")
    assert interval(racks, 1 << 30, 36, 1.0) is not None
    assert interval(racks, 1 << 30, 54, 1.0) is None
    assert interval(load_cluster("dgx-h100:64"), 1 << 30, 64, 1.0) is not None
    assert main(["bench", "all_reduce", "--on", "gb200-nvl72:3", "--sizes", "1G"]) == 0
    assert "# no measured table has more than 2 racks of one NVLink domain each" in capsys.readouterr().out
    assert main(["bench", "all_reduce", "--on", "gb200-nvl72:2", "--sizes", "1G"]) == 0
    assert "no measured table" not in capsys.readouterr().out


def test_a_release_that_the_tables_do_not_have_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Its choices are taken for those of the nearest one that they have."""
    assert main(["bench", "all_reduce", "--on", "dgx-h100:2", "--sizes", "1M", "--nccl-version", "2.99.1"]) == 0
    assert "# NCCL 2.99.1 is not among the releases whose choices are known (2.16 to 2.30): " in capsys.readouterr().out


def test_the_software_that_was_assumed_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Where it is more than NCCL's version: plugin, settings and variant."""
    assert main(["bench", "all_reduce", "--on", "polaris:setup5:2", "--sizes", "1M"]) == 0
    out = capsys.readouterr().out
    assert "# software assumed: NCCL 2.21.5, aws-ofi-nccl 1.9.1, " in out
    assert "FI_CXI_RX_MATCH_MODE=software" in out
    assert "(variant setup5)" in out
