"""The published training steps of rows.csv, with the program and the flags that repeat each."""

from __future__ import annotations

import csv
import re
import shlex
from dataclasses import dataclass
from math import inf
from pathlib import Path

from distsim.errors import UsageError
from distsim.text.untrusted_input import brief, read_bytes
from tools.fitting.frameworks import FRAMEWORKS, Framework

__all__ = ["ALLOCATED", "TABLES", "Row", "read_rows", "source_of"]

TABLES = {"steps": "Published steps, one node to many", "node": "Published steps on one node"}
"""The values of column `table`, and the headings they are printed under."""
ALLOCATED, RESERVED = "allocated", "reserved"
_COLUMNS = ("table", "name", "on", "program", "flags", "step_s", "source")
_LARGEST_FILE = 16 << 20
_REPOSITORY = re.compile(r"github(?:\.com/|:)([\w.-]+/[\w.-]+)")
_PAPER = re.compile(r"arXiv:[\d.]+")


@dataclass(frozen=True)
class Row:
    """One published step, and the program that repeats it."""

    table: str
    name: str
    on: str
    """A preset with its nodes."""
    nproc_per_node: int | None
    """Ranks of a node, where not all its GPUs took part."""
    program: str
    """A file of scenarios/training, or FRAMEWORK:FILE of a table in frameworks.toml."""
    flags: tuple[str, ...]
    step_s: float
    memory_gib: float | None
    """Published peak memory of the fullest GPU in GiB, if there is one."""
    source: str
    memory_of: str = RESERVED
    """Published kind of peak memory: torch's max_memory_allocated or max_memory_reserved."""
    unseen: bool = False
    """Whether the row was not looked at while the model and the programs were changed."""
    framework: str = ""
    held_back: bool = False
    """Whether the row is for judging alone (held_back.toml); *framework* is what its source ran."""

    @property
    def num_nodes(self) -> int:
        """Return the number of nodes behind the colon of the preset's name; 1 if there is none."""
        _, _, nodes = self.on.partition(":")
        return int(nodes or 1)

    @property
    def checkout(self) -> Framework | None:
        """Return the published program that this row runs; None where scenarios/training has one like it."""
        name, colon, _ = self.program.partition(":")
        return FRAMEWORKS[name] if colon else None


def read_rows(folder: Path | None = None) -> list[Row]:
    """Return the rows of *folder*/rows.csv (by default those that come with distsim); UsageError with every fault."""
    path = (folder or Path(__file__).parent) / "rows.csv"
    try:
        text = read_bytes(path, _LARGEST_FILE).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"expected {path} (columns {', '.join(_COLUMNS)}, ...): {reason}") from None
    rows: list[Row] = []
    faults: list[str] = []
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    for number, fields in enumerate(csv.DictReader(lines), 1):
        entry = {
            key: (value or "").strip()
            for key, value in fields.items()
            if isinstance(key, str) and not isinstance(value, list)
        }
        try:
            rows.append(_row(entry))
        except ValueError as error:
            faults.append(f"{path}: row {number}: {error}")
    if faults or not rows:
        raise UsageError("\n".join(faults) or f"{path} has no rows")
    return rows


def _row(entry: dict[str, str]) -> Row:
    lacking = [key for key in _COLUMNS if not entry.get(key)]
    if lacking:
        raise ValueError(f"{', '.join(lacking)}: expected a value")
    nodes = entry["on"].partition(":")[2]
    if nodes and not nodes.isdecimal():
        raise ValueError(f"on: expected PRESET:NODES, got {brief(entry['on'])}")
    framework, colon, _ = entry["program"].partition(":")
    if colon:
        _one_of("program", framework, tuple(FRAMEWORKS))
    nproc, memory = entry.get("nproc_per_node", ""), entry.get("memory_GiB", "")
    return Row(
        table=_one_of("table", entry["table"], tuple(TABLES)),
        name=entry["name"],
        on=entry["on"],
        nproc_per_node=int(_positive("nproc_per_node", nproc)) if nproc else None,
        program=entry["program"],
        flags=tuple(shlex.split(entry["flags"])),
        step_s=_positive("step_s", entry["step_s"]),
        memory_gib=_positive("memory_GiB", memory) if memory else None,
        source=entry["source"],
        memory_of=_one_of("memory_of", entry.get("memory_of", "") or RESERVED, (ALLOCATED, RESERVED)),
        unseen=_yes("unseen", entry.get("unseen", "")),
        framework=entry.get("framework", "") or source_of(entry["source"]),
        held_back=_yes("held_back", entry.get("held_back", "")),
    )


def _one_of(key: str, text: str, known: tuple[str, ...]) -> str:
    if text not in known:
        raise ValueError(f"{key}: expected {' or '.join(known)}, got {brief(text)}")
    return text


def _yes(key: str, text: str) -> bool:
    if text not in ("", "yes"):
        raise ValueError(f"{key}: expected yes or nothing, got {brief(text)}")
    return text == "yes"


def _positive(key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < inf:
        raise ValueError(f"{key}: expected a number above 0, got {brief(text)}")
    return value


def source_of(text: str) -> str:
    """Return the repository or paper that a row's source names, whatever the file in it."""
    match = _REPOSITORY.search(text) or _PAPER.search(text)
    return match.group(match.lastindex or 0) if match else text
