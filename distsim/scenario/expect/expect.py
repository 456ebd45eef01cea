"""Compares a run with a scenario's expectations: one line for each difference, with its path in the file.

The figures of a run may be bounded by those of earlier runs, which lie beside the scenario: `NAME.baseline.json`.
"""

from __future__ import annotations

import fnmatch
import json
import math
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from distsim.debug.diagnosis.silent.facts import Severity
from distsim.debug.records.kinds import Kind
from distsim.errors import UsageError
from distsim.scenario.expect.result import Result
from distsim.text.units import format_bandwidth, format_bytes, format_time
from distsim.text.untrusted_input import brief, read_json

if TYPE_CHECKING:
    from distsim.debug.records.diagnosis import Diagnosis
    from distsim.scenario.file.load import Scenario
    from distsim.sim import Outcome
    from distsim.sim.kernel.limits import Limits
    from distsim.sim.observe.metrics import Training

LARGEST_FILE = 1 << 20


def baseline_path(scenario: Scenario) -> Path:
    return scenario.path.with_suffix(".baseline.json")


def read_baseline(path: Path) -> dict[str, float]:
    """Return the stored figures; empty if there is no file."""
    try:
        data = read_json(path, LARGEST_FILE)
        return {name: _figure(name, value) for name, value in data.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, OverflowError, AttributeError) as error:
        problem = brief(str(error), 200)
        raise UsageError(
            f"{path}: expected figures by name as JSON ({problem}); write it anew with --update-baselines"
        ) from None


def _figure(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < math.inf:
        raise ValueError(f"{brief(name)}: expected a number, got {brief(value)}")
    return float(value)


def figures(outcome: Outcome) -> dict[str, float]:
    """Return the name -> figure; the unit is in the name."""
    result = {"virtual_time_s": outcome.virtual_time_s, "events": float(outcome.events)}
    for part in ("compute_s", "communication_s", "exposed_s", "idle_s"):
        values = [getattr(rank, part) for rank in outcome.ranks]
        result[part] = max(values, default=0.0)
    result |= _sure(outcome, result["exposed_s"])
    peaks = [rank.peak_memory_bytes for rank in outcome.ranks if rank.peak_memory_bytes is not None]
    if peaks:
        result["peak_memory_bytes"] = float(max(peaks))
    for total in outcome.collectives:
        name = f"busbw_bytes_per_s.{total.op}"
        result[name] = max(result.get(name, 0.0), total.busbw_bytes_per_s)
    if outcome.links:
        result["busiest_link"] = max(link.mean_utilisation for link in outcome.links)
    if outcome.training is not None:
        result |= _of_training(outcome.training)
    return result


def _of_training(training: Training) -> dict[str, float]:
    """Return the step time of the slowest rank and the peak memory of the fullest GPU.

    If a rank ran out of memory, the peak is the least that it would have needed.
    """
    peak = float(training.peak_reserved_bytes)
    short = max((one.allocated + one.asked for one in training.out_of_memory), default=0)
    missing = max((one.missing for one in training.out_of_memory), default=0)
    capacity = training.memory_bytes - training.context_bytes
    values = {
        "gpus": float(training.num_gpus),
        "peak_gpu_memory_bytes": max(peak, float(short)),
        "gpu_memory_share": max(peak, float(short)) / capacity if capacity > 0 else 0.0,
        "fits": float(not training.out_of_memory),
        "missing_gpu_memory_bytes": float(missing),
    }
    figures = {
        "step_s": training.step_time_s,
        "tokens_per_step": training.tokens_per_step,
        "tokens_per_s": training.tokens_per_s,
        "mfu": training.mfu,
        "hfu": training.hfu,
        "price": training.price,
        "power_w": training.power_w,
        "power_is_limit": None if training.power_w is None else float(training.power_is_limit),
    }
    pacing = training.pacing
    if pacing is not None:
        figures |= {
            "step_compute_s": pacing.compute_s,
            "step_exposed_s": pacing.exposed_s,
            "step_bubble_s": pacing.bubble_s,
            "step_host_s": pacing.host_s,
        }
    return values | {name: value for name, value in figures.items() if value is not None}


def _sure(outcome: Outcome, exposed_s: float) -> dict[str, float]:
    """Return the intervals of the run and of a step that hold eight of ten measured times: those of collectives,
    weighted by their exposed share. Empty without measurements."""
    known = [total for total in outcome.collectives if total.low_s is not None and total.high_s is not None]
    if not known:
        return {}
    time_s = sum(total.time_s for total in outcome.collectives) or 1.0
    lower_s = sum(total.time_s - (total.low_s or 0.0) for total in known)
    higher_s = sum((total.high_s or 0.0) - total.time_s for total in known)
    result = {
        "virtual_time_low_s": outcome.virtual_time_s - exposed_s * lower_s / time_s,
        "virtual_time_high_s": outcome.virtual_time_s + exposed_s * higher_s / time_s,
    }
    training = outcome.training
    if training is not None and training.step_low_s is not None and training.step_high_s is not None:
        result |= {"step_low_s": training.step_low_s, "step_high_s": training.step_high_s}
    return result


def step_time_s(outcome: Outcome, lines: list[int]) -> float | None:
    """Return the median time between two calls at the marked line, on the slowest rank; None if no rank called it
    twice.

    Without *lines*, return the time of a training step, as the report has it; None if no GPU made one.
    """
    if not lines:
        return None if outcome.training is None else outcome.training.step_time_s
    slowest: float | None = None
    for records in outcome.records.values():
        times = [r.issued_s for r in records if r.site is not None and r.site.line in lines]
        if len(times) > 1:
            step_s = median(after - before for before, after in pairwise(times))
            slowest = step_s if slowest is None else max(slowest, step_s)
    return slowest


_LINE = re.compile(r"\[ *(\d+)\] ?(.*)")


def lines_by_rank(output: str) -> dict[int, list[str]]:
    """Return the output of each rank."""
    lines: dict[int, list[str]] = {}
    for line in output.splitlines():
        match = _LINE.match(line)
        if match is not None:
            lines.setdefault(int(match[1]), []).append(match[2])
    return lines


def mistakes(scenario: Scenario, outcome: Outcome, output: str) -> list[str]:
    """Return every expectation that a run and the output of its ranks do not meet, but for that of its step time."""
    wrong = [*_kind(scenario, outcome)]
    if outcome.diagnoses:
        wrong += _diagnosis(scenario, outcome.diagnoses[0], outcome)
    elif scenario.spec.expect.call is not None:
        wrong += _call_at_all(scenario, outcome)
    code = scenario.spec.expect.exit_code
    if code is not None and code != outcome.exit_code:
        wrong.append(f"expect.exit_code: expected {code}, got {outcome.exit_code}")
    wrong += _silent(scenario, outcome)
    wrong += _printed(scenario, output, outcome.world_size)
    wrong += _results(scenario, outcome)
    wrong += _figures(scenario, outcome)
    return wrong


def _kind(scenario: Scenario, outcome: Outcome) -> Iterator[str]:
    expect = scenario.spec.expect
    kinds = [d.kind.value for d in outcome.diagnoses]
    if expect.kind == "healthy":
        loud = [d for d in outcome.diagnoses if d.kind is not Kind.STRAGGLER]
        if loud:
            yield f"expect.kind: expected healthy, got {loud[0].kind.value}"
        elif outcome.exit_code and expect.exit_code is None:
            raised = "; ".join(f"{f.type}: {f.message}" for f in outcome.failures)
            yield f"expect.kind: expected healthy, got exit code {outcome.exit_code}" + (
                f" ({raised})" if raised else ""
            )
        return
    first = kinds[0] if kinds else "healthy"
    if expect.kind != first:
        also = f" (it is number {kinds.index(expect.kind) + 1} of {len(kinds)})" if expect.kind in kinds else ""
        yield f"expect.kind: expected {expect.kind}, got {first}{also}"


def _silent(scenario: Scenario, outcome: Outcome) -> Iterator[str]:
    wanted = scenario.spec.expect_silent
    if wanted is None:
        return
    kinds = {kind for kind in ([wanted] if isinstance(wanted, str) else wanted) if kind != "none"}
    got = {one.kind.value for one in outcome.silent if one.level is not Severity.NOTICE}
    if kinds != got:
        expected, came = (", ".join(sorted(names)) or "none" for names in (kinds, got))
        yield f"expect_silent: expected {expected}, got {came}"


def _diagnosis(scenario: Scenario, first: Diagnosis, outcome: Outcome) -> Iterator[str]:
    expect = scenario.spec.expect
    for key in ("culprits", "victims", "cycle", "pair"):
        wanted, got = getattr(expect, key), getattr(first, key)
        if wanted is not None and list(wanted) != list(got or ()):
            yield f"expect.{key}: expected {list(wanted)}, got {None if got is None else list(got)}"
    group = first.group
    if expect.group is not None and (group is None or expect.group not in (group.description, group.name, group.label)):
        yield f"expect.group: expected {expect.group!r}, got {None if group is None else group.label!r}"
    if expect.call is not None:
        call = first.call
        for key, wanted in (("op", expect.call.op), ("seq", expect.call.seq)):
            got = None if call is None else getattr(call, key)
            if wanted is not None and wanted != got:
                yield f"expect.call.{key}: expected {wanted!r}, got {got!r} ({call})"
        yield from _call_at_all(scenario, outcome)
    if expect.explanation is not None and expect.explanation not in first.explanation:
        yield f"expect.explanation: expected {expect.explanation!r} in it, got {first.explanation!r}"
    if expect.line is not None:
        lines = scenario.marked(expect.line)
        sites = [first.sites[r].line for r in first.culprits if r in first.sites]
        if not any(line in lines for line in sites):
            yield f"expect.line: expected a culprit at {_lines(lines)} ({expect.line}), got {_lines(sites)}"
    if expect.stuck_line is not None:
        lines = scenario.marked(expect.stuck_line)
        stuck = sorted({at.line for at in first.stuck.values() if at.line is not None})
        if not any(line in lines for line in stuck):
            wanted_at = f"{_lines(lines)} ({expect.stuck_line})"
            yield f"expect.stuck_line: expected a rank waiting at {wanted_at}, got {_lines(stuck)}"


def _lines(numbers: Sequence[int]) -> str:
    if not numbers:
        return "no line"
    return f"line{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _call_at_all(scenario: Scenario, outcome: Outcome) -> Iterator[str]:
    """Yield a line for an expectation about a call that no rank made, which is a mistake in the file.

    The early calls of a real run may be overwritten, so only its diagnosis is compared.
    """
    wanted = scenario.spec.expect.call
    assert wanted is not None
    if scenario.spec.backend != "sim":
        return
    calls = [r for records in outcome.records.values() for r in records]
    if not any(wanted.op in (None, r.op) and wanted.seq in (None, r.seq) for r in calls):
        name = f"{wanted.op or 'a call'}{'' if wanted.seq is None else f' #{wanted.seq}'}"
        calls_made = ", ".join(sorted({f"{r.op} #{r.seq}" for r in calls})[:6]) or "none"
        yield f"expect.call: no rank ever called {name}; calls made: {calls_made}"


def _printed(scenario: Scenario, output: str, world_size: int) -> Iterator[str]:
    expect = scenario.spec.expect
    if expect.output is None and expect.prints is None:
        return
    by_rank = lines_by_rank(output)
    everything = [line for lines in by_rank.values() for line in lines]
    for wanted in expect.output or ():
        if wanted not in everything:
            yield f"expect.output: no rank printed {wanted!r}"
    for key, wanted_lines in (expect.prints or {}).items():
        for rank in range(world_size) if key == "all" else [int(key)]:
            lines = iter(by_rank.get(rank, ()))
            for wanted in wanted_lines:
                if not any(line == wanted for line in lines):
                    yield f"expect.prints.{key}: rank {rank} did not print {wanted!r} (in this order)"
                    break


def _results(scenario: Scenario, outcome: Outcome) -> Iterator[str]:
    for key, wanted in (scenario.spec.expect.results or {}).items():
        for rank in range(outcome.world_size) if key == "all" else [int(key)]:
            got = _plain(outcome.results[rank] if rank < len(outcome.results) else None)
            if not _same(wanted, got):
                yield f"expect.results.{key}: expected {wanted!r}, got {got!r} on rank {rank}"


def _plain(value: Any) -> Any:
    """Convert tensors and arrays to lists, and tuples to lists, as TOML can express them."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value


def _same(wanted: Any, got: Any) -> bool:
    if isinstance(wanted, float) and isinstance(got, int | float):
        return abs(wanted - got) <= 1e-6 * max(abs(wanted), abs(got))
    if isinstance(wanted, list) and isinstance(got, list):
        return len(wanted) == len(got) and all(_same(a, b) for a, b in zip(wanted, got, strict=True))
    return bool(wanted == got)


def _figures(scenario: Scenario, outcome: Outcome) -> Iterator[str]:
    expect = scenario.spec.expect
    limit_s = expect.virtual_time_below_s
    if limit_s is not None and outcome.virtual_time_s >= limit_s:
        took = format_time(outcome.virtual_time_s)
        yield f"expect.virtual_time_below_s: expected below {format_time(limit_s)}, got {took}"
    yield from _memory(expect.memory_below, outcome)
    for op, least in (expect.busbw_above or {}).items():
        totals = [t for t in outcome.collectives if t.op == op]
        if not totals:
            ops_made = ", ".join(sorted({t.op for t in outcome.collectives})) or "none"
            yield f"expect.busbw_above.{op}: no rank ever called {op}; calls made: {ops_made}"
            continue
        best = max(t.busbw_bytes_per_s for t in totals)
        if best <= least:
            yield f"expect.busbw_above.{op}: expected above {format_bandwidth(least)}, got {format_bandwidth(best)}"
    for pattern, most in (expect.utilisation_below or {}).items():
        hit = [link for link in outcome.links if fnmatch.fnmatchcase(link.name, pattern)]
        if not hit and not any(fnmatch.fnmatchcase(link.name, pattern) for link in scenario.cluster.links):
            yield f"expect.utilisation_below: no link {pattern!r} in {scenario.cluster.name}"
        over = [link for link in hit if link.mean_utilisation >= most]
        if over:
            worst = max(over, key=lambda link: link.mean_utilisation)
            got = worst.mean_utilisation
            digits = _digits(most, got)
            yield (
                f"expect.utilisation_below: expected {pattern} below {most:.{digits}%}, got {got:.{digits}%} "
                f"on {worst.name}"
            )


def _digits(*fractions: float) -> int:
    """Return how many decimals a percentage needs to show the smallest of *fractions*, and that they differ."""
    smallest = min([abs(a) for a in (*fractions, fractions[0] - fractions[-1]) if a] or [1.0])
    return min(12, max(0, -math.floor(math.log10(100.0 * smallest))))


def _memory(bound: int | None, outcome: Outcome) -> Iterator[str]:
    over = [] if bound is None else [r for r in outcome.ranks if (r.peak_memory_bytes or 0) >= bound]
    if bound is not None and over:
        worst = max(over, key=lambda rank: rank.peak_memory_bytes or 0)
        others = f" (and too much on {len(over) - 1} more)" if len(over) > 1 else ""
        peak = worst.peak_memory_bytes or 0
        yield (
            f"expect.memory_below: expected every rank below {format_bytes(bound)}, "
            f"got {format_bytes(peak)} ({peak:,} bytes) on rank {worst.rank}{others}"
        )


def _step_time(scenario: Scenario, outcome: Outcome, result: Result, update: bool) -> Iterator[str]:
    """Yield a line if the step differs from its baseline, or has none. Sets the result's `step_time`."""
    wanted, path = scenario.spec.expect.step_time, baseline_path(scenario)
    if wanted is None:
        return
    lines = [] if wanted.line is None else scenario.marked(wanted.line)
    step_s = step_time_s(outcome, lines)
    if step_s is None and wanted.line is None:
        yield (
            "expect.step_time: expected a training step on a GPU, and the run made none; step_time.line names a call "
            "that is made once a step, and expect.virtual_time_below_s bounds the whole run"
        )
        return
    if step_s is None:
        yield f"expect.step_time.line: no rank reached {_lines(lines)} ({wanted.line}) twice"
        return
    took = format_time(step_s)
    if update:
        path.write_text(json.dumps({"step_time_s": step_s}, indent=1) + "\n", encoding="utf-8")
        result.step_time = f"step {took}, stored in {path.name}"
        return
    before_s = read_baseline(path).get("step_time_s")
    if not before_s:
        yield f"expect.step_time: no baseline {path.name}; write it with --update-baselines (it took {took})"
        return
    change = step_s / before_s - 1
    result.step_time = f"step {took}, {change:+.1%} from its baseline"
    if abs(change) > wanted.band:
        yield (
            f"expect.step_time: expected {format_time(before_s)} within {wanted.band:.0%}, got {took} ({change:+.1%})"
        )


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
    if result.site is None and scenario.file is not None:
        result.site = (str(scenario.file), 1)
    result.wrong = [
        *mistakes(scenario, outcome, output),
        *_step_time(scenario, outcome, result, update_baseline),
        *unstruck,
    ]
    if limits.reached is not None:
        result.ended_by(limits)
        if standing:
            result.report = "\n".join([*standing, *(["", report] if report else [])])
    return result
