"""Writing the constants back into their data file, comments and sources kept."""

from __future__ import annotations

import re
from pathlib import Path

from distsim.calibration.fit import Fitted

__all__ = ["data_file"]

_ENTRY = re.compile(r"^(\w+) = \{ value = [^,]+, (prior = [^,]+, )?uncertainty = [^,]+, source = (\".*\") \}$")


def data_file(path: Path, fitted: Fitted, source: str | None = None) -> str:
    """The text of *path* with the fitted values and their uncertainty, and *source* in place of theirs."""
    lines: list[str] = []
    table = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            table = line.strip("[]")
        entry = _ENTRY.match(line)
        name = f"{table}.{entry[1]}" if entry else ""
        if entry and name in fitted.sigma:
            value, sigma = fitted.constants.values[name], fitted.sigma[name]
            prior, said = entry[2] or "", entry[3] if source is None else f'"{source}"'
            line = f"{entry[1]} = {{ value = {value:.4g}, {prior}uncertainty = {sigma:.2g}, source = {said} }}"
        lines.append(line)
    return "\n".join(lines) + "\n"
