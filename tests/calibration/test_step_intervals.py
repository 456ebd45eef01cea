"""Where a measured training step lies: intervals from the residuals of published ones."""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distsim.calibration.training import steps as runs_module
from distsim.calibration.training.steps import SHARE, Residual, held, interval, level, read_rows, source_of
from distsim.cli import main
from distsim.collectives.uncertainty import LAUNCH_BOUND, MANY_NODES, ONE_NODE, memory_error, regime_of, step_error
from tests.benchmarks.step_errors import memory_text, text_of


def residuals(source: str, regime: str, *ratios: float) -> list[Residual]:
    return [Residual(source, regime, math.log(ratio)) for ratio in ratios]


def test_rows_of_one_repository_are_one_source() -> None:
    """Whatever the file and the commit; so are those of one paper. The shipped rows have several sources."""
    first = source_of("https://github.com/pytorch/torchtitan/blob/b5bcd76/benchmarks/a.md")
    assert first == source_of("github:pytorch/torchtitan docs/b.md @1234567") == "pytorch/torchtitan"
    assert source_of("arXiv:2402.15627 / NSDI24 MegaScale Table 2") == "arXiv:2402.15627"
    assert source_of("a paper") == "a paper"
    assert len({source_of(row.source) for row in read_rows()}) >= 7


def test_an_interval_holds_the_simulated_step_and_most_measured_ones() -> None:
    """All measured steps were slower: the lower end is the simulated one, the upper one near the slowest."""
    known = residuals("a", ONE_NODE, 1.02, 1.04, 1.06) + residuals("b", ONE_NODE, 1.03, 1.05, 1.20)
    low, high = interval(known, ONE_NODE, 0.9)
    assert low == 1.0
    assert 1.06 <= high <= 1.20


def test_a_source_of_many_rows_weighs_as_one_of_few() -> None:
    """Two hundred rows of one source that are exact do not hide that two other sources are a tenth off."""
    exact, others = (
        residuals("a", ONE_NODE, *[1.0] * 200),
        residuals("b", ONE_NODE, 1.1) + residuals("c", ONE_NODE, 0.9),
    )
    assert interval(exact + others, ONE_NODE, 0.9) == (pytest.approx(0.9), pytest.approx(1.1))


def test_a_regime_that_few_sources_have_is_held_to_the_others() -> None:
    """One source alone says little of the next one: what other regimes show counts as well."""
    elsewhere = [one for source in "abcd" for one in residuals(source, ONE_NODE, 0.8, 1.0, 1.3)]
    low, high = interval(elsewhere + residuals("e", MANY_NODES, 1.01), MANY_NODES, 0.9)
    assert low < 0.85
    assert high > 1.2


def test_rows_are_judged_by_intervals_without_their_source() -> None:
    """A source that is far from all others lies outside, so that the quantiles have to reach further."""
    alike = [one for source in "abcde" for one in residuals(source, ONE_NODE, 0.97, 1.0, 1.03)]
    assert held(alike, 0.8).share == 1.0
    far = held(alike + residuals("f", ONE_NODE, 2.0, 2.0, 2.0), 0.9)
    assert far.share == pytest.approx(15 / 18)
    assert (far.rows, far.sources) == (18, 6)
    spread = [one for n, source in enumerate("abcdefghij") for one in residuals(source, ONE_NODE, 0.9 + 0.02 * n)]
    assert held(spread, level(spread)).share >= SHARE


def test_the_regime_goes_by_the_hosts_share_then_by_nodes() -> None:
    """A host that needs half of the step for what has a price may well set the pace with the rest."""
    assert regime_of(0.49, 1.0, 1) == ONE_NODE
    assert regime_of(0.49, 1.0, 2) == MANY_NODES
    assert regime_of(0.5, 1.0, 2) == LAUNCH_BOUND


def test_the_shipped_intervals_have_every_regime() -> None:
    """The simulated step is inside, and what is near launch-bound is known worst."""
    known = {regime: step_error(regime) for regime in (ONE_NODE, MANY_NODES, LAUNCH_BOUND)}
    assert all(one.low <= 1.0 < one.high and one.rows >= one.sources >= 2 for one in known.values())
    assert known[LAUNCH_BOUND].high > known[ONE_NODE].high


def test_the_errors_of_memory_are_those_of_the_rows() -> None:
    """Median and worst, of rows with a published peak alone; the shipped ones are of dozens of rows."""
    text = memory_text([{"memory_error": error} for error in (0.01, -0.2, None, 0.03)])
    assert tomllib.loads(text) == {"memory": {"median": 0.03, "worst": 0.2, "rows": 3}}
    assert memory_error().median < memory_error().worst
    assert memory_error().rows > 30


def test_the_file_says_what_the_residuals_say() -> None:
    """Ends, rows and sources of each regime, and how many rows of left out sources lie inside."""
    rows = [one for source in "abc" for one in residuals(source, ONE_NODE, 0.95, 1.1)]
    rows += residuals("a", MANY_NODES, 1.05) + residuals("b", LAUNCH_BOUND, 1.5)
    text = text_of(rows)
    assert "Of 8 rows of 3 sources" in text
    ends = tomllib.loads(text)
    assert {regime: (one["rows"], one["sources"]) for regime, one in ends.items()} == {
        ONE_NODE: (6, 3),
        MANY_NODES: (1, 1),
        LAUNCH_BOUND: (1, 1),
    }
    low, high = interval(rows, ONE_NODE, level(rows))
    assert (ends[ONE_NODE]["low"], ends[ONE_NODE]["high"]) == (pytest.approx(low), pytest.approx(high))


def test_validation_prints_how_many_unseen_rows_lie_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two sources whose simulated steps are off alike: each lies inside the other's interval."""

    def run(words: list[str], **_: object) -> SimpleNamespace:
        training: dict[str, Any] = {"step_time_s": 0.5, "peak_memory_bytes": 1 << 30, "step_regime": ONE_NODE}
        Path(words[words.index("--report") + 1]).write_text(json.dumps({"training": training}))
        return SimpleNamespace(returncode=0, stdout="", stderr="")

    monkeypatch.setattr(runs_module.subprocess, "run", run)
    header = "table,name,on,nproc_per_node,program,flags,step_s,memory_GiB,source\n"
    lines = [f"node,{name},aws-p5:1,,ddp.py,--mbs 1,0.52,,arXiv:2401.0000{name}\n" for name in "12"]
    (tmp_path / "rows.csv").write_text(header + "".join(lines))
    assert main(["validate", "--training", "--from", str(tmp_path)]) == 0
    assert "100% of 2 rows of 2 sources lie in an interval" in capsys.readouterr().out
    assert main(["validate", "--training", "--json", "--from", str(tmp_path)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["intervals"]["share"] == 1.0
    assert [row["regime"] for row in document["rows"]] == [ONE_NODE, ONE_NODE]
