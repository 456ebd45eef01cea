"""The model against measurements."""

from __future__ import annotations

import json

import pytest

from distsim.calibration.compare import Bench, read_tables
from distsim.calibration.live import LiveRow, check_gloo, cluster_toml, fit_gloo
from distsim.calibration.predictions import predicted, summarise
from distsim.cli import main
from distsim.collectives.constants import fitted_folder, nccl_constants
from distsim.errors import UsageError
from tools.fitting.least_squares import fit


@pytest.mark.parametrize(
    "name", ["nvidia_dgxc_h100", "superbench_a100_n1x8_all_reduce", "snellius_h100_n2x4_all_gather"]
)
def test_a_machines_bounds_hold(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One node of each generation, and one pair of nodes, within the bounds."""
    assert main(["validate", "--table", name]) == 0
    assert "all bounds hold" in capsys.readouterr().out


@pytest.mark.slow
def test_all_bounds_hold(capsys: pytest.CaptureFixture[str]) -> None:
    """Machines left out, more nodes left out and all tables as fitted: within the bounds the report has for each."""
    assert main(["validate", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["broken"] == []
    assert len(found["tables"]) >= 49


@pytest.mark.slow
def test_a_broken_bound_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With NVLink at half its speed the command says which bounds are broken and exits with 5."""
    wrong = nccl_constants().changed({"hopper.efficiency_Simple": 0.4, "hopper.nvls": 0.3, "ampere.local": 2.0})
    monkeypatch.setattr("distsim.calibration.predictions.nccl_constants", lambda: wrong)
    assert main(["validate", "--table", "h100_n1x8"]) == 5
    assert "BROKEN  fitted, xxrjun, > 16 MiB: median error" in capsys.readouterr().out


def test_every_table_names_its_source_and_every_constant_its_own() -> None:
    """No figure without where it comes from."""
    assert all(table.source for table in read_tables())
    text = (fitted_folder() / "nccl.toml").read_text("utf-8")
    entries = [line for line in text.splitlines() if " = {" in line]
    assert len(entries) > 60
    assert all('source = "' in line and "uncertainty = " in line for line in entries)


def test_a_fit_finds_a_constant_again() -> None:
    """From a wrong start, the fit to simulated tables returns to what they were simulated with."""
    truth = nccl_constants()
    bench = Bench.of(next(table for table in read_tables() if table.name == "together_h100_n1x8_ring_all_gather"))
    bench.use(truth)
    rows = [
        type(row)(row.size_bytes, time) for row, time in zip(bench.table.rows, bench.times_us().tolist(), strict=True)
    ]
    import dataclasses

    made = Bench(dataclasses.replace(bench.table, rows=tuple(rows)), bench.compiler, bench.devices)
    name = "hopper.efficiency_Simple"
    start = truth.changed({name: truth.values[name] * 0.8})
    assert fit([made], start, [name]).constants.values[name] == pytest.approx(truth.values[name], rel=0.02)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["validate", "--table", "nothing"], "no table's name contains 'nothing'"),
        (["validate", "--from", "nowhere"], "_index.csv"),
        (["calibrate"], "--from DIR"),
        (["calibrate", "--on", "nccl"], "use --from"),
        (["calibrate", "--on", "gloo", "--nproc-per-node", "1"], "at least 2 ranks"),
    ],
)
def test_mistakes_are_named(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, exit code 2."""
    assert main(argv) == 2
    assert words in capsys.readouterr().err


def test_a_table_with_a_wrong_number_is_named(tmp_path: object) -> None:
    """File and row of what cannot be read."""
    from pathlib import Path

    folder = Path(str(tmp_path))
    head = "file,op,on,nnodes,nproc_per_node,launcher,algo,nccl,use\n"
    (folder / "_index.csv").write_text(head + "a.csv,all_reduce,dgx-h100,1,8,process,,,check\n")
    (folder / "a.csv").write_text("size_bytes,time_us\n8,13.0\n16,fast\n")
    with pytest.raises(UsageError, match=r"a\.csv: row 2"):
        read_tables(folder)


def test_a_calibration_of_gloo_predicts_what_it_was_not_shown() -> None:
    """From times at powers of 4 that follow start-up + bytes / rate, with a knee, the sizes between are
    predicted."""

    def time_us(op: str, size: int) -> float:
        moved = {"all_reduce": 1.0, "broadcast": 1.0, "alltoall": 0.5}[op] * size
        return 100.0 + moved / 2e3 + max(moved - 1e6, 0.0) / 4e3

    ops = ("all_reduce", "broadcast", "alltoall")
    known = [LiveRow(op, 4**power, time_us(op, 4**power)) for op in ops for power in range(3, 13)]
    text = cluster_toml(fit_gloo(known, 2), name="made", nodes=1, ranks_per_node=2, note="made up")
    between = [LiveRow(op, 2 * 4**power, time_us(op, 2 * 4**power)) for op in ops for power in range(3, 12)]
    median = float(check_gloo(text, between, 1, 2).rsplit("median error ", 1)[1].rstrip("%"))
    assert median < 5.0


@pytest.mark.slow
def test_other_cost_models_stand_beside_ours(capsys: pytest.CaptureFixture[str]) -> None:
    """One command has torch's estimator and NCCL's own on the same tables; NCCL has no model of alltoall."""
    main(["validate", "--table", "h100_n", "--torch-estimator", "--json"])
    document = json.loads(capsys.readouterr().out)
    for name in ("torch", "nccl"):
        peer = document[name]
        assert peer["rows"] > 0
        assert peer["median"] > peer["ours"]
    operations = {table["name"]: table["op"] for table in document["tables"]}
    assert "alltoall" in operations.values()
    assert not [name for name in document["nccl"]["tables"] if operations[name] == "alltoall"]


@pytest.mark.soak
@pytest.mark.slow
def test_better_times_than_torchs_own_estimator() -> None:
    """At least twice as close in the median, on the tables torch's estimator knows."""
    import numpy as np

    pytest.importorskip("torch._inductor.comm_analysis")
    from distsim.calibration.predictions import torch_times_us

    ours, theirs = [], []
    for errors in summarise(predicted(read_tables())).tables:
        times = torch_times_us(errors.bench)
        if times is not None:
            theirs.extend(np.abs(times / errors.bench.measured_us - 1.0).tolist())
            ours.extend(np.abs(errors.relative).tolist())
    assert np.median(theirs) > 2 * np.median(ours)
