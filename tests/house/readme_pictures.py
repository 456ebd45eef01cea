"""Fills the README's examples of output from real runs: `python -m tests.house.readme_pictures`."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.house.tree import ROOT

__all__ = ["pictures", "printed", "without_wall_time"]

COLUMNS = "100"
_PICTURE = re.compile(r"^```\n\$ ([^\n]+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_TEST = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def printed(command: str) -> list[str]:
    """Standard output of *command*, at 100 columns; pytest runs the test that the README shows."""
    with tempfile.TemporaryDirectory() as folder:
        test = _TEST.search((ROOT / "README.md").read_text(encoding="utf-8"))
        assert test is not None
        (Path(folder) / "test_branch.py").write_text(test[1], encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-m", *shlex.split(command)],
            cwd=ROOT if command.startswith("distsim") else folder,
            env={**os.environ, "COLUMNS": COLUMNS},
            capture_output=True,
            text=True,
        )
    return [line.rstrip() for line in done.stdout.splitlines()]


def pictures(text: str) -> list[tuple[str, str]]:
    """(command, its output) of each block of the README that begins with `$ COMMAND`, in order."""
    return _PICTURE.findall(text)


def without_wall_time(text: str) -> str:
    """*text* without the time that the run took on this machine; all else is the same everywhere."""
    text = re.sub(r"(?<= runs  )[\d.]+ s$", "", text, flags=re.MULTILINE)  # of an exploration
    return re.sub(r"\(\S+ \w+ of wall time", "(", text)


def _shape(line: str) -> str:
    """A line without its figures, bars and gaps, which change with every model that gets better."""
    return re.sub(r"\bx\d+|[\d.,<%█▏▎▍▌▋▊▉]+|\b(ns|us|ms|s|[KMG]iB|B)\b|\s", "", line)


def main() -> None:
    """Run each command and replace the lines that the README shows by the new ones of the same shape."""
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    for command, output in pictures(text):
        shapes = [_shape(line) for line in output.splitlines()]
        lines = {_shape(line): line for line in printed(command)}  # of equal lines (steps) the last
        shown = "\n".join(lines[one] for one in dict.fromkeys(shapes) if one in lines)
        if without_wall_time(shown) != without_wall_time(output.rstrip("\n")):
            text = text.replace(f"$ {command}\n{output}", f"$ {command}\n{shown}\n")
    readme.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
