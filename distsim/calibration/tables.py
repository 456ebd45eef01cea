"""Measured nccl-tests tables, and the machine each was measured on."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from distsim.calibration.constants import data_folder
from distsim.errors import UsageError

__all__ = ["REGIMES", "Measured", "Table", "read_tables", "regime"]

REGIMES = ("< 64 KiB", "64 KiB - 16 MiB", "> 16 MiB")


def regime(size_bytes: int) -> int:
    """The place in `REGIMES` of a size."""
    if size_bytes < 65536:
        return 0
    return 1 if size_bytes <= 1 << 24 else 2


@dataclass(frozen=True, slots=True)
class Measured:
    """One row: the smaller of out-of-place and in-place time, as first touch spoils either at random."""

    size_bytes: int
    time_us: float


@dataclass(frozen=True, slots=True)
class Table:
    """One run of nccl-tests."""

    name: str
    op: str
    on: str
    nnodes: int
    nproc_per_node: int
    launcher: str
    algo: str | None
    nccl: str | None
    use: str
    """fit: the constants were fitted to it; check: it was only predicted."""
    rows: tuple[Measured, ...]
    source: str

    @property
    def cluster(self) -> str:
        """What `load_cluster` takes: a preset with its nodes or racks, or a file beside the tables."""
        if self.on.endswith(".toml"):
            return f"{data_folder() / 'clusters' / self.on}:{self.nnodes}"
        return self.on if ":" in self.on else f"{self.on}:{self.nnodes}"


def read_tables(folder: Path | None = None) -> list[Table]:
    """The tables of *folder* (those that come with distsim by default), in the order of its index."""
    folder = folder or data_folder() / "tables"
    index = folder / "_index.csv"
    if not index.exists():
        raise UsageError(
            f"expected {index} (columns file, op, on, nnodes, nproc_per_node, launcher, algo, nccl, use): no such file"
        )
    return [_read(folder / row["file"], row) for row in _rows(index)]


def _rows(path: Path) -> Iterator[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        yield from csv.DictReader(line for line in file if not line.startswith("#"))


def _read(path: Path, entry: dict[str, str]) -> Table:
    if not path.exists():
        raise UsageError(f"{path.parent / '_index.csv'} names {path.name}: no such file")
    rows: list[Measured] = []
    for number, row in enumerate(_rows(path), 1):
        try:
            times = [float(row[key]) for key in ("time_us", "ip_time_us") if row.get(key)]
            rows.append(Measured(int(row["size_bytes"]), min(times)))
        except (KeyError, ValueError) as error:
            raise UsageError(f"{path}: row {number}: expected size_bytes and time_us as numbers ({error})") from None
    source = next(
        (line[10:].strip() for line in path.read_text("utf-8").splitlines() if line.startswith("# source:")),
        "",
    )
    try:
        nnodes, per_node = int(entry["nnodes"]), int(entry["nproc_per_node"])
    except (KeyError, ValueError):
        raise UsageError(
            f"index of {path.parent}: {path.name}: expected numbers in nnodes and nproc_per_node"
        ) from None
    return Table(
        path.stem,
        entry["op"],
        entry["on"],
        nnodes,
        per_node,
        entry["launcher"],
        entry["algo"] or None,
        entry["nccl"] or None,
        entry.get("use") or "check",
        tuple(rows),
        source,
    )
