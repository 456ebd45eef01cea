"""The constants of the NCCL model: read from `fitted/nccl.toml`, named `table.key`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path


class Constants:
    """Numbers by `table.key`. A key that a table lacks is taken from the table it is *like*, and so on."""

    def __init__(self, values: Mapping[str, float], like: Mapping[str, str] | None = None) -> None:
        self.values = dict(values)
        self.like = dict(like or {})

    def get(self, table: str, key: str) -> float:
        """Return the constant `table.key`, inherited from another table if this one does not define it."""
        result = self.values.get(f"{table}.{key}")
        while result is None:
            table = self.like[table]
            result = self.values.get(f"{table}.{key}")
        return result

    def knows(self, name: str) -> bool:
        """Return whether there is a constant *name*, possibly inherited from another table."""
        table, _, key = name.rpartition(".")
        while f"{table}.{key}" not in self.values:
            if table not in self.like:
                return False
            table = self.like[table]
        return True

    def has_table(self, table: str) -> bool:
        """Return whether a table of that name exists."""
        return table in self.like or any(name.startswith(f"{table}.") for name in self.values)

    def changed(self, values: Mapping[str, float]) -> Constants:
        """Return the same constants with some of them replaced."""
        return Constants({**self.values, **values}, self.like)


def fitted_folder() -> Path:
    """Return the folder of the constants and of the intervals that were fitted with them."""
    return Path(str(resources.files("distsim.collectives"))) / "fitted"


@cache
def nccl_constants() -> Constants:
    """Return the constants that are shipped with distsim."""
    return read_constants(fitted_folder() / "nccl.toml")


def read_constants(path: Path) -> Constants:
    """Return the constants of a file: `[table]`, `like = "table"`, then `key = value` or `key = { value = ..., ...
    }`.
    """
    with path.open("rb") as file:
        data = tomllib.load(file)
    values: dict[str, float] = {}
    like: dict[str, str] = {}
    for table, entries in data.items():
        for key, entry in entries.items():
            if key == "like":
                like[table] = entry
            else:
                values[f"{table}.{key}"] = float(entry["value"] if isinstance(entry, dict) else entry)
    return Constants(values, like)
