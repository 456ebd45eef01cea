"""The commands as functions of Python: `distsim.fits("train.py", "--layers", "32", on="dgx-h100:2")`.

Each parses the same words as the command line, runs the same command in this process, and returns its report.
"""

from __future__ import annotations

import contextlib
import functools
import html
import importlib
import io
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from distsim.errors import UsageError
from distsim.text.untrusted_input import load_json

FILES = {
    "run": "--report",
    "diagnose": "--report",
    "attach": "--report",
    "tune": "--json",
    "sweep": "--json",
    "buy": "--json",
    "equal": "--report",
}
"""Flag that writes a command's JSON report into a file. The others (fits, bench) print it in place of their text."""


@dataclass(frozen=True)
class CommandResult:
    """Result of a command."""

    command: str
    exit_code: int
    """As on the command line: 0 finished, 3 a hang, 4 inconsistent collectives, 5 an expectation or `fits` failed."""
    report: Any
    """The JSON report, of the type that `distsim schema` describes: `distsim.planning.schema.FitsReport`, ...; None if
    the program failed and the command has no report of that."""
    text: str
    """What the command line prints; empty if the command prints its report in place of it."""

    def __str__(self) -> str:
        """Return the printed text, or the report's figures."""
        return self.text or "\n".join(f"{name}: {value}" for name, value in self._figures())

    def _figures(self) -> Iterator[tuple[str, object]]:
        for name, value in self.report.items() if isinstance(self.report, dict) else ():
            if not isinstance(value, dict | list):
                yield name, value

    def _repr_html_(self) -> str:
        """Return the text for a notebook, or the report's figures as a table."""
        if self.text:
            return f"<pre>{html.escape(self.text)}</pre>"
        rows = (
            f"<tr><td>{html.escape(name)}</td><td>{html.escape(str(value))}</td></tr>"
            for name, value in self._figures()
        )
        return f"<table>{''.join(rows)}</table>"


class _Run:
    """The function `distsim.run`; its other names are those of the module torch.distributed.run (torchrun)."""

    def __init__(self, function: Callable[..., CommandResult]) -> None:
        functools.update_wrapper(self, function)
        self._function = function

    def __call__(self, script: str, *arguments: object, **flags: object) -> CommandResult:
        return self._function(script, *arguments, **flags)

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("torch.distributed.run"), name)


@_Run
def run(script: str, *arguments: object, **flags: object) -> CommandResult:
    """Run a program, simulated (`on="dgx-h100:4"`) or for real (`on="gloo", nproc_per_node=4`).

    Args:
        script: The Python script.
        *arguments: Its own arguments.
        **flags: Flags of `distsim run`, with underscores: `nproc_per_node=8`, `ranks="all"`; True for a flag without a
            value, a list for one that is given several times.

    Returns:
        The report is a `distsim.report.schema.RunReport`.

    Raises:
        UsageError: A flag, a file or the cluster is wrong.
    """
    return _answer("run", [script, *arguments], flags)


def fits(script: str, *arguments: object, **flags: object) -> CommandResult:
    """Check whether *script* with *arguments* fits into GPU memory, and find a change that makes it fit.

    Args and errors as in `run`; the report is a `distsim.planning.schema.FitsReport`.
    """
    return _answer("fits", [script, *arguments], {**flags, "json": True})


def tune(script: str, *arguments: object, **flags: object) -> CommandResult:
    """Search the settings of *script* for the best layout: `vary=["--tp=1,2,4", "--mbs=1,2"]`.

    Args and errors as in `run`; the report is a `distsim.planning.schema.TuneReport`.
    """
    return _answer("tune", [script, *arguments], flags)


def sweep(scenario: str, *arguments: object, **flags: object) -> CommandResult:
    """Run a scenario or script under many settings: `vary=["on=dgx-h100:1,dgx-h100:2"]`.

    Args and errors as in `run`; the report is a `distsim.planning.schema.SweepReport`.
    """
    return _answer("sweep", [scenario, *arguments], flags)


def buy(script: str, *arguments: object, **flags: object) -> CommandResult:
    """Compare machines for a training: `on="dgx-h100,dgx-b200", tokens="1T"`.

    Args and errors as in `run`; the report is a `distsim.planning.schema.BuyReport`.
    """
    return _answer("buy", [script, *arguments], flags)


def equal(script: str, *arguments: object, **flags: object) -> CommandResult:
    """Run *script* in two layouts, and compare what they compute: `and_args="--tp 2"`, or `and_nproc_per_node=4`.

    Args and errors as in `run`; the report is a `distsim.planning.schema.EqualReport`.
    """
    return _answer("equal", [script, *arguments], flags)


def bench(operation: str, **flags: object) -> CommandResult:
    """Time one collective on a cluster: `bench("all_reduce", on="dgx-h100:4", minbytes="8M", maxbytes="1G")`.

    Flags and errors as in `run`.
    """
    return _answer("bench", [operation], {**flags, "json": True})


def diagnose(directory: str, **flags: object) -> CommandResult:
    """Diagnose a job from the folder of its records.

    Flags and errors as in `run`; the report is a `distsim.report.schema.RunReport`.
    """
    return _answer("diagnose", [directory], flags)


def attach(*pids: int, **flags: object) -> CommandResult:
    """Find the rank that hangs a running job: its launcher, or ranks; none: the only job of this host.

    Flags and errors as in `run`; the report is a `distsim.report.schema.RunReport`.
    """
    return _answer("attach", list(pids), flags)


def _answer(command: str, words: list[object], flags: dict[str, object]) -> CommandResult:
    """Run a command with its output kept, and return its answer."""
    from distsim.cli.dispatch import parse

    printed = io.StringIO()
    with tempfile.TemporaryFile() as file:
        if command in FILES:
            if (name := FILES[command][2:]) in flags:
                raise UsageError(f"distsim.{command}: expected no {name}, which is in the result (`.report`)")
            flags = {name: f"/dev/fd/{file.fileno()}", **flags}
        argv = [command, *_as_words(flags), *map(str, words)]
        args = parse(argv)
        args.own_process, args.argv = False, argv
        with contextlib.redirect_stdout(printed):
            code = int(args.func(args))
        file.seek(0)
        report, text = file.read(), printed.getvalue()
    if command not in FILES and text.startswith("{"):
        return CommandResult(command, code, load_json(text.encode()), "")
    return CommandResult(command, code, load_json(report) if report else None, text)


def _as_words(flags: dict[str, object]) -> Iterator[str]:
    for name, value in flags.items():
        flag = f"-{name}" if len(name) == 1 else f"--{name.replace('_', '-')}"
        for one in value if isinstance(value, list | tuple) else [value]:
            if one is True:
                yield flag
            elif len(name) == 1 or name == "vary":  # whose value begins with dashes, and is a word of its own
                yield from (flag, str(one))
            elif one is not None and one is not False:
                yield f"{flag}={one}"
