"""The JSON of a diagnosis has what the printed report shows of the evidence."""

from __future__ import annotations

import json

from distsim.debug.diagnosis.diagnose import diagnose
from distsim.debug.records import Evidence
from distsim.debug.records.diagnosis import diagnoses_from_json, diagnoses_to_json
from distsim.debug.report.render import render_diagnoses
from distsim.debug.report.shown import with_evidence
from tests.debug.builders import FILE, all_reduce, fail, play, run

SOURCE = "\n".join(f"line{number}()" for number in range(1, 60))


def entry(evidence: Evidence) -> tuple[dict[str, object], str]:
    """The JSON of the only diagnosis, and its printed report."""
    evidence.sources = {FILE: SOURCE}
    found = diagnose(evidence)
    report = json.loads(json.dumps(diagnoses_to_json(with_evidence(found, evidence))))
    assert diagnoses_from_json(report) == found
    (only,) = report["diagnoses"]
    return only, render_diagnoses(found, evidence).plain(200)


def test_a_hang_has_stacks_and_the_text_of_lines() -> None:
    """Equal stacks once, the odd rank first; each line with its text; the last call and nothing without a value."""
    evidence = play(3, lambda r: [all_reduce(10), *([run(50)] if r == 1 else [all_reduce(12)])], hang_after_s=0.0)
    (stuck, printed) = entry(evidence)
    assert stuck["sites"]["1"] == {"file": FILE, "line": 50, "function": "main", "source": "line50()"}  # type: ignore[index]
    assert [(one["ranks"], one["frames"][0]["source"]) for one in stuck["stacks"]] == [  # type: ignore[attr-defined]
        ([1], "line50()"),
        ([0, 2], "line12()"),
    ]
    last = stuck["last_calls"]["1"]  # type: ignore[index]
    assert last.startswith("all_reduce #1")
    assert f"last call of rank 1: {last}" in printed
    one, others = stuck["history"]  # type: ignore[misc]
    assert (one["ranks"], one["calls"]) == ([1], [last])
    assert (others["ranks"], [call.split(",")[1].strip() for call in others["calls"]]) == (
        [0, 2],
        [f"{FILE}:10", f"{FILE}:12"],
    )
    assert "tracebacks" not in stuck
    assert "processes" not in stuck


def test_a_failure_has_its_traceback() -> None:
    """The text that is printed."""
    evidence = play(3, lambda r: [fail("KeyError: 'x'", 8)] if r == 2 else [all_reduce(10)])
    evidence.ranks[2].traceback = "Traceback (most recent call last):\n  at 0x7f0000000000\nKeyError: 'x'\n"
    raised, printed = entry(evidence)
    (shown,) = raised["tracebacks"]  # type: ignore[misc]
    assert (shown["ranks"], shown["text"].splitlines()[-1]) == ([2], "KeyError: 'x'")
    assert all(line.strip() in printed for line in shown["text"].splitlines())
