"""Runs one scenario under every combination of some settings."""

from __future__ import annotations

import copy
import csv
import difflib
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distsim.errors import UsageError
from distsim.planning.points import KeptPoints, with_flag
from distsim.scenario.expect.result import Result
from distsim.scenario.file.load import BadFile, Scenario, check
from distsim.scenario.file.schema import ScenarioSpec
from distsim.scenario.pool import Key, PointPool, as_they_end, one_by_one
from distsim.scenario.suite import import_for, run_suite
from distsim.text.output_files import open_output, written
from distsim.text.untrusted_input import brief, digits, toml_value

MAX_POINTS = 10_000
POINT_S = 3600.0
"""Wall time of one point of a script: points run side by side, and some are large."""
NODES = ("cluster.nodes", "on.nodes")
"""Settings that are not keys of the file: the number of nodes after the cluster's name."""


@dataclass(frozen=True, slots=True)
class Variation:
    """One `--vary PATH=VALUE,VALUE`."""

    path: str
    values: tuple[Any, ...]


@dataclass(slots=True)
class Point:
    """One combination of settings with its result."""

    settings: dict[str, Any]
    result: Result
    number: int = 0
    """Index among all combinations."""


def script(path: Path, arguments: Sequence[str], **keys: Any) -> Scenario:
    """Return a script as a scenario: *arguments* are its own, *keys* those of a scenario file."""
    if not path.is_file():
        raise UsageError(f"no script {path}: no such file")
    limits = {"wall_time_s": POINT_S, "host_timeout_s": POINT_S / 4}
    content = {"program": path.name, "args": list(arguments), "limits": limits, **keys}
    try:
        return check(content, path)
    except BadFile as error:  # the user wrote flags, not a file
        keys_and_faults = (fault.partition(": ") for fault in error.faults)
        flags = [f"--{key.replace('_', '-')}: {fault}" for key, _, fault in keys_and_faults]
        raise UsageError("; ".join(flags)) from None


def parse_variation(text: str) -> Variation:
    """Parse a variation such as `cluster.nodes=1,2,4`, `faults[0].factor=0.5,0.1`, `seed=1,2` or
    `on=dgx-h100:2,dgx-a100:2`.

    `--tp=1,2` varies a flag of the program.
    """
    path, equals, values = text.partition("=")
    if not equals or not path.strip() or not values.strip():
        raise UsageError(f"--vary {brief(text, 200)}: expected PATH=VALUE,VALUE, such as cluster.nodes=1,2,4")
    return Variation(path.strip(), tuple(toml_value(word.strip()) for word in values.split(",")))


def grid(values: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Return all combinations of one of each *values*, the last ones fastest.

    Raises:
        UsageError: They are too many.
    """
    size = math.prod(map(len, values))
    if size > MAX_POINTS:
        raise UsageError(f"--vary: {size:,} points, the most is {MAX_POINTS:,}; give fewer values, or fewer --vary")
    return list(itertools.product(*values))


def sweep(
    scenario: Scenario,
    variations: Sequence[Variation],
    pool: PointPool | None = None,
    picture: bool = False,
    kept: KeptPoints | None = None,
) -> Iterator[Point]:
    """Yield every combination, the last variation fastest.

    Args:
        scenario: What varies.
        variations: How.
        pool: Where the points run; None: here, one by one.
        picture: Whether documents have what a page draws.
        kept: Of a script: where points that have ended are kept. They come first, the others as they end; without
            *kept* all come in their order.

    Raises:
        UsageError: a setting does not fit.
    """
    scenarios, settings, wrong = [], [], []
    for values in grid([variation.values for variation in variations]):
        chosen = {v.path: value for v, value in zip(variations, values, strict=True)}
        try:
            scenarios.append(point_of(scenario, chosen))
        except UsageError as error:
            settings_text = ", ".join(f"{brief(path)}={brief(value)}" for path, value in chosen.items())
            wrong.append(f"{settings_text}: {error}")
        settings.append(chosen)
    if wrong:
        raise UsageError("\n".join(wrong))
    if kept is not None:
        for number, result in run_kept(scenario, one_by_one(settings), kept, pool, picture):
            yield Point(settings[number], result, number)
        return
    for number, (chosen, result) in enumerate(zip(settings, run_suite(scenarios, pool, picture=picture), strict=True)):
        yield Point(chosen, result, number)


def run_kept(
    scenario: Scenario,
    ask: Callable[[int], Sequence[tuple[Key, Mapping[str, Any]]]],
    kept: KeptPoints,
    pool: PointPool | None,
    picture: bool = False,
    last_step: int | None = None,
) -> Iterator[tuple[Key, Result]]:
    """Run the points of a script that *ask* returns, and yield each key with its result as they end.

    What is kept from before does not run again; what another command on the same folder runs is waited for.

    Args:
        scenario: What the points vary.
        ask: Returns up to so many further points: keys with settings; none at the end.
        kept: Where points are kept that have ended.
        pool: Where they run; None: here, one by one.
        picture: Whether documents have what a page draws.
        last_step: The training step after which a point ends; None: when its program does.
    """
    stage = ("with a picture" if picture else "") if last_step is None else f"{last_step} steps"
    scenarios: dict[Key, Scenario] = {}
    elsewhere: list[Key] = []

    def further(most: int) -> list[tuple[Key, Scenario | Result]] | None:
        following = {key: point_of(scenario, chosen) for key, chosen in ask(most)}
        scenarios.update(following)
        keys, points = [*elsewhere, *following], list[tuple[Key, Scenario | Result]]()
        elsewhere.clear()
        for key in keys:
            point = scenarios[key]
            if not kept.claim(point, stage):
                elsewhere.append(key)
            elif (result := kept.load(point, stage)) is None:
                points.append((key, point))
            else:
                kept.release(point, stage)
                points.append((key, result))
        return points if points or not elsewhere else None

    import_for([scenario])
    ran = as_they_end(pool, further, quiet=True, picture=picture, sampled=True, last_step=last_step)
    for key, result in ran:
        kept.save(scenarios[key], result, stage)
        yield key, result


def point_of(scenario: Scenario, chosen: Mapping[str, Any]) -> Scenario:
    """Return *scenario* with the settings *chosen*, checked."""
    return check(_changed(scenario, chosen), scenario.path)


def checked(variation: Variation, scenario: Scenario) -> Variation:
    """Return *variation*, whose path is checked; of the cluster only the number of nodes can vary.

    Raises:
        UsageError: The setting is not one of the cluster, or a script has no such key and may have a flag of this name.
    """
    path = variation.path
    head = re.split(r"[.\[]", path)[0]
    if path.startswith("-") or path in (*NODES, "on") or (head in ScenarioSpec.model_fields and head != "on"):
        return variation
    near = difflib.get_close_matches(path, NODES, 1)
    if not (near or path.startswith(("cluster", "on."))):
        if scenario.path.suffix == ".py":
            text = brief(f"{path}={','.join(map(str, variation.values))}", 200)
            raise UsageError(f"--vary {text}: expected a flag of the script; did you mean --vary --{text}?")
        return variation
    guess = f"; did you mean '{near[0]}'?" if near else ""
    raise UsageError(
        f"--vary {brief(path, 200)}: expected {NODES[0]}=1,2, or on=A,B for whole clusters, presets or files{guess}"
    )


def _changed(scenario: Scenario, chosen: Mapping[str, Any]) -> dict[str, Any]:
    data = copy.deepcopy(scenario.data)
    data["expect"] = {}  # a sweep asks what happens, it expects nothing
    for path, value in chosen.items():
        if path.startswith("-"):
            data["args"] = with_flag(data.get("args", ()), path, str(value))
        elif path in NODES:
            data["on"] = f"{scenario.spec.on.partition(':')[0]}:{value}"
        else:
            _set(data, path, value)
    return data


def _set(data: dict[str, Any], path: str, value: Any) -> None:
    parts = [p if (n := digits(p)) is None else n for p in re.split(r"[.\[\]]+", path) if p]
    node: Any = data
    for depth, part in enumerate(parts[:-1]):
        following = parts[depth + 1]
        try:
            node = node.setdefault(part, {}) if isinstance(node, dict) else node[part]
        except (IndexError, TypeError):
            raise UsageError(f"--vary {brief(path, 200)}: the scenario has no {brief(str(part))} there") from None
        if isinstance(following, int) != isinstance(node, list):
            raise UsageError(f"--vary {brief(path, 200)}: the scenario has no {brief(str(following))} there")
    try:
        node[parts[-1]] = str(value) if parts[0] in ("args", "env") else value
    except (IndexError, TypeError):
        raise UsageError(f"--vary {brief(path, 200)}: the scenario has no {brief(str(parts[-1]))} there") from None


def write_csv(points: Sequence[Point], path: Path) -> None:
    """Write all settings and figures, one point per line."""
    settings = list(points[0].settings)
    figures = list(dict.fromkeys(name for point in points for name in point.result.figures))
    with written("--csv", path), open_output(path) as file:
        writer = csv.writer(file)
        writer.writerow([*settings, "kind", "exit_code", *figures])
        for point in points:
            row = [point.settings[s] for s in settings]
            row_figures = [point.result.figures.get(f, "") for f in figures]
            writer.writerow([*row, point.result.verdict, point.result.exit_code, *row_figures])


def point_json(point: Point, **more: Any) -> dict[str, Any]:
    """Return a point as JSON data: `settings`, `verdict`, `figures`, and *more*."""
    return {"settings": point.settings, "verdict": point.result.verdict, "figures": point.result.figures} | more


def sweep_json(points: Sequence[Point], name: str) -> dict[str, Any]:
    """Return all settings and figures as JSON data (distsim.planning.schema.SweepReport)."""
    rows = [point_json(point, exit_code=point.result.exit_code, wrong=point.result.wrong) for point in points]
    return {"schema": "distsim.sweep/1", "scenario": name, "points": rows}
