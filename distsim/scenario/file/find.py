"""Scenario files in folders: which of the TOML files are some, and reading many of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from distsim.errors import UsageError
from distsim.scenario.file.load import LARGEST_FILE, BadFile, Scenario, load_scenario
from distsim.text.untrusted_input import load_toml, read_bytes

__all__ = ["find_scenarios", "is_scenario", "load_scenarios"]

_PROGRAM = re.compile(r"^\s*program\s*=", re.MULTILINE)
_MORE = re.compile(r"^\s*\[*\s*(expect|faults|schema)\b", re.MULTILINE)


def is_scenario(path: Path) -> bool:
    """Return whether a TOML file is meant to be a scenario: it has a program and expectations.

    A file that cannot be parsed is searched for these words, so that a typing error does not remove it from the suite
    unnoticed.
    """
    try:
        text = read_bytes(path, LARGEST_FILE).decode(errors="replace")
    except OSError:
        return False
    try:
        data = load_toml(text)
    except ValueError:
        return _PROGRAM.search(text) is not None and _MORE.search(text) is not None
    return "program" in data and ("expect" in data or "faults" in data or data.get("schema", "") != "")


def find_scenarios(paths: Sequence[str | Path]) -> list[Path]:
    """Scenario files: those named, and those in the folders named, in order of their paths."""
    scenario_paths: dict[Path, None] = {}
    for given in paths:
        path = Path(given)
        if path.is_dir():
            inside = [p for p in sorted(path.rglob("*.toml")) if is_scenario(p)]
            if not inside:
                raise UsageError(f"no scenario in {path}: expected .toml files with program and [expect]")
            scenario_paths.update(dict.fromkeys(inside))
        elif path.exists():
            scenario_paths[path] = None
        else:
            raise UsageError(f"no scenario {path}: no such file or folder")
    return list(scenario_paths)


def load_scenarios(paths: Sequence[str | Path], bad: list[BadFile] | None = None) -> list[Scenario]:
    """Load all scenarios, or raise one UsageError with every fault of every file.

    With a list *bad*, faulty files are appended to it and the others are returned.
    """
    scenarios, wrong = [], list[BadFile]()
    for path in find_scenarios(paths):
        try:
            scenarios.append(load_scenario(path))
        except BadFile as error:
            wrong.append(error)
    if bad is not None:
        bad += wrong
    elif wrong:
        raise UsageError("\n".join(map(str, wrong)))
    return scenarios
