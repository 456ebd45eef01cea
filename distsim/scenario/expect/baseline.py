"""Stored figures of earlier runs, beside the scenario: `NAME.baseline.json`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

from distsim.errors import UsageError
from distsim.text.untrusted_input import brief, load_json, read_bytes

if TYPE_CHECKING:
    from distsim.scenario.file.load import Scenario

__all__ = ["baseline_path", "read_baseline", "write_baseline"]


LARGEST_FILE = 1 << 20


def baseline_path(scenario: Scenario) -> Path:
    return scenario.path.with_suffix(".baseline.json")


def read_baseline(path: Path) -> dict[str, float]:
    """Return the stored figures; empty if there is no file."""
    try:
        data = load_json(read_bytes(path, LARGEST_FILE))
        return {name: _figure(name, value) for name, value in data.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, OverflowError, AttributeError) as error:
        problem = brief(str(error), 200)
        raise UsageError(
            f"{path}: expected figures by name as JSON ({problem}); write it anew with --update-baselines"
        ) from None


def _figure(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < math.inf:
        raise ValueError(f"{brief(name)}: expected a number, got {brief(value)}")
    return float(value)


def write_baseline(path: Path, figures: dict[str, float]) -> None:
    path.write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n", encoding="utf-8")
