"""`distsim mcp`: the commands as tools of the Model Context Protocol, with typed results.

A tool runs its command in a process of its own and answers that command's JSON report. Only what lies below one folder
can be named, and tools that execute a program's code are there with --allow-run alone.
"""

# Annotations are read when a tool is declared, where names of `serve` would not be found as strings.

import argparse
import asyncio
import functools
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from distsim.errors import UsageError
from distsim.text.untrusted_input import load_json, read_json, read_text

LONGEST_S = 3600.0
"""Wall time after which a command is ended."""
MOST_LINES = 20
"""Entries of a long list that are answered unless the caller asks for all."""
LISTS = ("links", "collectives", "ranks", "memory_curve", "operators", "not_traced", "changes", "held", "untried")
"""Lists that grow with the job."""
INSTRUCTIONS = """\
distsim simulates PyTorch distributed programs on a cluster of any size, and diagnoses hangs of real ones.
A job hangs or died: diagnose (its folder of records) or attach (it still runs). Will a script fit: fits. How fast, \
how much memory, does it hang: run. Which layout is best: tune. Does a scenario still pass: scenario.
In a report, `diagnoses` has the root cause first: `culprits` are the ranks at fault, `suggestion` says what to do. \
`provisional` and `warning` are no verdicts."""


def add_parser(subparsers: Any) -> None:
    """Declare `distsim mcp`."""
    parser = subparsers.add_parser(
        "mcp",
        description="Serve diagnose, attach, topo and schema as tools of the Model Context Protocol on stdin and "
        "stdout; with --allow-run also run, fits, tune and scenario, which execute the scripts that they are given. "
        "Needs the extra mcp.",
    )
    parser.add_argument(
        "--root", default=".", metavar="DIR", help="folder outside of which no path is read (default: .)"
    )
    parser.add_argument("--allow-run", action="store_true", help="offer the tools that execute a script, simulated")
    parser.add_argument("--skill", action="store_true", help="print a skill file for agents, and exit")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Serve until the client closes standard input."""
    if args.skill:
        print(read_text(Path(__file__).parent / "SKILL.md"), end="")
        return 0
    root = Path(args.root)
    if not root.is_dir():
        raise UsageError(f"--root {args.root}: expected a folder, got {'a file' if root.exists() else 'nothing there'}")
    try:
        from mcp.server.mcpserver import MCPServer  # noqa: F401 - version 2 of the SDK
    except ImportError:
        raise UsageError(
            "the SDK of the Model Context Protocol (version 2) is not installed; pip install '.[mcp]' in a clone of "
            "distsim"
        ) from None
    server(root.resolve(), args.allow_run).run("stdio")
    return 0


def server(root: Path, allow_run: bool) -> Any:
    """Return the server (an `MCPServer`) whose tools see what lies below *root*.

    Args:
        root: Folder; an absolute path without links.
        allow_run: Whether to offer tools that execute a program's code.
    """
    from mcp.server.mcpserver import MCPServer

    from distsim import __version__
    from distsim.cli.agents.schema import json_schema

    answers = MCPServer("distsim", instructions=INSTRUCTIONS, version=__version__)

    tool = functools.partial(_tool, answers)

    @tool("report")
    async def diagnose(directory: str, full: bool = False) -> Any:
        """Diagnose a job that hung or failed from the folder of its records (distsim's rings, Flight Recorder dumps,
        logs): which ranks are at fault, where, and what to do."""
        return await _report_of(root, ["diagnose", "--report", "FILE", inside(root, directory)], full)

    @tool("report")
    async def attach(pid: int, full: bool = False) -> Any:
        """Find the rank that hangs a running job; pid is its launcher (torchrun) or one of its ranks on this host."""
        return await _report_of(root, ["attach", "--report", "FILE", str(pid)], full)

    @tool("topo")
    async def topo(cluster: str) -> Any:
        """Describe a cluster: a preset with a number of nodes (dgx-h100:4), or a cluster file."""
        return await _report_of(root, ["topo", "show", "--json", _cluster(root, cluster)], True)

    @tool()
    async def schema(name: str) -> dict[str, Any]:
        """Return the JSON Schema of a report (report, fits, tune, buy, ...) or of a scenario file."""
        return json_schema(name)

    if not allow_run:
        return answers

    def script_words(command: Sequence[str], script: str, arguments: Sequence[str], on: str) -> list[str]:
        return [*command, "--on", _cluster(root, on), inside(root, script), *arguments]

    @tool("report", read_only=False)
    async def run(script: str, arguments: Sequence[str] = (), on: str = "dgx-h100:1", full: bool = False) -> Any:
        """Simulate a training script on a cluster: step time, memory, hangs, inconsistent collectives."""
        return await _report_of(root, script_words(["run", "--report", "FILE"], script, arguments, on), full)

    @tool("fits", read_only=False)
    async def fits(script: str, arguments: Sequence[str] = (), on: str = "dgx-h100:1", full: bool = False) -> Any:
        """Check whether a script fits into GPU memory on a cluster, and find a change that makes it fit."""
        return await _report_of(root, script_words(["fits", "--json"], script, arguments, on), full)

    @tool("tune", read_only=False)
    async def tune(
        script: str,
        vary: list[str],
        arguments: Sequence[str] = (),
        on: str = "dgx-h100:1",
        budget: str = "10m",
    ) -> Any:
        """Search the settings of a script for the best layout; vary holds flags with values, such as --tp=1,2,4."""
        words = [word for one in vary for word in ("--vary", one)]
        command = ["tune", "--json", "FILE", f"--budget={budget}", *words]
        return await _report_of(root, script_words(command, script, arguments, on), False)

    @tool(read_only=False)
    async def scenario(file: str) -> str:
        """Run a scenario file: program, cluster, faults and expected outcome. Answers the printed result."""
        done = await asyncio.to_thread(_ran, root, ["scenario", "run", inside(root, file)])
        return done.stdout + done.stderr

    return answers


def _tool(answers: Any, report: str = "", read_only: bool = True) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that makes a function a tool of *answers*, whose result is the named *report*."""
    from mcp.server.mcpserver.exceptions import ToolError
    from mcp.types import ToolAnnotations

    from distsim.cli.agents.schema import report_type

    declared = answers.tool(annotations=ToolAnnotations(read_only_hint=read_only, destructive_hint=False))

    def declare(function: Callable[..., Any]) -> Any:
        if report:
            function.__annotations__["return"] = report_type(report)  # which the client is told

        @functools.wraps(function)
        async def answer(*args: Any, **named: Any) -> Any:
            try:
                return await function(*args, **named)
            except UsageError as error:  # its text is the caller's; that of another error stays here
                raise ToolError(str(error)) from None

        return declared(answer)

    return declare


def inside(root: Path, name: str) -> str:
    """Return the absolute path of *name*, which has to lie below *root*.

    Raises:
        UsageError: It lies elsewhere.
    """
    path = (root / name).resolve()
    if not path.is_relative_to(root):
        raise UsageError(f"expected a path below {root}, got {name!r}; start distsim mcp with another --root")
    return str(path)


def _cluster(root: Path, name: str) -> str:
    """Return a cluster that is simulated: a preset, or the path of a file below *root*."""
    if name in ("gloo", "nccl", "mpi") or name.startswith("-"):
        raise UsageError(f"expected a cluster to simulate, such as dgx-h100:4, got {name!r}")
    return inside(root, name) if "/" in name or Path(name).suffix else name


async def _report_of(root: Path, words: Sequence[str], full: bool) -> Any:
    """Return the report of the command *words*, in which `FILE` is the file that it goes to (none: its output)."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        done = await asyncio.to_thread(_ran, root, [str(file) if word == "FILE" else word for word in words])
        try:
            report = read_json(file) if file.exists() else load_json(done.stdout.encode())
        except ValueError:
            text = done.stderr.strip()[-2000:] or f"distsim {words[0]} ended with {done.returncode}"
            raise UsageError(text) from None
    return report if full else _short(report)


def _ran(root: Path, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "distsim", *words]
    try:
        return subprocess.run(
            command, cwd=root, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LONGEST_S
        )
    except subprocess.TimeoutExpired:
        raise UsageError(f"distsim {words[0]} did not end within {LONGEST_S:.0f} s, and was ended") from None


def _short(value: Any) -> Any:
    """Return a report whose lists that grow with the job have at most `MOST_LINES` entries."""
    if isinstance(value, dict):
        return {
            key: _short(item[:MOST_LINES] if key in LISTS and isinstance(item, list) else item)
            for key, item in value.items()
        }
    return [_short(item) for item in value] if isinstance(value, list) else value
