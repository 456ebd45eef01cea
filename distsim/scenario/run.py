"""Runs one scenario and compares the result with its expectations."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distsim.debug.report.console import plain_text
from distsim.debug.report.rank_states import whereabouts
from distsim.debug.report.render import render_diagnoses
from distsim.errors import DistsimError
from distsim.options import options_of
from distsim.report import Summary, report_document
from distsim.scenario.expect.expect import figures, result_of
from distsim.scenario.expect.result import NOT_RUN, REST, Result, never_struck, replay_command, report_width
from distsim.scenario.file.load import Scenario
from distsim.sim.faults.fault import Rule
from distsim.sim.kernel.chooser import Orders
from distsim.sim.kernel.limits import Limits
from distsim.sim.world.conditions import Conditions

if TYPE_CHECKING:
    from distsim.sim import Outcome

_perf_counter = time.perf_counter


def run_scenario(
    scenario: Scenario,
    *,
    update_baseline: bool = False,
    picture: bool = False,
    sampled: bool = False,
    last_step: int | None = None,
) -> Result:
    """Run *scenario* and check its expectations. Never raises for what the program does.

    Args:
        scenario: What to run.
        update_baseline: Whether its baseline becomes what came of this run.
        picture: Whether the document has what a page draws.
        sampled: Whether a sample of the ranks stands for all of a program on GPUs.
        last_step: The training step after which the run ends; None: when the program does.
    """
    started = _perf_counter()
    try:
        if scenario.spec.backend == "gloo":
            from distsim.scenario.real.real import run_for_real

            result = run_for_real(scenario, picture=picture)
        else:
            outcome, output, conditions = simulate_scenario(
                scenario, trace=picture, budget_s=0.0 if sampled else None, last_step=last_step
            )
            result = observe(scenario, outcome, output, conditions, update_baseline=update_baseline, picture=picture)
    except DistsimError as error:
        result = Result(scenario.name, str(scenario.path), [str(error)], replay=replay_command(scenario), kind=NOT_RUN)
    result.wall_s = _perf_counter() - started
    return result


def simulate_scenario(
    scenario: Scenario,
    orders: Orders | None = None,
    trace: bool = False,
    budget_s: float | None = None,
    last_step: int | None = None,
) -> tuple[Outcome, str, Conditions]:
    """Simulate the scenario without checking its expectations.

    Return the outcome (with a *trace*, if requested), what the ranks printed, and the conditions, which know the
    faults that never had an effect.
    """
    from distsim.sim import RunRequest, run_program, simulate

    spec, limits = scenario.spec, scenario.spec.limits
    conditions = Conditions(
        scenario.rules,
        spec.guards,
        Limits(limits.virtual_time_s, limits.wall_time_s, limits.events),
        orders,
        memory=spec.expect.memory_below is not None,
    )
    options = options_of(spec) | {
        "on": scenario.cluster,
        "host_timeout_s": min(limits.host_timeout_s, limits.wall_time_s),
        "conditions": conditions,
        "trace": trace,
        "silent_allow": spec.silent_allow,
    }
    with captured() as printed, _environment(spec.env):
        if scenario.function is None:
            request = RunRequest(
                str(scenario.file),
                args=list(spec.args),
                budget_s=budget_s,
                sample_is_enough=budget_s is not None,
                last_step=last_step,
                **options,
            )
            outcome = run_program(request)
            if outcome.interrupted:  # as `simulate` does: no scenario after this one
                raise KeyboardInterrupt
        else:
            outcome = simulate(_caller(scenario), check=False, **options)
            outcome.program = spec.program
    return outcome, printed(), conditions


def observe(
    scenario: Scenario,
    outcome: Outcome,
    output: str,
    conditions: Conditions,
    *,
    replay: str = "",
    update_baseline: bool = False,
    picture: bool = False,
    brief: bool = False,
) -> Result:
    """Return the result of a run, which the string *replay* repeats; *brief*: without a report if it ended well."""
    brief = brief and not outcome.exit_code and not outcome.diagnoses
    outcome.cut_short = conditions.limits.reached is not None
    result = result_of(
        scenario,
        outcome,
        output,
        report="" if brief else _report(outcome),
        replay=replay_command(scenario, replay),
        figures=figures(outcome),
        unstruck=[_never(rule, outcome) for rule in conditions.never_struck],
        limits=conditions.limits,
        standing=whereabouts(outcome.evidence) if outcome.cut_short and outcome.evidence is not None else (),
        update_baseline=update_baseline,
    )
    result.virtual_time_s = outcome.virtual_time_s
    result.notes = list(outcome.notes)
    if picture:
        from distsim.report.html.reports import outcome_document

        result.document = outcome_document(outcome, result.replay, [_band(rule, outcome) for rule in scenario.rules])
    elif not brief:
        result.document = report_document(outcome)
    return result


def _band(rule: Rule, outcome: Outcome) -> tuple[float, float | None, str]:
    """Return when a fault was active, for a picture."""
    when = rule.when
    begin_s = when.start_s
    if when.call is not None:
        calls = (record for records in outcome.records.values() for record in records)
        struck_s = min((c.issued_s for c in calls if when.call.matches(c)), default=outcome.virtual_time_s)
        begin_s = struck_s + when.after_s
    return begin_s, None if when.for_s is None else begin_s + when.for_s, str(rule)


def _never(rule: Rule, outcome: Outcome) -> str:
    if rule.when.call is None:
        return never_struck(rule, outcome.virtual_time_s)
    ranks = getattr(rule, "ranks", None) or sorted(outcome.records)
    num_calls = max((len(outcome.records.get(rank, ())) for rank in ranks), default=0)
    last = [outcome.records[r][-1] for r in ranks if outcome.records.get(r)]
    where = f"; the last of {num_calls} calls was {last[0].op} #{last[0].seq}" if last else "; no call was made"
    return never_struck(rule) + where


def _report(outcome: Outcome) -> str:
    if outcome.diagnoses:
        return render_diagnoses(outcome.diagnoses, outcome.evidence, rest=REST).plain(report_width())
    return plain_text(Summary(outcome, with_wall_time=False), report_width())


def _caller(scenario: Scenario) -> Callable[[], Any]:
    """Return a caller for a program that is a function: each rank imports it in its own world and calls it."""
    folder = str(scenario.path.parent.resolve())
    file, name, arguments = scenario.file, scenario.program, list(scenario.spec.args)
    function = scenario.function or ""

    def call() -> Any:
        sys.path.insert(0, folder)
        sys.argv = [str(file or name), *arguments]
        if file is None:
            module = importlib.import_module(name)
        else:
            spec = importlib.util.spec_from_file_location(Path(name).stem, file)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        return getattr(module, function)(*arguments)

    call.__qualname__ = function
    return call


@contextmanager
def captured() -> Iterator[Callable[[], str]]:
    """Redirect sys.stdout and sys.stderr to a file, because programs may use their file descriptors. The yielded
    function returns the text.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as file:
        text = ""

        def printed() -> str:
            return text

        try:
            with redirect_stdout(file), redirect_stderr(file):
                yield printed
        finally:
            file.flush()
            file.seek(0)
            text = file.read()


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
