"""The reports that pages show, taken from runs of the library's scenarios."""

from __future__ import annotations

import re

from distsim.debug.report.render import render_diagnoses
from distsim.scenario import load_scenario
from distsim.scenario.run import simulate_scenario
from tests.house.tree import ROOT

__all__ = ["SHOWN", "fill", "report"]

SHOWN = re.compile(r"<!-- report of (\S+) -->\n```text\n(.*?)```\n", re.DOTALL)
"""A scenario and what the page shows of it."""
WIDTH = 80
_TRACEBACK = re.compile(r"^  traceback of .*\n(?:    .*\n|\n(?=    ))*", re.MULTILINE)
"""Where torch is installed, and at which lines it raises, is this machine's business."""


def report(scenario: str) -> str:
    """What the run of *scenario* (`hangs/raises`) says first."""
    outcome, _, _ = simulate_scenario(load_scenario(ROOT / "scenarios" / f"{scenario}.toml"))
    text = render_diagnoses(outcome.diagnoses[:1], outcome.evidence).plain(WIDTH)
    return _TRACEBACK.sub("", text).rstrip() + "\n"


def fill(text: str) -> str:
    """*text* with every report as it is now."""
    return SHOWN.sub(lambda m: f"<!-- report of {m[1]} -->\n```text\n{report(m[1])}```\n", text)
