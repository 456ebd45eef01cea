"""The JSON of a diagnosis: a stable schema, golden files, there and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distsim.debug.diagnosis.diagnose import diagnose
from distsim.debug.records import Evidence, Finding
from distsim.debug.records.diagnosis import SCHEMA, Diagnosis, diagnoses_from_json, diagnoses_to_json, exit_code
from distsim.debug.records.kinds import Kind
from tests.debug.builders import absent, all_reduce, barrier, fail, group, play, recv, send, store
from tests.golden import assert_golden

GOLDEN = Path(__file__).parent / "golden"

CASES: dict[str, Evidence] = {
    "missing_rank": play(4, lambda r: [all_reduce(10)] if r == 1 else [all_reduce(10), barrier(11)]),
    "deadlock_cycle": play(
        2,
        lambda r: [all_reduce(10 + r, group(0, 1, name=str(1 + (r + i) % 2), desc="ab"[(r + i) % 2])) for i in (0, 1)],
    ),
    "p2p_unmatched": play(2, {0: [send(1, 10, tag=5)], 1: [recv(0, 11, tag=7)]}),
    "never_joined": play(3, lambda r: [absent()] if r == 2 else [store("init/", 3, "rendezvous")]),
    "rank_raised": play(3, lambda r: [fail("KeyError: 'x'", 8)] if r == 2 else [all_reduce(10)]),
}


@pytest.mark.parametrize("name", CASES)
def test_schema(name: str) -> None:
    """The JSON is what the golden file holds: keys, order, words."""
    report = diagnoses_to_json(diagnose(CASES[name]))
    assert [d["kind"] for d in report["diagnoses"]] == [name]
    assert_golden(GOLDEN / f"{name}.json", json.dumps(report, indent=1) + "\n")


@pytest.mark.parametrize("name", CASES)
def test_there_and_back(name: str) -> None:
    """What was written can be read again, equal in every field."""
    found = diagnose(CASES[name])
    assert diagnoses_from_json(json.loads(json.dumps(diagnoses_to_json(found)))) == found


def test_keys_of_a_diagnosis() -> None:
    """The keys are those of the design, in its order."""
    (d,) = diagnose(CASES["missing_rank"])
    assert list(d.to_json()) == [
        "kind", "culprits", "victims", "group", "call", "sites", "stuck", "cycle", "pair", "detected_after_s",
        "explanation", "suggestion", "see",
    ]  # fmt: skip


def test_healthy_is_an_empty_list() -> None:
    """A healthy run has no diagnoses."""
    assert diagnoses_to_json([]) == {"schema": "distsim.report/1", "diagnoses": []}


def test_other_schema_is_refused() -> None:
    """A report of another version says so in one line."""
    with pytest.raises(ValueError, match=r"expected schema 'distsim.report/1', got 'distsim.report/9'"):
        diagnoses_from_json({"schema": "distsim.report/9", "diagnoses": []})
    assert SCHEMA == "distsim.report/1"


def test_unknown_keys_are_passed_over() -> None:
    """A newer writer may add keys."""
    (d,) = diagnose(CASES["missing_rank"])
    data: dict[str, Any] = {**d.to_json(), "weather": "fine"}
    assert Diagnosis.from_json(data) == d


def test_exit_code_is_the_root_causes() -> None:
    """Warnings do not count; otherwise the first decides."""
    evidence = CASES["missing_rank"]
    found = diagnose(evidence)
    warning = diagnose(play(1, {}, findings=[Finding(Kind.STRAGGLER, (0,), "slow")]))
    assert (exit_code([]), exit_code(warning), exit_code(found), exit_code([*warning, *found])) == (
        0,
        0,
        3,
        3,
    )
