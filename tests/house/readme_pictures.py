"""Fills the README's two pictures from real runs: `python -m tests.house.readme_pictures`."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from tests.house.tree import ROOT

COLUMNS = "100"


def printed(command: str) -> list[str]:
    """The lines that `distsim COMMAND` prints on a terminal of 100 columns."""
    done = subprocess.run(
        [sys.executable, "-m", "distsim", *command.split()],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": COLUMNS},
        capture_output=True,
        text=True,
    )
    return [line.rstrip() for line in done.stdout.splitlines()]


def pictures(text: str) -> list[tuple[str, str]]:
    """(command, block) of each picture of the README, in their order."""
    commands = re.findall(r"^(?:pip.*&& |\$ )distsim (run .*)$", text, re.MULTILINE)
    blocks = re.findall(r"^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return list(zip(commands, (block for block in blocks if "of virtual time" in block), strict=True))


def main() -> None:
    """Run both commands and put what they print where their last output stands."""
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    (healthy, first), (hang, second) = pictures(text)
    steps = [line for line in printed(healthy) if not re.search(r"step +[3-9] ", line)]
    report = printed(hang)
    text = text.replace(first, "\n".join(steps).rstrip() + "\n")
    text = text.replace(second, f"$ distsim {hang}\n" + "\n".join(report).rstrip() + "\n")
    readme.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
