"""The scenarios' hangs on real gloo: the same program gives the diagnosis that its simulation gives."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from jobs import HERE, Zygote

from tests.kin import one_in

SCENARIOS = HERE.parents[1] / "scenarios" / "hangs"
HANG_AFTER_S = 2.5

NOT_ON_GLOO = {
    "timeout": "a rank sleeps for a real minute; faults/timeout is the same in three seconds",
    "timeout_caught": "a rank sleeps for a real minute; healthy/timeout_caught is the same in three seconds",
}
"""Scenarios whose real twin ends otherwise, and why."""


def load(path: Path) -> dict[str, Any]:
    """A scenario file with its number of ranks."""
    said = tomllib.loads(path.read_text())
    nodes = re.search(r":(\d+)$", said["on"])
    said["ranks"] = (int(nodes[1]) if nodes else 1) * said.get("nproc_per_node", 8)
    return said


def cases() -> list[Any]:
    """Every hang of at most four ranks that is a plain program: no faults injected, no cluster needed."""
    found = []
    for path in sorted(SCENARIOS.glob("*.toml")):
        said = load(path)
        if said["ranks"] <= 4 and path.stem not in NOT_ON_GLOO and "faults" not in said and "fault" not in said:
            found.append((path, said))
    return one_in(14, found)


@pytest.mark.slow
@pytest.mark.parametrize("case", cases(), ids=lambda case: case[0].stem)
def test_real_twin(case: tuple[Path, dict[str, Any]], zygote: Zygote, folder: Path) -> None:
    """Kind, culprits, group, line and exit code are those of the simulation."""
    path, said = case
    program = path.parent / said["program"]
    result = zygote.run(
        program, said["ranks"], directory=folder, hang_after_s=HANG_AFTER_S, args=tuple(said.get("args", ()))
    )
    expect = said["expect"]
    assert result.diagnoses, result.outputs
    first = result.diagnoses[0]
    assert first.kind.value == expect["kind"], result.report
    if "culprits" in expect:
        assert list(first.culprits) == expect["culprits"], result.report
    assert result.exit_code == expect["exit_code"], result.report
    if "group" in expect:
        assert first.group is not None, result.report
        assert expect["group"] in (first.group.name, first.group.description), result.report
    if isinstance(expect.get("line"), str):
        marked = [n for n, line in enumerate(program.read_text().splitlines(), 1) if expect["line"] in line]
        named = {first.sites[rank].line for rank in first.culprits if rank in first.sites}
        assert named & set(marked), result.report
