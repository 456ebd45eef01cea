"""How closely a real job is watched, and what follows a hang: arguments first, environment second."""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from distsim.errors import UsageError

__all__ = ["Level", "OnHang", "Settings"]


class Level(enum.StrEnum):
    """What is done at each call."""

    OFF = "off"
    RECORD = "record"  # rings only
    CHECK = "check"  # the monitor compares as records arrive
    STRICT = "strict"  # compared before bytes go out; every rank raises at its own line


class OnHang(enum.StrEnum):
    """What follows the report of a hang."""

    REPORT = "report"  # print it, leave the job alone
    ABORT = "abort"  # print it, end the job
    WAIT = "wait"  # print it, keep everything as it is for a debugger


PREFIX = "DISTSIM_"


@dataclass(frozen=True)
class Settings:
    """Every field has an environment variable: `DISTSIM_LEVEL`, `DISTSIM_ON_HANG`, ..."""

    level: Level = Level.CHECK
    on_hang: OnHang = OnHang.REPORT
    directory: str = ""
    """Where the rings go; empty: in memory, by the job's name."""
    hang_after_s: float = 60.0
    """A rank that computes on is taken for missing when others have waited this long for it. A job in which no rank
    waits hangs when all its ranks have stood still for this long; ranks that compute never do. More than a slow
    checkpoint (30 s), less than torch's timeouts (10 and 30 minutes)."""
    straggler_after_s: float = 10.0
    """It is named a straggler, in one line, after this long."""
    report: str = ""
    """File for the JSON report."""
    nan: bool = False
    """Look for NaN in every call's tensors."""
    checksum: bool = False
    """Look for buffers that are written while in flight."""
    monitor: bool = True
    """Start a monitor process from local rank 0; the launcher starts its own."""

    @classmethod
    def read(cls, given: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None) -> Settings:
        """Merge arguments (None: not given) with the environment; a value that does not fit is a UsageError."""
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        for field in fields(cls):
            value: Any = None if given is None else given.get(field.name)
            source = field.name
            if value is None:
                source = _variable(field.name)
                value = environ.get(source)
            if value is None or value == "":
                continue
            values[field.name] = _convert(source, value, type(getattr(cls, field.name)))
        return cls(**values)

    def environment(self) -> dict[str, str]:
        """The environment that makes a worker read these settings."""
        said = {}
        for name, value in asdict(self).items():
            said[_variable(name)] = str(int(value)) if isinstance(value, bool) else str(value)
        return said


def _variable(name: str) -> str:
    return PREFIX + {
        "directory": "DIR",
        "hang_after_s": "HANG_AFTER",
        "straggler_after_s": "STRAGGLER_AFTER",
    }.get(name, name.upper())


def _convert(source: str, value: Any, kind: type[Any]) -> Any:
    try:
        if kind is bool:
            return str(value).lower() in ("1", "true", "yes", "on")
        if kind is float:
            number = float(value)
            if number < 0:
                raise ValueError
            return number
        return kind(str(value))
    except ValueError:
        if issubclass(kind, enum.Enum):
            choices = ", ".join(str(member) for member in kind)
            raise UsageError(f"{source}: expected one of {choices}, got {value!r}") from None
        raise UsageError(f"{source}: expected seconds, 0 or more, got {value!r}") from None
