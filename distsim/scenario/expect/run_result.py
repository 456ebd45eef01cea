"""A run, simulated or real, as its scenario's result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from distsim.scenario.expect.baseline import baseline_path
from distsim.scenario.expect.expect import mistakes
from distsim.scenario.expect.result import Result

if TYPE_CHECKING:
    from distsim.scenario.file.load import Scenario
    from distsim.sim.kernel.schedule import Limits
    from distsim.sim.outcome import Outcome

__all__ = ["result_of"]


def result_of(
    scenario: Scenario,
    outcome: Outcome,
    output: str,
    *,
    report: str,
    replay: str,
    figures: dict[str, float],
    unstruck: Sequence[str],
    limits: Limits,
    standing: Sequence[str],
    update_baseline: bool = False,
) -> Result:
    """Return the result of *outcome*, compared with the scenario's expectations.

    *unstruck* are lines on faults that had no effect; *standing* says where the ranks were when one of *limits* ended
    the run.
    """
    result = Result(
        scenario.name,
        str(scenario.path),
        report=report,
        output=output,
        replay=replay,
        exit_code=outcome.exit_code,
        figures=figures,
    )
    if outcome.diagnoses:
        first = outcome.diagnoses[0]
        result.accuses(first, next((first.sites[r] for r in first.culprits if r in first.sites), None))
    if result.place is None and scenario.file is not None:
        result.place = (str(scenario.file), 1)
    result.wrong = [*mistakes(scenario, outcome, output, baseline_path(scenario), update_baseline), *unstruck]
    if limits.reached is not None:
        result.ended_by(limits)
        if standing:
            result.report = "\n".join([*standing, *(["", report] if report else [])])
    return result
