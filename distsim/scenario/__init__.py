"""Scenarios: a program, its cluster, faults and expectations in one file, which is documentation, input and test at
once.
"""

from __future__ import annotations

from distsim.scenario.expect.result import Result
from distsim.scenario.file.load import Scenario, find_scenarios, is_scenario, load_scenario, load_scenarios
from distsim.scenario.run import run_scenario

__all__ = [
    "Result",
    "Scenario",
    "find_scenarios",
    "is_scenario",
    "load_scenario",
    "load_scenarios",
    "run_scenario",
]
