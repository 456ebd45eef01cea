"""Settings of a watched job, from arguments and environment variables.

`VARIABLES` and the fields of `Settings` are all environment variables that distsim reads (docs/environment.md).
"""

from __future__ import annotations

import argparse
import difflib
import enum
import functools
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from distsim.errors import UsageError
from distsim.text import original_print
from distsim.text.units import seconds

OTLP = "otlp"
"""Value of `--events` that sends the events to an OpenTelemetry collector instead of a file."""


class Level(enum.StrEnum):
    """What the guard does at each call."""

    OFF = "off"
    RECORD = "record"  # rings only
    CHECK = "check"  # the monitor compares as records arrive
    STRICT = "strict"  # compared before bytes go out; every rank raises at its own line


class Silent(enum.StrEnum):
    """Whether to look for silent wrong results."""

    OFF = "off"
    WATCH = "watch"  # reported after the verdict
    STRICT = "strict"  # `distsim run` ends with exit code 5 where one is an error


class OnHang(enum.StrEnum):
    """What happens after the report of a hang."""

    REPORT = "report"  # print it, leave the job alone
    ABORT = "abort"  # print it, end the job
    WAIT = "wait"  # print it, keep everything as it is for a debugger


class OnSlow(enum.StrEnum):
    """What happens when a rank is slower than the others in every step."""

    REPORT = "report"  # warn
    IGNORE = "ignore"  # the job is uneven by design
    FAIL = "fail"  # `distsim run` ends with exit code 5 where a warning holds at the end


PREFIX = "DISTSIM_"
LAUNCHED = "DISTSIM_LAUNCHED"
"""Variable that `distsim run` sets for the processes of a job: the folder of its rings."""
VARIABLES = {
    "DISTSIM_SECRET": "Secret by which the monitors of several hosts recognize each other; the same on every host.",
    "DISTSIM_SECRET_FILE": "File that holds the secret instead: your own, mode 600, the same on every host.",
    LAUNCHED: "Folder of the flight records, set by `distsim run` for its job. Do not set it.",
    "DISTSIM_GPUS": "State of the simulated GPUs, set for an `nvidia-smi` that a rank starts. Do not set it.",
    "DISTSIM_PYTHON": "Python interpreter, set for an `nvidia-smi` that a rank starts. Do not set it.",
    "DISTSIM_SHELL": "Folder of the tools of `distsim shell`, set for its command. Do not set it.",
    "DISTSIM_TRACEBACK": "Print the traceback of an error of distsim itself, which ends with exit code 70 (1: yes).",
    "DISTSIM_SECONDS": "For the tests of distsim: time limit of `.ci/versions` in seconds.",
    "DISTSIM_UPDATE_GOLDEN": "For the tests of distsim: rewrite the golden files.",
    "DISTSIM_ENVIRONMENTS": "For the tests of distsim: folder of environments with other releases of torch.",
    "DISTSIM_REPOSITORIES": "For the tests of distsim and `validate --training`: folder of clones, as OWNER/NAME.",
}
"""Further environment variables and their purpose; none has a default."""
LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID", "RANK")
"""Variables with the local rank, by launcher, the most reliable first."""


DEFAULT_HANG_AFTER_S = 60.0
"""Default of `hang_after_s`: more than a slow checkpoint (30 s), less than torch's timeouts (10 and 30 minutes)."""


@dataclass(frozen=True)
class Settings:
    """Settings of a watched job. Each field has an environment variable: `DISTSIM_LEVEL`, `DISTSIM_ON_HANG`, ..."""

    level: Level = Level.CHECK
    """What happens at each call: `off` (nothing), `record` (keep flight records), `check` (a monitor also compares the
    calls of all ranks) or `strict` (ranks compare a call before any byte is sent, and each raises at its own line)."""
    on_hang: OnHang = OnHang.REPORT
    """What happens after the report of a hang: `report` (leave the job alone), `abort` (end the job) or `wait` (keep
    everything as it is for a debugger). `distsim run` aborts unless this variable or --on-hang is set."""
    on_slow: OnSlow = OnSlow.REPORT
    """What happens when a rank is slower than the others in every step: `report` (warn), `ignore` (nothing is compared,
    for jobs whose ranks do different work by design) or `fail` (`distsim run` also ends with exit code 5 if the warning
    holds at the end)."""
    directory: str = ""
    """Folder of the flight records (default: a folder in shared memory with the name of the job)."""
    hang_after_s: float | None = None
    """A rank counts as missing when others have waited this long for it (default 60). If no rank waits, the job counts
    as hung when no rank has moved for this long; if the variable is set, also when all ranks have computed this long
    without a call. Set it to more than the longest compilation, evaluation or checkpoint."""
    straggler_after_s: float = 10.0
    """A rank that others have waited for this long is reported as a straggler, in one line."""
    report: str = ""
    """File for the JSON report. An existing folder, or a path that ends in `/`, gets NAME.json and NAME.txt, where NAME
    is `slurm-JOB.STEP`, the run id of torch elastic, or distsim's name of the job. `-` is standard output, at the
    job's end."""
    verbose: bool = False
    """Let every rank print at its start where its flight records and the report are (1: yes)."""
    events: str = ""
    """File to which events are appended as lines of JSON: warnings, withdrawn warnings, stragglers, verdicts and the
    end of the job (docs/events.md). `-` is standard output, and `otlp` a collector of OpenTelemetry."""
    on_verdict: str = ""
    """Shell command to run at the first verdict, with the JSON report on standard input. It is ended after 10 seconds,
    and its exit code is ignored."""
    nan: bool = False
    """Look for NaN in the tensors of every call (1: yes)."""
    checksum: bool = False
    """Look for buffers that are written while a call uses them (1: yes)."""
    silent: Silent = Silent.OFF
    """Look for silent wrong results (docs/silent.md): `off`, `watch` (report them when the job has ended) or `strict`
    (an error also makes `distsim run` exit with code 5; exit codes of other launchers do not change)."""
    silent_allow: str = ""
    """Patterns KIND:TENSOR of silent findings to leave out, separated by commas."""
    monitor: bool = True
    """Let the ranks start a monitor process on each host (0: no). `distsim run` starts its own."""

    @classmethod
    def read(cls, given: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None) -> Settings:
        """Return settings from arguments (None: not given) and, where these are missing, from the environment.

        Raises:
            UsageError: A value is not allowed.
        """
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
        """`hang_after_s`, or its default."""
        return DEFAULT_HANG_AFTER_S if self.hang_after_s is None else self.hang_after_s

    @property
    def silent_patterns(self) -> list[str]:
        """`silent_allow` as a list."""
        return [pattern.strip() for pattern in self.silent_allow.split(",") if pattern.strip()]

    def environment(self) -> dict[str, str]:
        """Return the environment variables that give another process these settings."""
        variables = {}
        for name, value in asdict(self).items():
            if value is None:
                continue
            variables[_variable(name)] = str(int(value)) if isinstance(value, bool) else str(value)
        return variables

    @classmethod
    def variables(cls) -> dict[str, str]:
        """Return the environment variable of each field."""
        return {field.name: _variable(field.name) for field in fields(cls)}


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Return a warning, with the nearest name, for each variable DISTSIM_... that distsim does not read."""
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
    """Print the warnings of `unknown_variables` once in a job."""
    for line in unknown_variables(os.environ):
        say_once_a_job(f"warning: {line}")


def say_once_a_job(line: str) -> None:
    """Print *line* in the launcher `distsim run`, or under another launcher in the first rank of each host."""
    number = next((os.environ[name] for name in LOCAL_RANKS if name in os.environ), "0")
    if LAUNCHED not in os.environ and number == "0":
        original_print(f"distsim: {line}", file=sys.stderr, flush=True)


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
            return seconds(str(value))
        return kind(str(value))
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"{source}: {error}") from None
    except ValueError:
        choices = ", ".join(str(member) for member in kind)
        raise UsageError(f"{source}: expected one of {choices}, got {value!r}") from None


def add_real_flags(parser: argparse.ArgumentParser) -> None:
    """Add `--level`, `--on-hang`, `--hang-after` and the other flags of real runs."""
    group = parser.add_argument_group("a real run (--on gloo, nccl, mpi)")
    group.add_argument(
        "--level",
        choices=[str(level) for level in Level],
        help="how closely it is watched: off; record every call; check them as they arrive (default); strict: "
        "compare before bytes go out, every rank raises at its own line",
    )
    group.add_argument(
        "--on-hang",
        choices=[str(choice) for choice in OnHang],
        help="after the report of a hang: abort the job (default), report only, or wait for a debugger",
    )
    group.add_argument(
        "--on-slow",
        choices=[str(choice) for choice in OnSlow],
        help="a rank that is slower in every step: report it (default), ignore it, or report it and end with exit code "
        "5 if it still is at the end",
    )
    group.add_argument(
        "--hang-after",
        type=seconds,
        metavar="SECONDS",
        help="time after which a rank that still computes counts as missing, if other ranks wait for it (default: "
        f"{DEFAULT_HANG_AFTER_S:g}). A job in which no rank waits in a call counts as hung if no rank has moved for "
        "this long or, if you set this flag, has made a call. Proven deadlocks are reported at once",
    )
    group.add_argument(
        "--rings",
        metavar="DIR",
        help="keep the flight records here, for distsim diagnose and watch",
    )
    group.add_argument("--nan", action="store_true", help="report the first rank and call with NaN")
    group.add_argument("--checksum", action="store_true", help="report buffers that are written while a call uses them")
    group.add_argument(
        "--verbose", action="store_true", help="let every rank print where its flight records and the report are"
    )
