"""Where a measured training step lies: intervals from the residuals of published ones."""

from __future__ import annotations

import json
import math
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distsim.cli import main
from distsim.cluster import load_cluster
from distsim.collectives.uncertainty import (
    LAUNCH_BOUND,
    MANY_GPUS,
    MANY_NODES,
    MOST_GPUS,
    ONE_NODE,
    memory_error,
    regime_of,
    sized_regime,
    step_error,
)
from tools.fitting import training_steps
from tools.fitting.rows import read_rows, source_of
from tools.fitting.step_errors import AUDITED, cards_text, memory_text, text_of
from tools.fitting.training_steps import SHARE, Residual, held, interval, level


def residuals(framework: str, regime: str, *ratios: float) -> list[Residual]:
    return [Residual(framework, regime, math.log(ratio)) for ratio in ratios]


def test_rows_of_one_repository_are_one_source() -> None:
    """Whatever the file and the commit; so are those of one paper. The shipped rows have several sources."""
    first = source_of("https://github.com/pytorch/torchtitan/blob/b5bcd76/benchmarks/a.md")
    assert first == source_of("github:pytorch/torchtitan docs/b.md @1234567") == "pytorch/torchtitan"
    assert source_of("arXiv:2402.15627 / NSDI24 MegaScale Table 2") == "arXiv:2402.15627"
    assert source_of("a paper") == "a paper"
    assert len({source_of(row.source) for row in read_rows()}) >= 7


def test_sources_of_one_framework_stay_together() -> None:
    """Three papers and a repository ran Megatron-LM; a row without a framework has its source as one."""
    rows = read_rows()
    sources = {source_of(row.source) for row in rows if row.framework == "Megatron-LM"}
    assert {"MooreThreads/SimuMax", "arXiv:2104.04473"} < sources
    assert len({row.framework for row in rows}) >= 6


def test_what_is_held_back_is_a_third_of_the_new_rows() -> None:
    """As held_back.toml says: whole sources, and none that was there before."""
    folder = Path(training_steps.__file__).parent
    chosen = tomllib.loads((folder / "held_back.toml").read_text(encoding="utf-8"))["sources"]
    back = [row for row in read_rows() if row.held_back]
    assert {source_of(row.source) for row in back} <= set(chosen)
    assert all(row.held_back for row in read_rows() if source_of(row.source) in chosen)
    assert len(back) >= 8


def test_rows_that_are_held_back_make_no_interval() -> None:
    """They are judged by it."""
    row = next(row for row in read_rows() if row.held_back)
    ran = training_steps.SimulatedRow(row, 1.0, step_s=row.step_s, regime=MANY_GPUS, likely_s=(0.9 * row.step_s, 9.9))
    assert training_steps.residuals_of([ran]) == []
    summary = training_steps.summarise([ran, replace(ran, likely_s=(0.1, 0.2)), replace(ran, likely_s=None)])
    assert summary.judged == (1, 2)


def test_an_interval_holds_the_simulated_step_and_most_measured_ones() -> None:
    """All measured steps were slower: the lower end is the simulated one, the upper one near the slowest."""
    known = residuals("a", ONE_NODE, 1.02, 1.04, 1.06) + residuals("b", ONE_NODE, 1.03, 1.05, 1.20)
    low, high = interval(known, ONE_NODE, 0.9)
    assert low == 1.0
    assert 1.06 <= high <= 1.20


def test_a_framework_of_many_rows_weighs_as_one_of_few() -> None:
    """Two hundred rows of one that are exact do not hide that two others are a tenth off."""
    exact, others = (
        residuals("a", ONE_NODE, *[1.0] * 200),
        residuals("b", ONE_NODE, 1.1) + residuals("c", ONE_NODE, 0.9),
    )
    assert interval(exact + others, ONE_NODE, 0.9) == (pytest.approx(0.9), pytest.approx(1.1))


def test_a_regime_that_few_frameworks_have_is_held_to_the_others() -> None:
    """One framework alone says little of the next one: what other regimes show counts as well."""
    elsewhere = [one for source in "abcd" for one in residuals(source, ONE_NODE, 0.8, 1.0, 1.3)]
    low, high = interval(elsewhere + residuals("e", MANY_NODES, 1.01), MANY_NODES, 0.9)
    assert low < 0.85
    assert high > 1.2


def test_rows_are_judged_by_intervals_without_their_framework() -> None:
    """A framework that is far from all others lies outside, so that the quantiles have to reach further."""
    alike = [one for source in "abcde" for one in residuals(source, ONE_NODE, 0.97, 1.0, 1.03)]
    assert held(alike, 0.8).share == 1.0
    far = held(alike + residuals("f", ONE_NODE, 2.0, 2.0, 2.0), 0.9)
    assert far.share == pytest.approx(15 / 18)
    assert (far.rows, far.frameworks) == (18, 6)
    spread = [one for n, source in enumerate("abcdefghij" * 2) for one in residuals(source, ONE_NODE, 0.9 + 0.01 * n)]
    assert held(spread, level(spread)).share >= SHARE


def test_what_collectives_and_rates_explain_is_not_counted_twice() -> None:
    """A report adds their part of the interval to that of published steps, whose errors have it already."""
    alone = [one for n, source in enumerate("abcdefghij") for one in residuals(source, ONE_NODE, 0.9 + 0.02 * n)]
    explained = [replace(one, beside=(0.15, 0.15)) for one in alone]
    assert level(explained) < level(alone)
    assert held(explained, level(explained)).share >= SHARE
    assert explained[0].lies_in(1.0, 1.0) == (True, pytest.approx(0.15))
    assert replace(explained[0], value=math.log(0.8)).lies_in(0.9, 1.0) == (False, pytest.approx(0.165, abs=0.001))
    wider = replace(explained[0], value=math.log(0.8), wider=2.0)
    assert wider.lies_in(0.9, 1.0)[0], "a card of which nothing is published"


def test_64_gpus_and_more_have_the_width_that_unseen_rows_ask_for() -> None:
    """With collectives and rates as in the median row: the file has what is left of it."""
    known = [
        replace(one, beside=(0.05, 0.15)) for one in residuals("a", MANY_GPUS, 1.0) + residuals("b", ONE_NODE, 1.0)
    ]
    ends = tomllib.loads(text_of(known))[MANY_GPUS]
    assert 1.0 - math.hypot(1.0 - ends["low"], 0.05) == pytest.approx(AUDITED[MANY_GPUS][0], abs=1e-4)
    assert 1.0 + math.hypot(ends["high"] - 1.0, 0.15) == pytest.approx(AUDITED[MANY_GPUS][1], abs=1e-4)


def test_the_regime_goes_by_the_hosts_share_then_by_nodes() -> None:
    """A host that needs half of the step for what has a price may well set the pace with the rest."""
    assert regime_of(0.49, 1.0, 1) == ONE_NODE
    assert regime_of(0.49, 1.0, 2) == MANY_NODES
    assert regime_of(0.5, 1.0, 2) == LAUNCH_BOUND
    assert sized_regime(MANY_NODES, 63) == MANY_NODES
    assert sized_regime(MANY_NODES, 64) == MANY_GPUS
    assert sized_regime(LAUNCH_BOUND, 64) == LAUNCH_BOUND


def test_the_shipped_intervals_have_every_regime() -> None:
    """The simulated step is inside; what is near launch-bound and what has many GPUs is known worst."""
    known = {regime: step_error(regime, 8) for regime in (ONE_NODE, MANY_NODES, LAUNCH_BOUND)}
    large = step_error(MANY_NODES, 64)
    ends = [*known.values(), large]
    assert len(ends) == 4
    assert all(one.low <= 1.0 < one.high and one.rows >= one.frameworks >= 2 for one in ends)
    one_node, few, launch_bound, many = ends[0], ends[1], ends[2], ends[3]
    assert launch_bound.high > one_node.high
    assert many.high / many.low > few.high / few.low


def test_an_interval_is_wider_beyond_what_was_measured() -> None:
    """More GPUs than the largest row has that is not held back, and a card that no row has; the reason is given."""
    rows = [row for row in read_rows() if not row.held_back]
    largest = max(row.num_nodes * (row.nproc_per_node or load_cluster(row.on).node.num_gpus) for row in rows)
    assert largest == MOST_GPUS
    assert step_error(MANY_NODES, largest) == step_error(MANY_NODES, 64)
    inside, beyond = step_error(MANY_NODES, largest), step_error(MANY_NODES, 2 * largest)
    assert (beyond.low, beyond.high) == pytest.approx((inside.low**2, inside.high**2))
    assert beyond.unmeasured == (f"no measurement at this size: the largest published step has {largest} GPUs",)
    measured, *others = (step_error(ONE_NODE, 8, card) for card in ("h100", "mi355x", "b200"))
    assert {(other.low, other.high) for other in others} == {(measured.low**2, measured.high**2)}
    many, known = (step_error(MANY_NODES, 64, card) for card in ("b200", "h100"))
    assert (many.low, many.high) == (known.low, known.high), "whose rows nobody had seen"
    reasons = ["no published step on mi355x", "published steps on b200 are of one source"]
    assert (measured.unmeasured, [*others[0].unmeasured, *others[1].unmeasured]) == ((), reasons)


def test_the_errors_of_memory_are_those_of_the_rows() -> None:
    """Median and worst, of rows with a published peak alone; the shipped ones are of dozens of rows."""
    text = memory_text([{"memory_error": error} for error in (0.01, -0.2, None, 0.03)])
    assert tomllib.loads(text) == {"memory": {"median": 0.03, "worst": 0.2, "rows": 3}}
    assert memory_error().median < memory_error().worst
    assert memory_error().rows > 30


def test_cards_are_those_of_rows_that_ran_and_are_not_held_back() -> None:
    """A card of a row that is for judging alone has no part in any interval."""
    rows = [
        {"gpu": gpu, "step_time_s": 1.0, "held_back": gpu == "b200", "source": f"arXiv:{source}"}
        for gpu, source in (("h100", 1), ("b200", 1), ("h100", 2), ("h100", 2))
    ]
    text = cards_text([*rows, {"gpu": "mi300x", "step_time_s": None, "held_back": False, "source": "arXiv:3"}])
    assert tomllib.loads(text) == {"cards": {"h100": 2}}


def test_the_file_says_what_the_residuals_say() -> None:
    """Ends, rows and frameworks of each regime, and how many rows of left out frameworks lie inside."""
    rows = [one for source in "abc" for one in residuals(source, ONE_NODE, 0.95, 1.1)]
    rows += residuals("a", MANY_NODES, 1.05) + residuals("b", LAUNCH_BOUND, 1.5) + residuals("c", MANY_GPUS, 1.2)
    text = text_of(rows)
    assert "Of 9 rows of 3 frameworks" in text
    ends = tomllib.loads(text)
    assert {regime: (one["rows"], one["frameworks"]) for regime, one in ends.items()} == {
        ONE_NODE: (6, 3),
        MANY_NODES: (1, 1),
        MANY_GPUS: (1, 1),
        LAUNCH_BOUND: (1, 1),
    }
    low, high = interval(rows, ONE_NODE, level(rows))
    assert (ends[ONE_NODE]["low"], ends[ONE_NODE]["high"]) == (pytest.approx(low), pytest.approx(high))


def test_validation_prints_how_many_unseen_rows_lie_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two frameworks whose simulated steps are off alike: each lies inside the other's interval."""

    def run(words: list[str], **_: object) -> SimpleNamespace:
        training: dict[str, Any] = {"step_time_s": 0.5, "peak_memory_bytes": 1 << 30, "step_regime": ONE_NODE}
        Path(words[words.index("--report") + 1]).write_text(json.dumps({"training": training}))
        return SimpleNamespace(returncode=0, stdout="", stderr="")

    monkeypatch.setattr(training_steps.subprocess, "run", run)
    header = "table,name,on,nproc_per_node,program,flags,step_s,memory_GiB,source\n"
    lines = [f"node,{name},aws-p5:1,,ddp.py,--mbs 1,0.52,,arXiv:2401.0000{name}\n" for name in "12"]
    (tmp_path / "rows.csv").write_text(header + "".join(lines))
    assert main(["validate", "--training", "--from", str(tmp_path)]) == 0
    assert "100% of 2 rows of 2 frameworks lie in an interval" in capsys.readouterr().out
    assert main(["validate", "--training", "--json", "--from", str(tmp_path)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["intervals"]["share"] == 1.0
    assert [row["regime"] for row in document["rows"]] == [ONE_NODE, ONE_NODE]
