"""The library: every kind of diagnosis and every fault rule has a file, and the files of faults pass."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from distsim import sim
from distsim.debug.records.kinds import Kind
from distsim.scenario import find_scenarios, load_scenario, load_scenarios, run_scenario
from distsim.scenario.file.schema import FAULT_TABLES

ROOT = Path(__file__).parents[2] / "scenarios"
OURS = find_scenarios([ROOT / "networks", ROOT / "stragglers"])


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.stem)
def test_a_file_of_the_library_passes(path: Path) -> None:
    """What the file expects is what comes."""
    result = run_scenario(load_scenario(path))
    if not result.passed:
        pytest.fail(result.text, pytrace=False)


def test_every_fault_has_one_rule() -> None:
    """Whoever looks for `link_cut` in sim/faults finds the class that is it, and no other."""
    source = "".join(path.read_text() for path in Path(sim.__file__).parent.joinpath("faults").rglob("*.py"))
    rules = re.findall(r'^    what\b.* = "(\w+)"$', source, re.MULTILINE)
    assert sorted(rules) == sorted(FAULT_TABLES)


def test_every_kind_and_every_fault_has_a_file() -> None:
    """At least sixty files; a new kind or rule needs one, too."""
    library = load_scenarios([ROOT])
    assert len(library) >= 60
    kinds = {scenario.spec.expect.kind for scenario in library}
    assert {kind.value for kind in Kind} - kinds == set()
    whats = {fault.what for scenario in library for fault in scenario.spec.faults}
    assert set(FAULT_TABLES) - whats == set()


def test_the_index_has_a_row_for_each_file() -> None:
    """With its program, faults, diagnosis and lesson, as the file has them."""
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    for scenario in load_scenarios(OURS):
        expect = scenario.spec.expect
        start = f"| [{scenario.path.stem}]({scenario.path.parent.name}/{scenario.path.name}) "
        rows = [line for line in lines if line.startswith(start)]
        assert len(rows) == 1, scenario.name
        culprits = ", ".join(map(str, expect.culprits or []))
        assert f"| {expect.kind} | {culprits} | {scenario.teaches} |" in rows[0], scenario.name


def test_every_file_says_what_it_teaches() -> None:
    """One sentence, its own or its program's."""
    assert [s.name for s in load_scenarios([ROOT]) if not s.teaches] == []
