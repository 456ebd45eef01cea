"""Measured nccl-tests tables, and each row beside its simulation."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distsim.cluster import load_cluster
from distsim.cluster.files.load import kind_of
from distsim.collectives import Compiler, Transfer, canonical_op
from distsim.collectives.constants import Constants
from distsim.collectives.libraries.nccl_timing import NcclTiming
from distsim.collectives.uncertainty import SIZES
from distsim.errors import UsageError
from distsim.text.untrusted_input import brief, printable, read_bytes

# -- Measured nccl-tests tables, and the machine each was measured on.

LARGEST_FILE = 16 << 20
REGIMES = SIZES


def regime(size_bytes: int) -> int:
    """Return the index in `REGIMES` of the size range that contains *size_bytes*."""
    if size_bytes < 65536:
        return 0
    return 1 if size_bytes <= 1 << 24 else 2


@dataclass(frozen=True, slots=True)
class Measured:
    """One row of a table with the smaller of the out-of-place and in-place time, because first touch slows down either
    one at random."""

    size_bytes: int
    time_us: float


@dataclass(frozen=True, slots=True)
class MeasuredTable:
    """One run of nccl-tests."""

    name: str
    op: str
    on: str
    machine: str
    """Name of the measured machine. When a fit leaves this machine out, it uses none of its tables, whatever their
    preset.
    """
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
        """Return the cluster of a row: a preset or file, its variant, and its number of nodes or racks."""
        return self.on if kind_of(self.on) != self.on else f"{self.on}:{self.nnodes}"


def data_folder() -> Path:
    """Return the folder of the measured tables and of the constants that left machines out."""
    return Path(str(resources.files("distsim.calibration")))


def read_tables(folder: Path | None = None) -> list[MeasuredTable]:
    """Return the tables of *folder* (those that come with distsim by default), in the order of its index."""
    folder = folder or data_folder() / "tables"
    index = folder / "_index.csv"
    if not index.is_file():
        raise UsageError(
            f"expected {index} (columns file, op, on, nnodes, nproc_per_node, launcher, algo, nccl, use, machine): "
            "no such file"
        )
    entries = [_entry(index, number, row) for number, row in enumerate(_rows(index), 1)]
    return [_read(folder / entry["file"], entry, index) for entry in entries]


_COLUMNS = ("file", "op", "on", "nnodes", "nproc_per_node", "launcher")


def _entry(index: Path, number: int, row: dict[str, Any]) -> dict[str, str]:
    """Return a row of the index, with every column that a table needs."""
    lacking = [key for key in _COLUMNS if not row.get(key)]
    if lacking:
        raise UsageError(f"{index}: row {number}: expected a value in {', '.join(lacking)}, got none")
    entry = {key: printable(value) for key, value in row.items() if isinstance(key, str) and isinstance(value, str)}
    if Path(entry["file"]).name != entry["file"] or len(entry["file"]) > 255:
        raise UsageError(f"{index}: row {number}: file: expected a name in that folder, got {brief(entry['file'])!r}")
    if entry.get("use", "") not in ("", "fit", "check"):
        raise UsageError(f"{index}: row {number}: use: expected fit or check, got {brief(entry['use'])!r}")
    try:
        canonical_op(entry["op"])
    except UsageError as error:
        raise UsageError(f"{index}: row {number}: op: {error}") from None
    for key in ("nnodes", "nproc_per_node"):
        count = entry[key]
        if not (count.isascii() and count.isdigit() and len(count) < 7 and int(count) > 0):
            raise UsageError(f"{index}: row {number}: {key}: expected a number above zero, got {brief(count)!r}")
    return entry


def _lines(path: Path) -> list[str]:
    try:
        return read_bytes(path, LARGEST_FILE).decode("utf-8").splitlines()
    except UnicodeDecodeError:
        raise UsageError(f"{path}: expected UTF-8 text") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from None


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        yield from csv.DictReader(line for line in _lines(path) if not line.startswith("#"))
    except csv.Error as error:
        raise UsageError(f"{path}: expected comma-separated values ({error})") from None


def _cluster(on: str, folder: Path) -> str:
    """Return the full path of *on* if it is a cluster file in *folder*; otherwise return *on* unchanged."""
    beside = folder / on
    return str(beside.resolve()) if on.endswith(".toml") and beside.is_file() else on


def _read(path: Path, entry: dict[str, str], index: Path) -> MeasuredTable:
    if not path.is_file():
        raise UsageError(f"{index} names {path.name}: no such file")
    rows: list[Measured] = []
    for number, row in enumerate(_rows(path), 1):
        try:
            times = [float(row[key]) for key in ("time_us", "ip_time_us") if row.get(key)]
            size, time_us = int(row["size_bytes"]), min(times)
            if not (0 < size < 1 << 50 and 1e-3 <= time_us < 1e12):
                raise ValueError(f"{size} bytes in {time_us:g} us")
            rows.append(Measured(size, time_us))
        except (KeyError, ValueError, TypeError) as error:
            problem = brief(str(error), 200)
            raise UsageError(f"{path}: row {number}: expected size_bytes and time_us as numbers ({problem})") from None
    if not rows:
        raise UsageError(f"{path}: expected rows with size_bytes and time_us, got none")
    source = next((line[10:].strip() for line in _lines(path) if line.startswith("# source:")), "")
    return MeasuredTable(
        path.stem,
        entry["op"],
        _cluster(entry["on"], index.parent),
        entry.get("machine") or entry["on"].removesuffix(".toml").partition(":")[0],
        int(entry["nnodes"]),
        int(entry["nproc_per_node"]),
        entry["launcher"],
        entry.get("algo") or None,
        entry.get("nccl") or None,
        entry.get("use") or "check",
        tuple(rows),
        printable(source),
    )


@dataclass
class Bench:
    """One table with its cluster, ready to be simulated with any constants."""

    table: MeasuredTable
    compiler: Compiler
    devices: tuple[str, ...]

    @staticmethod
    def of(table: MeasuredTable) -> Bench:
        """Load the cluster of *table*."""
        cluster = load_cluster(table.cluster)
        compiler = Compiler(cluster, algo=table.algo, launcher=table.launcher, nccl_version=table.nccl)
        return Bench(table, compiler, tuple(slot.device for slot in cluster.place(table.nnodes, table.nproc_per_node)))

    def own(self, constants: Constants) -> Constants:
        """Return *constants* with those replaced that were fitted to the cluster's own file."""
        return constants.changed({name: one.value for name, one in self.compiler.cluster.constants.items()})

    def use(self, constants: Constants) -> None:
        """Use these constants from now on."""
        nccl = self.compiler.nccl
        nccl.timing = NcclTiming(nccl.cluster, constants, self.table.launcher, nccl.numbers)
        self.compiler._plans.clear()

    def times_us(self, places: Sequence[int] | NDArray[np.int64] | None = None) -> NDArray[np.float64]:
        """Return the simulated time of every row, or of the rows at *places*. Each row has the network to itself."""
        rows = self.table.rows if places is None else [self.table.rows[row_number] for row_number in places]
        op, capacity = canonical_op(self.table.op), self.compiler.links.capacity
        per_rank = op in ("gather", "scatter")
        return np.array(
            [
                self.compiler.compile(
                    Transfer(op, "nccl", self.devices, row.size_bytes // (len(self.devices) if per_rank else 1))
                ).alone_s(capacity)
                * 1e6
                for row in rows
            ]
        )

    @property
    def measured_us(self) -> NDArray[np.float64]:
        """Return the measured time of every row."""
        return np.array([row.time_us for row in self.table.rows])

    @property
    def regimes(self) -> NDArray[np.int64]:
        """Return the regime of every row."""
        return np.array([regime(row.size_bytes) for row in self.table.rows])
