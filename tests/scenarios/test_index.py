"""scenarios/README.md, and what every program says of itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from distsim.scenario import find_scenarios, load_scenario

ROOT = Path(__file__).parents[2] / "scenarios"
FOLDERS = ["healthy", "hangs", "rpc"]
ORDERS = sorted((ROOT / "orders").glob("*.py"))


@pytest.mark.parametrize("folder", FOLDERS)
def test_index_names_every_program(folder: str) -> None:
    """The index has a line for every scenario, with the diagnosis that its file expects."""
    lines = (ROOT / "README.md").read_text().splitlines()
    for path in find_scenarios([ROOT / folder]):
        expect = load_scenario(path).spec.expect
        row = [line for line in lines if f"]({folder}/{path.stem}.py)" in line]
        assert len(row) == 1, f"{folder}/{path.stem} has {len(row)} lines in scenarios/README.md"
        if folder == "hangs":
            culprits = ", ".join(map(str, expect.culprits or []))
            assert f"| {expect.kind} | {culprits} |" in row[0], path.stem


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_program_has_a_scenario(folder: str) -> None:
    """No program is without its expectation, and each says what it teaches."""
    programs = sorted((ROOT / folder).glob("*.py"))
    assert programs == [path.with_suffix(".py") for path in find_scenarios([ROOT / folder])]
    for program in programs:
        assert program.read_text().startswith('"""Teaches: '), program.name


@pytest.mark.parametrize("program", ORDERS, ids=lambda program: program.stem)
def test_a_bug_of_orders_has_two_scenarios(program: Path) -> None:
    """Each has a broken and a cured form, a row in the index, and says where it was seen."""
    text = program.read_text()
    assert text.startswith('"""Teaches: ')
    assert f"](orders/{program.name})" in (ROOT / "README.md").read_text()
    scenarios = [load_scenario(program.with_name(f"{program.stem}_{form}.toml")) for form in ("broken", "cured")]
    assert [scenario.spec.expect.failing_orders for scenario in scenarios] == [True, False]
    assert all(scenario.spec.explore == "all" for scenario in scenarios)
