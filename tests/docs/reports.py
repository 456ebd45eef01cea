"""The reports and outputs that pages show, taken from runs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from distsim.debug.attach import Doing, Position, judge
from distsim.debug.records import Site
from distsim.debug.report.render import render_diagnoses
from distsim.scenario import load_scenario
from distsim.scenario.run import simulate_scenario
from tests.docs.blocks import write_titled
from tests.house.readme_pictures import without_wall_time
from tests.house.tree import ROOT

__all__ = ["OUTPUT", "RECORDED", "SHOWN", "fill", "output", "report"]

SHOWN = re.compile(r"<!-- report of (\S+) -->\n```text\n(.*?)```\n", re.DOTALL)
"""A scenario and what the page shows of it."""
OUTPUT = re.compile(r"<!-- output of ([^\n]+) -->\n```text\n(.*?)```\n", re.DOTALL)
"""A command that runs files of the page, and lines of its output in their order."""
RECORDED = re.compile(r"<!-- recorded from ([^\n]+) -->\n```text\n(.*?)```\n", re.DOTALL)
"""The same of a command that takes minutes and runs files of the repository."""
WIDTH, WIDE = 80, 112
_TRACEBACK = re.compile(r"^  traceback of .*\n(?:    .*\n|\n(?=    ))*", re.MULTILINE)
"""Where torch is installed, and at which lines it raises, is this machine's business."""


def report(scenario: str) -> str:
    """What the run of *scenario* (`hangs/raises`) says first; what `attach` says of three ranks."""
    if scenario == "attach":
        return attach_report()
    outcome, _, _ = simulate_scenario(load_scenario(ROOT / "scenarios" / f"{scenario}.toml"))
    text = render_diagnoses(outcome.diagnoses[:1], outcome.evidence).plain(WIDTH)
    return _TRACEBACK.sub("", text).rstrip() + "\n"


def attach_report() -> str:
    """Of a rank that waits for a message, a turn of its loop behind the others."""

    def stack(*lines: tuple[int, str]) -> tuple[Site, ...]:
        return tuple(Site("train.py", line, function) for line, function in lines)

    call = stack((3, "helper"), (8, "main"), (13, "<module>"))
    message = stack((11, "main"), (13, "<module>"))
    places = [
        Position(0, 4712, Doing.CALL, "all_reduce", call[0], call, counters={"main.step": 4}),
        Position(1, 4713, Doing.CALL, "wait() of an async call", message[0], message, counters={"main.step": 3}),
        Position(2, 4714, Doing.CALL, "all_reduce", call[0], call, counters={"main.step": 4}),
    ]
    lines = ["", "", "    dist.all_reduce(t)", *[""] * 7, "            w.wait()"]
    judged = judge(places, 3, sources={"train.py": "\n".join(lines)}, hosts=dict.fromkeys(range(3), "node1"))
    return render_diagnoses(judged.diagnoses, judged.evidence).plain(WIDTH).rstrip() + "\n"


def output(page: Path, command: str, shown: str) -> list[str]:
    """Lines that *command* prints to standard output, in a folder with the page's files and the scenarios.

    It is as wide as what is *shown*.
    """
    width = WIDTH if max(map(len, shown.splitlines())) <= WIDTH else WIDE
    with tempfile.TemporaryDirectory() as folder:
        write_titled(page, Path(folder))
        (Path(folder) / "scenarios").symlink_to(ROOT / "scenarios")
        done = subprocess.run(
            [sys.executable, "-m", *shlex.split(command)],
            cwd=folder,
            env={**os.environ, "COLUMNS": str(width), "XDG_CACHE_HOME": folder},
            capture_output=True,
            text=True,
            timeout=3600,
            check=False,
        )
    return [line.rstrip() for line in done.stdout.splitlines()]


def fill(page: Path, recorded: bool = False) -> str:
    """The page's text with every report and output as it is now, those that take minutes if *recorded*.

    An output keeps as many lines as the page shows: those from its first line on.
    """
    text = SHOWN.sub(lambda m: f"<!-- report of {m[1]} -->\n```text\n{report(m[1])}```\n", page.read_text("utf-8"))
    for pattern in (OUTPUT, RECORDED) if recorded else (OUTPUT,):
        text = pattern.sub(lambda m: _with_output(page, m), text)
    return text


def _with_output(page: Path, block: re.Match[str]) -> str:
    shown = block[2].splitlines()
    lines = output(page, block[1], block[2])
    first = next((i for i, line in enumerate(lines) if line.split()[:1] == shown[0].split()[:1]), 0)
    lines = lines[first : first + len(shown)]
    if without_wall_time("\n".join(lines)) == without_wall_time("\n".join(shown)):
        return block[0]
    return f"{block[0].partition(chr(10))[0]}\n```text\n" + "\n".join(lines).rstrip() + "\n```\n"
