"""`distsim validate --training`: the rows, the command that repeats each, the errors and the bounds."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distsim.calibration.validate import clone
from distsim.cli import main
from distsim.cluster import load_cluster
from distsim.errors import UsageError
from tools.fitting import training_steps
from tools.fitting.rows import Row, read_rows
from tools.fitting.training_steps import PROGRAMS, SimulatedRow, command, run_of, summarise

HEADER = "table,name,on,nproc_per_node,program,flags,step_s,memory_GiB,source\n"


def row(name: str = "a row", on: str = "dgx-h100:1", step_s: float = 2.0, memory_gib: float | None = 10.0) -> Row:
    return Row("steps", name, on, None, "fsdp2.py", ("--mbs", "2"), step_s, memory_gib, "a paper")


def came(what: Row, step_s: float, memory_gib: float = 10.0) -> SimulatedRow:
    """A run whose report says so."""
    training = {"step_time_s": step_s, "peak_memory_bytes": int(memory_gib * 2**30)}
    training |= {"tokens_per_s_per_gpu": 5605.0, "mfu": 0.4}
    return run_of(what, 31.4, {"training": training})


def test_the_yardstick_is_there_with_its_sources() -> None:
    """Published steps on one node to many, and others on one; each names its source, its program is in
    scenarios/training or a published one."""
    rows = read_rows()
    assert sum(row.table == "steps" for row in rows) >= 24
    assert sum(row.table == "node" for row in rows) >= 8
    assert all(row.num_nodes == 1 for row in rows if row.table == "node")
    assert all(row.source.startswith(("http", "github:", "arXiv:")) for row in rows)
    assert {row.program for row in rows if row.checkout is None} == {
        "fsdp1.py",
        "fsdp2.py",
        "ddp.py",
        "zero1.py",
        "tp_pp.py",
        "moe.py",
    }
    assert len({row.name for row in rows}) == len(rows)


def test_the_flags_of_every_row_fit_its_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shape divides, and the parallel dimensions make as many ranks as the cluster has GPUs."""
    monkeypatch.syspath_prepend(str(PROGRAMS))
    monkeypatch.delitem(sys.modules, "options", raising=False)
    import options  # type: ignore[import-not-found]

    sizes: dict[str, int] = {}
    for each in (each for each in read_rows() if each.checkout is None):
        if each.on not in sizes:
            sizes[each.on] = len(load_cluster(each.on).devices)
        monkeypatch.setenv("WORLD_SIZE", str(each.nproc_per_node or sizes[each.on]))
        kinds, dtypes = (
            ("tp", "pp", "vpp", "ep", "compile", "fp8", "fused_norm", "shard", "bf16 gradients"),
            ("bf16", "fp16"),
        )
        named = ("megatron", "nanotron", "internevo")[: 3 if each.program == "zero1.py" else 2]
        known = {"does": kinds, "dtypes": dtypes, "frameworks": named}
        args = options.options("", options.GPT_7B, **known, argv=list(each.flags))
        llama = any(name in each.name for name in ("Llama", "DeepSeek", "InternLM"))
        assert args.arch == ("llama" if llama else "gpt"), each.name
        own = {"nanotron": "nanotron", "InternEvo": "internevo"}.get(each.framework, "megatron")
        assert args.framework == own, each.name
    sys.modules.pop("options", None)


def test_the_command_is_what_a_user_would_type(tmp_path: Path) -> None:
    """`distsim run --on PRESET:N --report FILE program flags`, with fewer ranks where fewer took part."""
    words = command(row(), tmp_path / "r.json")
    assert words[1:6] == ["-m", "distsim", "run", "--on", "dgx-h100:1"]
    assert words[-5:] == [str(PROGRAMS / "fsdp2.py"), "--mbs", "2", "--steps", "2"]
    assert words[words.index("--report") + 1] == str(tmp_path / "r.json")
    fewer = Row("node", "x", "aws-p4d:1", 4, "ddp.py", (), 1.0, None, "s")
    words = command(fewer, tmp_path / "r.json")
    assert words[words.index("--nproc-per-node") + 1] == "4"


def test_a_wrong_table_names_every_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Row and column, all at once, and exit code 2."""
    (tmp_path / "rows.csv").write_text(
        HEADER + "steps,a,dgx-h100:1,,ddp.py,--mbs 1,0,,s\nother,b,dgx-h100:1,,ddp.py,--mbs 1,1,,s\n"
        "steps,c,dgx-h100:x,,ddp.py,--mbs 1,1,,s\nsteps,,dgx-h100:1,,ddp.py,--mbs 1,1,,s\n"
    )
    assert main(["validate", "--training", "--from", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "row 1: step_s: expected a number above 0, got 0" in said
    assert "row 2: table: expected steps or node, got other" in said
    assert "row 3: on: expected PRESET:NODES" in said
    assert "row 4: name: expected a value" in said


def test_errors_and_bounds() -> None:
    """Signed errors of step and memory; medians by nodes; each broken bound in words."""
    good = summarise([came(row("a"), 2.1), came(row("b", on="dgx-h100:4"), 1.8)])
    assert good.medians == {"one node": pytest.approx(0.05), "many nodes": pytest.approx(0.1)}
    assert good.memory == 0.0
    assert good.broken == []
    bad = summarise(
        [
            came(row("slow"), 2.7),
            came(row("large"), 2.0, memory_gib=11.5),
            came(row("far", on="dgx-h100:4", memory_gib=None), 2.3),
            SimulatedRow(row("dead"), 1.0, failure="RuntimeError: no"),
        ]
    )
    assert bad.broken == [
        "dead: it did not run: RuntimeError: no",
        "the step on one node: median error 17.5%, at most 8%",
        "the step on many nodes: median error 15.0%, at most 12%",
        "slow: the step is +35.0% off, at most 30%",
        "large: memory is +15.0% off, at most 10%",
    ]


def _answers(monkeypatch: pytest.MonkeyPatch, by_name: dict[str, Any]) -> None:
    """`distsim run` writes these documents; an int is its exit code."""

    def run(words: list[str], **_: object) -> SimpleNamespace:
        found = by_name[words[words.index("--mbs") + 1]]
        if isinstance(found, int):
            return SimpleNamespace(returncode=found, stdout="step: 1", stderr="RuntimeError: out of ideas\nbye\n")
        Path(words[words.index("--report") + 1]).write_text(json.dumps(found))
        return SimpleNamespace(returncode=0, stdout="", stderr="")

    monkeypatch.setattr(training_steps.subprocess, "run", run)


def _table(folder: Path) -> str:
    (folder / "rows.csv").write_text(
        "# a comment\n" + HEADER + "steps,Llama on two nodes with a rather long name for it,dgx-h100:2,,fsdp2.py,"
        "--mbs 1,2.0,60,s\nnode,DDP,aws-p5:1,,ddp.py,--mbs 2,0.5,,s\n"
    )
    return str(folder)


@pytest.mark.parametrize("columns", ["80", "120"])
def test_the_table(
    columns: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line a row that fits the terminal, medians with their bounds, exit code 0; the same figures as JSON, with
    a line of progress a row beside it.
    """
    monkeypatch.setenv("COLUMNS", columns)
    training = {"step_time_s": 2.1, "peak_memory_bytes": 63 << 30, "tokens_per_s_per_gpu": 1.0, "mfu": 0.4}
    _answers(monkeypatch, {"1": {"training": training}, "2": {"training": training | {"step_time_s": 0.49}}})
    assert main(["validate", "--training", "--from", _table(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= int(columns)
    first = next(line for line in said.splitlines() if line.startswith("Llama on two nodes"))
    assert first.split()[-7:-1] == ["2", "2.1", "+5.0%", "60.0", "63.0", "+5.0%"]
    assert "one node:  1 rows, median error of the step 2.0% (at most 8%)" in said
    assert ": 2 rows, median of the errors +1.5%, of their sizes 3.5%" in said
    assert "all bounds hold" in said
    assert main(["validate", "--training", "--json", "--from", str(tmp_path)]) == 0
    said, progress = capsys.readouterr()
    found = json.loads(said)
    assert [entry["step_error"] for entry in found["rows"]] == [pytest.approx(0.05), pytest.approx(-0.02)]
    assert found["broken"] == []
    assert [line.split()[0] for line in progress.splitlines()] == ["1/2", "2/2"]


def test_a_step_of_very_many_micro_batches_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two shorter ones are simulated, each with the pipeline full, and a straight line goes through them; what it comes
    to is marked."""
    ran = []

    def run(words: list[str], **_: object) -> SimpleNamespace:
        micro_batches = int(words[words.index("--accum") + 1])
        ran.append(micro_batches)
        step_s = 0.5 + 0.25 * micro_batches
        training = {"step_time_s": step_s, "peak_memory_bytes": 1 << 30, "mfu": 0.1 * micro_batches / step_s}
        Path(words[words.index("--report") + 1]).write_text(json.dumps({"training": training}))
        return SimpleNamespace(returncode=0, stdout="", stderr="")

    monkeypatch.setattr(training_steps.subprocess, "run", run)
    (tmp_path / "rows.csv").write_text(
        HEADER
        + "node,long,aws-p5:1,,zero1.py,--accum 256 --pp 4,64.5,,s\nnode,short,aws-p5:1,,zero1.py,--accum 16,4.5,,s\n"
        + "node,interleaved,aws-p5:1,,tp_pp.py,--accum 96 --pp 4 --vpp 2,24.5,,s\n"
    )
    assert main(["validate", "--training", "--from", str(tmp_path)]) == 0
    assert sorted(ran) == sorted([4, 8, 1, 2, 8, 12])
    said = capsys.readouterr().out
    assert "long *" in said
    assert "short *" in said
    assert "rows: 3, in 0 s" in said
    assert main(["validate", "--training", "--json", "--from", str(tmp_path)]) == 0
    long, short, interleaved = json.loads(capsys.readouterr().out)["rows"]
    assert (long["step_time_s"], long["mfu"]) == (pytest.approx(64.5), pytest.approx(25.6 / 64.5))
    assert (long["micro_batches_simulated"], short["micro_batches_simulated"]) == ([4, 8], [1, 2])
    assert (interleaved["step_time_s"], interleaved["micro_batches_simulated"]) == (pytest.approx(24.5), [8, 12])


def test_rows_are_simulated_beside_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As many as there are cores; printed in their order all the same."""
    both = threading.Barrier(2, timeout=30)

    def run(words: list[str], **_: object) -> SimpleNamespace:
        both.wait()
        training = {"step_time_s": 0.5, "peak_memory_bytes": 1 << 30}
        Path(words[words.index("--report") + 1]).write_text(json.dumps({"training": training}))
        return SimpleNamespace(returncode=0, stdout="", stderr="")

    monkeypatch.setattr(training_steps.subprocess, "run", run)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    (tmp_path / "rows.csv").write_text(
        HEADER + "node,one,aws-p5:1,,ddp.py,--mbs 1,0.5,,s\nsteps,many,aws-p5:2,,ddp.py,--mbs 2,0.5,,s\n"
    )
    assert main(["validate", "--training", "--from", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.index("\nmany ") < said.index("\none ")  # the yardstick comes first
    assert not both.broken


def test_a_row_says_what_of_the_memory_was_published(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was reserved, or with memory_of what was allocated; another word is a fault of the table."""
    header = HEADER.replace("source", "source,memory_of")
    line = "node,a row,aws-p5:1,,ddp.py,--mbs 1,0.5,10,s,{}\n"
    training = {"step_time_s": 0.5, "peak_memory_bytes": 10 << 30, "peak_allocated_bytes": 9 << 30}
    errors = []
    for word in ("", "allocated"):
        (tmp_path / "rows.csv").write_text(header + line.format(word))
        (row,) = read_rows(tmp_path)
        errors.append(run_of(row, 1.0, {"training": training}).memory_error)
    assert errors == [pytest.approx(0.0), pytest.approx(-0.1)]
    (tmp_path / "rows.csv").write_text(header + line.format("used"))
    assert main(["validate", "--training", "--from", str(tmp_path)]) == 2
    assert "row 1: memory_of: expected allocated or reserved, got used" in capsys.readouterr().err


def test_rows_nobody_looked_at_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mark in the table, and a median of their own; a word that is not yes is a fault of the table."""
    training = {"step_time_s": 0.55, "peak_memory_bytes": 1 << 30}
    _answers(monkeypatch, {"1": {"training": training}, "2": {"training": training | {"step_time_s": 0.5}}})
    header = HEADER.replace("source", "source,unseen")
    lines = "node,new,aws-p5:1,,ddp.py,--mbs 1,0.5,,s,{}\nnode,old,aws-p5:1,,ddp.py,--mbs 2,0.5,,s,\n"
    (tmp_path / "rows.csv").write_text(header + lines.format("yes"))
    assert main(["validate", "--training", "--from", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "new ?" in said
    assert "old ?" not in said
    assert "? (1 of them) were not looked at while the model was improved: median error 10.0%" in said
    (tmp_path / "rows.csv").write_text(header + lines.format("perhaps"))
    assert main(["validate", "--training", "--from", str(tmp_path)]) == 2
    assert "row 1: unseen: expected yes or nothing, got perhaps" in capsys.readouterr().err


def test_a_row_that_fails_is_said_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its last error in its line, and exit code 5."""
    training = {"step_time_s": 0.5, "peak_memory_bytes": 1 << 30}
    _answers(monkeypatch, {"1": 1, "2": {"training": training}})
    assert main(["validate", "--training", "--from", _table(tmp_path)]) == 5
    said = capsys.readouterr().out
    assert "did not run: RuntimeError: out of ideas" in said
    assert "one node:  1 rows" in said
    assert main(["validate", "--training", "--from", str(tmp_path), "--table", "DDP"]) == 0
    assert "Llama" not in capsys.readouterr().out


def test_usage_errors_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No such row; options of the other comparison; a report without figures; an installation without programs."""
    _answers(monkeypatch, {"1": {"schema": "distsim.report/1"}, "2": {}})
    for words, told in [
        (["--table", "nothing"], "no row's name contains 'nothing'"),
        (["--rows"], "do not go with --training"),
        (["--from", _table(tmp_path)], "has no 'training': it ran without a simulated GPU"),
    ]:
        assert main(["validate", "--training", *words]) == 2
        said = capsys.readouterr().err
        assert told in said
        assert said.count("\n") == 1
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="run it in the top folder of a clone"):
        clone(tmp_path / "site-packages")
