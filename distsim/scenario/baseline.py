"""Stored figures of earlier runs, beside the scenario: `NAME.baseline.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from distsim.errors import UsageError

if TYPE_CHECKING:
    from distsim.scenario.load import Scenario

__all__ = ["baseline_path", "read_baseline", "write_baseline"]


def baseline_path(scenario: Scenario) -> Path:
    return scenario.path.with_suffix(".baseline.json")


def read_baseline(path: Path) -> dict[str, float]:
    """The stored figures; empty where there is no file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return {str(name): float(value) for name, value in data.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise UsageError(
            f"{path}: expected figures by name as JSON ({error}); write it anew with --update-baselines"
        ) from None


def write_baseline(path: Path, figures: dict[str, float]) -> None:
    path.write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n", encoding="utf-8")
