"""The constants of the NCCL model: read from `nccl.toml`, named `table.key`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path

__all__ = ["Constants", "data_folder", "nccl_constants", "read_constants"]


class Constants:
    """Numbers by `table.key`; *get* takes the first table of several that has the key."""

    def __init__(self, values: Mapping[str, float]) -> None:
        self.values = dict(values)

    def get(self, table: str, key: str) -> float:
        """The constant `table.key`."""
        return self.values[f"{table}.{key}"]

    def changed(self, values: Mapping[str, float]) -> Constants:
        """The same with some constants replaced."""
        return Constants({**self.values, **values})


def data_folder() -> Path:
    """Where the tables and the constants are."""
    return Path(str(resources.files("distsim.calibration")))


@cache
def nccl_constants() -> Constants:
    """The constants that come with distsim."""
    return read_constants(data_folder() / "nccl.toml")


def read_constants(path: Path) -> Constants:
    """The constants of a file: `[table]`, then `key = value` or `key = { value = ..., ... }`."""
    with path.open("rb") as file:
        data = tomllib.load(file)
    values: dict[str, float] = {}
    for table, entries in data.items():
        for key, entry in entries.items():
            values[f"{table}.{key}"] = float(entry["value"] if isinstance(entry, dict) else entry)
    return Constants(values)
