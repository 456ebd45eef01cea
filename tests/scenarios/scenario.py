"""A scenario file as the tests of today read it; the runner of later issues reads the same schema.

program = "x.py"            # beside the file
on = "ethernet-cpu:2"       # a cluster: preset or file
nproc_per_node = 2
args = []                   # of the program
seed = 0
[limits]
host_timeout_s = 1.0        # a rank that computes longer without a call is stuck
[expect]
kind = "missing_rank"       # of the first diagnosis; "healthy" where there is none
culprits = [2]
exit_code = 3
group = "default_pg"        # description of the group
call = { op = "all_reduce", seq = 2 }
cycle = [0, 1]
line = "# <- culprit"       # every culprit that has a place is at a line that ends like this
stuck_line = "# <- waits"   # some rank that waits does so at a line that ends like this
output = ["..."]            # lines the ranks print, in any order
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2] / "scenarios"
KNOWN = {"program", "on", "nproc_per_node", "nnodes", "args", "seed", "limits", "expect"}
KNOWN_EXPECT = {
    "kind", "culprits", "exit_code", "group", "call", "cycle", "line", "stuck_line", "output", "explanation",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scenario:
    """One file under scenarios/."""

    path: Path
    settings: dict[str, Any]

    @property
    def program(self) -> Path:
        return self.path.parent / str(self.settings["program"])

    @property
    def expect(self) -> dict[str, Any]:
        return dict(self.settings["expect"])

    def marked(self, marker: str) -> list[int]:
        """Numbers of the program's lines that end with the marker."""
        lines = self.program.read_text().splitlines()
        found = [number for number, line in enumerate(lines, start=1) if line.endswith(marker)]
        assert found, f"{self.program.name} has no line that ends with {marker!r}"
        return found


def load(path: Path) -> Scenario:
    scenario = Scenario(path, tomllib.loads(path.read_text()))
    unknown = sorted(set(scenario.settings) - KNOWN) + sorted(set(scenario.expect) - KNOWN_EXPECT)
    assert not unknown, f"{path.name}: expected keys of the schema, got {unknown}"
    return scenario


def scenarios(folder: str) -> list[Path]:
    return sorted((ROOT / folder).glob("*.toml"))


def mistakes(scenario: Scenario, exit_code: int, diagnoses: list[dict[str, Any]]) -> list[str]:
    """What a run answered against what was expected, one line a difference."""
    expect = scenario.expect
    first: dict[str, Any] = diagnoses[0] if diagnoses else {"kind": "healthy"}
    culprits = first.get("culprits", [])
    found = [
        f"{name}: expected {wanted!r}, got {got!r}"
        for name, wanted, got in (
            ("exit_code", expect["exit_code"], exit_code),
            ("kind", expect["kind"], first["kind"]),
            ("culprits", expect.get("culprits", culprits), culprits),
            ("cycle", expect.get("cycle", first.get("cycle")), first.get("cycle")),
        )
        if wanted != got
    ]
    call = first.get("call") or {}
    for key, wanted in expect.get("call", {}).items():
        if call.get(key) != wanted:
            found.append(f"call.{key}: expected {wanted!r}, got {call.get(key)!r}")
    group = first.get("group") or {}
    if "group" in expect and expect["group"] != group.get("description"):
        found.append(f"group: expected {expect['group']!r}, got {group!r}")
    if "line" in expect:
        lines = scenario.marked(expect["line"])
        sites = {rank: site["line"] for rank, site in (first.get("sites") or {}).items()}
        at = [sites.get(str(rank)) for rank in culprits]
        if not any(line in lines for line in at):
            found.append(f"line: expected a culprit at one of lines {lines}, got {sites}")
    if "stuck_line" in expect:
        lines = scenario.marked(expect["stuck_line"])
        stuck = {rank: one["line"] for rank, one in (first.get("stuck") or {}).items()}
        if not any(line in lines for line in stuck.values()):
            found.append(f"stuck_line: expected a rank waiting at one of lines {lines}, got {stuck}")
    if found and diagnoses:
        found.append(f"explanation: {first.get('explanation')}")
        if len(diagnoses) > 1:
            found.append(f"further: {[one['kind'] for one in diagnoses[1:]]}")
    return found
