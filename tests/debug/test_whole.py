"""Whole diagnoses of every kind of fault, as a table: a change of any field is seen by whoever reviews it."""

from __future__ import annotations

from pathlib import Path

from distsim.debug.diagnosis.diagnose import diagnose
from tests.cases.arms import whole
from tests.debug.builders import play
from tests.debug.faults import FAULTS
from tests.golden import assert_golden

TESTS = Path(__file__).resolve().parents[1]
GOLDEN = TESTS / "debug" / "golden"


def test_whole_diagnoses() -> None:
    """At the end of a job, and what is other while a monitor that has waited for long enough, or not, watches it."""
    text = []
    for name, fault in FAULTS.items():
        before: list[str] = []
        for way, hang_after_s in (("ended", fault.evidence.get("hang_after_s")), ("waited", 0.5), ("waiting", 1e6)):
            evidence = play(fault.size, fault.programs, **fault.evidence)
            evidence.hang_after_s = hang_after_s
            now = [line for diagnosis in diagnose(evidence) for line in whole(diagnosis)]
            if now != before:
                text += [f"{name}, {way}", *(line for line in now if line not in before)]
            before = now
    assert_golden(GOLDEN / "whole.txt", "\n".join(text) + "\n")
