"""Whole diagnoses of every kind of fault, as a table: a change of any field is seen by whoever reviews it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from distsim.debug.diagnosis.diagnose import Diagnosis, diagnose
from distsim.sim.run import RunRequest, run_program
from tests.debug.builders import play
from tests.debug.faults import MISCALLED
from tests.debug.faults_between import STUCK
from tests.golden import assert_golden

TESTS = Path(__file__).resolve().parents[1]
GOLDEN = TESTS / "debug" / "golden"


def lines(diagnosis: Diagnosis) -> Iterator[str]:
    """Its fields, those that are empty left out."""
    yield f"  {diagnosis.kind}: {diagnosis.culprits} of {diagnosis.victims}, {diagnosis.call}, {diagnosis.proof}"
    yield f"    after {diagnosis.detected_after_s} s, exit code {diagnosis.exit_code}"
    yield "    at " + ", ".join(f"{rank}: {site}" for rank, site in sorted(diagnosis.sites.items()))
    stuck = sorted(diagnosis.stuck.items())
    yield "    in " + ", ".join(f"{rank}: {call.op} #{call.seq} {call.line} {call.group}" for rank, call in stuck)
    for name in ("cycle", "pair", "causes", "explanation", "suggestion"):
        if value := getattr(diagnosis, name):
            yield f"    {value}"


def test_whole_diagnoses() -> None:
    """At the end of a job, and what is other while a monitor that has waited for long enough, or not, watches it."""
    text = []
    for name, fault in {**MISCALLED, **STUCK}.items():
        before: list[str] = []
        for way, hang_after_s in (("ended", fault.evidence.get("hang_after_s")), ("waited", 0.5), ("waiting", 1e6)):
            evidence = play(fault.size, fault.programs, **fault.evidence)
            evidence.hang_after_s = hang_after_s
            now = [line for diagnosis in diagnose(evidence) for line in lines(diagnosis)]
            if now != before:
                text += [f"{name}, {way}", *(line for line in now if line not in before)]
            before = now
    assert_golden(GOLDEN / "whole.txt", "\n".join(text) + "\n")


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["parity/cases", "realexec/faults"])
def test_whole_diagnoses_of_programs(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which the text is known, simulated on as many ranks as their first lines say."""
    monkeypatch.chdir(TESTS / folder)
    text = []
    for path in sorted(Path().glob("*.py")):
        head = dict(re.findall(r"^# (\w+): (.*)$", path.read_text(), re.MULTILINE))
        if head.get("kind") == "host_stuck" or path.stem == "rank_segfault":  # takes the host's time, or its process
            continue
        ranks = int(head.get("ranks", "2"))
        outcome = run_program(RunRequest(str(path), on="ethernet-cpu:1", nproc_per_node=ranks))
        text += [path.stem, *(line for diagnosis in outcome.diagnoses for line in lines(diagnosis))]
    assert_golden(GOLDEN / f"{folder.replace('/', '_')}.txt", "\n".join(text) + "\n")
