"""Notes for every run of a scenario, simulated or real: how to repeat it, and which faults had no effect."""

from __future__ import annotations

import os
import shlex

from distsim.scenario.file.load import Scenario
from distsim.sim.faults.fault import Rule
from distsim.sim.kernel.schedule import Schedule
from distsim.text.units import format_time

__all__ = ["REST", "WIDTH", "never_struck", "replay_command"]

WIDTH = 100
"""Columns of a report in a log."""
REST = "distsim scenario run --html FILE"
"""Command that shows the whole of a shortened report."""


def replay_command(scenario: Scenario, schedule: Schedule | None = None) -> str:
    """Return the command that repeats the run."""
    words = ["distsim", "scenario", "run", os.path.relpath(scenario.path), "--seed", str(scenario.spec.seed)]
    schedule = schedule or scenario.schedule
    if schedule is not None:
        words += ["--schedule", str(schedule)]
    return shlex.join(words)


def never_struck(rule: Rule, ended_s: float | None = None) -> str:
    """Return a note that *rule* never struck, and the remedy if the run ended first, after *ended_s*."""
    text = f"{rule.path}: never struck ({rule}, {rule.when})"
    if ended_s is None or ended_s > rule.when.start_s:
        return text
    return f"{text}; the run was over after {format_time(ended_s)}: choose an earlier at_s, or a call (call = 3)"
