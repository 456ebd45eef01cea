"""How closely a real job is watched, and what follows a hang: arguments first, environment second.

`VARIABLES` and the fields of `Settings` are all environment variables that distsim reads (docs/environment.md).
"""

from __future__ import annotations

import difflib
import enum
import functools
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from distsim.errors import UsageError

__all__ = [
    "DEFAULT_HANG_AFTER_S",
    "LAUNCHED",
    "VARIABLES",
    "Attach",
    "Level",
    "OnHang",
    "Settings",
    "Silent",
    "say_once_a_job",
    "unknown_variables",
    "warn_of_unknown_variables",
]


class Level(enum.StrEnum):
    """What is done at each call."""

    OFF = "off"
    RECORD = "record"  # rings only
    CHECK = "check"  # the monitor compares as records arrive
    STRICT = "strict"  # compared before bytes go out; every rank raises at its own line


class Silent(enum.StrEnum):
    """Whether silent wrong results are looked for."""

    OFF = "off"
    WATCH = "watch"  # reported after the verdict
    STRICT = "strict"  # `distsim run` ends with exit code 5 where one is an error


class OnHang(enum.StrEnum):
    """What follows the report of a hang."""

    REPORT = "report"  # print it, leave the job alone
    ABORT = "abort"  # print it, end the job
    WAIT = "wait"  # print it, keep everything as it is for a debugger


class Attach(enum.StrEnum):
    """How the guard of a real job comes to hear of calls."""

    AUTO = "auto"
    HOOKS = "hooks"
    PATCHES = "patches"


PREFIX = "DISTSIM_"
LAUNCHED = "DISTSIM_LAUNCHED"
"""Set for the processes of a job: the folder of its rings."""
VARIABLES = {
    "DISTSIM_SECRET": "Secret by which the monitors of several hosts recognize each other; the same on every host.",
    "DISTSIM_SECRET_FILE": "File that holds the secret instead: your own, mode 600, the same on every host.",
    LAUNCHED: "Set by `distsim run` for the processes of its job: the folder of the flight records. Do not set it.",
    "DISTSIM_GPUS": "Set for the `nvidia-smi` that a simulated rank starts: what its GPUs hold. Do not set it.",
    "DISTSIM_PYTHON": "Set for the `nvidia-smi` that a simulated rank starts: the interpreter to run. Do not set it.",
    "DISTSIM_SECONDS": "For distsim's own tests: how long `.ci/versions` may take, in seconds.",
    "DISTSIM_UPDATE_GOLDEN": "For distsim's own tests: write the golden files anew.",
    "DISTSIM_ENVIRONMENTS": "For distsim's own tests: folder of the environments with other releases of torch.",
}
"""Environment variables beside those of `Settings`, and what each is for; none has a default."""
LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID", "RANK")
"""Variables in which launchers number the processes of a host, the most reliable first."""


DEFAULT_HANG_AFTER_S = 60.0
"""More than a slow checkpoint (30 s), less than torch's timeouts (10 and 30 minutes)."""


@dataclass(frozen=True)
class Settings:
    """Every field has an environment variable: `DISTSIM_LEVEL`, `DISTSIM_ON_HANG`, ..."""

    level: Level = Level.CHECK
    """What is done at each call: `off`, `record` (keep flight records only), `check` (a monitor compares the calls of
    all ranks) or `strict` (ranks compare before any byte goes out, and each raises at its own line)."""
    on_hang: OnHang = OnHang.REPORT
    """What follows the report of a hang: `report` (leave the job alone), `abort` (end the job) or `wait` (keep
    everything as it is for a debugger). `distsim run` aborts unless this or --on-hang says otherwise."""
    directory: str = ""
    """Folder of the flight records (rings); empty: in memory, by the job's name."""
    hang_after_s: float | None = None
    """A rank that computes on is taken for missing when others have waited this long for it (60 where this is not set).
    A job in which no rank waits hangs when all its ranks have stood still for this long; where this is set, also when
    they have computed for this long without a call. Set it to more than the longest compilation, evaluation or
    checkpoint."""
    straggler_after_s: float = 10.0
    """A rank that others wait for is named a straggler, in one line, after this long."""
    report: str = ""
    """File for the JSON report; or a folder that exists, or a path that ends in `/`: the report as NAME.json and as
    NAME.txt there, NAME being `slurm-JOB.STEP`, the run id of torch elastic, or distsim's name of the job."""
    verbose: bool = False
    """Have every rank say at its start where its flight records are, and where the report will be (1: yes)."""
    events: str = ""
    """File to which each warning, withdrawn warning, straggler, verdict and the end is added as a line of JSON
    (docs/events.md); `-`: standard output."""
    on_verdict: str = ""
    """Shell command that is run at the first verdict, with the JSON report on its standard input. It is ended after 10
    seconds, and what it answers changes nothing."""
    nan: bool = False
    """Look for NaN in the tensors of every call (1: yes)."""
    checksum: bool = False
    """Look for buffers that are written while in flight (1: yes)."""
    guard_attach: Attach = Attach.AUTO
    """How the guard hears of calls: `hooks` on torch's own groups (torch 2.14 and later), `patches` (a group of ours in
    the place of each), or `auto`, which is `patches`. Level `strict` and DISTSIM_CHECKSUM need patches."""
    silent: Silent = Silent.OFF
    """Look for silent wrong results (docs/silent.md): `off`, `watch` (report them when the job has ended) or `strict`
    (`distsim run` makes an error among them exit code 5; no other launcher's exit code changes)."""
    silent_allow: str = ""
    """Patterns KIND:TENSOR of silent findings that are not reported, separated by commas."""
    monitor: bool = True
    """Start a monitor process on each host from its ranks (0: no). `distsim run` starts its own."""

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
            default = getattr(cls, field.name)
            values[field.name] = _convert(source, value, float if default is None else type(default))
        return cls(**values)

    @property
    def patience_s(self) -> float:
        """`hang_after_s`, or the default where it is not set."""
        return DEFAULT_HANG_AFTER_S if self.hang_after_s is None else self.hang_after_s

    @property
    def silent_patterns(self) -> list[str]:
        """`silent_allow` as a list."""
        return [pattern.strip() for pattern in self.silent_allow.split(",") if pattern.strip()]

    def environment(self) -> dict[str, str]:
        """The environment that makes a worker read these settings."""
        said = {}
        for name, value in asdict(self).items():
            if value is None:
                continue
            said[_variable(name)] = str(int(value)) if isinstance(value, bool) else str(value)
        return said

    @classmethod
    def variables(cls) -> dict[str, str]:
        """The environment variable of each field."""
        return {field.name: _variable(field.name) for field in fields(cls)}


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """A line for each variable that begins like ours and that distsim does not read, with the nearest name."""
    own = [*Settings.variables().values()]
    known = [*own, *VARIABLES]
    lines = []
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in known:
            near = difflib.get_close_matches(name.removeprefix(PREFIX), [k.removeprefix(PREFIX) for k in known], n=1)
            hint = f"did you mean {PREFIX}{near[0]}?" if near else f"it reads {', '.join(own)}"
            lines.append(f"distsim does not read {name}: {hint} (docs/environment.md)")
    return lines


@functools.cache
def warn_of_unknown_variables() -> None:
    """Print those lines once a job."""
    for line in unknown_variables(os.environ):
        say_once_a_job(f"warning: {line}")


def say_once_a_job(line: str) -> None:
    """Print *line* in the launcher, or in the first rank of a host where the launcher is not ours."""
    number = next((os.environ[name] for name in LOCAL_RANKS if name in os.environ), "0")
    if LAUNCHED not in os.environ and number == "0":
        print(f"distsim: {line}", file=sys.stderr, flush=True)


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
