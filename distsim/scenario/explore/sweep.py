"""Runs one scenario under every combination of some settings."""

from __future__ import annotations

import copy
import csv
import difflib
import itertools
import json
import logging
import math
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distsim.errors import UsageError
from distsim.scenario.expect.result import Result
from distsim.scenario.explore.points import KeptPoints, run_points
from distsim.scenario.file.load import BadFile, Scenario, check
from distsim.scenario.file.schema import ScenarioSpec
from distsim.scenario.suite import run_suite
from distsim.text.untrusted_input import brief, load_toml

__all__ = [
    "MAX_POINTS",
    "Point",
    "Variation",
    "parse_variation",
    "point_of",
    "script",
    "sweep",
    "write_csv",
    "write_json",
]

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
        return check(content, path.with_suffix(".toml"))
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
    return Variation(path.strip(), tuple(_value(word.strip()) for word in values.split(",")))


def _value(word: str) -> Any:
    """Return a number or boolean as TOML writes it, else text."""
    try:
        value = load_toml(f"x = {word}")["x"]
    except ValueError:
        return word
    return value if isinstance(value, int | float | bool | str) else word


def sweep(
    scenario: Scenario,
    variations: Sequence[Variation],
    workers: int = 1,
    ray: str | None = None,
    picture: bool = False,
    apart: bool = False,
    kept: KeptPoints | None = None,
) -> Iterator[Point]:
    """Yield every combination, the last variation fastest.

    Args:
        scenario: What varies.
        variations: How.
        workers: How many points run at a time.
        ray: Address of the Ray cluster that runs them; None: this machine.
        picture: Whether documents have what a page draws.
        apart: Whether this process may fork: then each point of a script has a process of its own.
        kept: Of a script: where points that have ended are kept. They come first, the others as they end; without
            *kept* all come in their order.

    Raises:
        UsageError: a setting does not fit.
    """
    for variation in variations:
        _check_path(variation.path)
    size = math.prod(len(v.values) for v in variations)
    if size > MAX_POINTS:
        raise UsageError(f"--vary: {size:,} points, the most is {MAX_POINTS:,}; give fewer values, or fewer --vary")
    combinations = list(itertools.product(*(v.values for v in variations)))
    scenarios, settings, wrong = [], [], []
    for values in combinations:
        chosen = {v.path: value for v, value in zip(variations, values, strict=True)}
        try:
            scenarios.append(point_of(scenario, chosen))
        except UsageError as error:
            settings_text = ", ".join(f"{brief(path)}={brief(value)}" for path, value in chosen.items())
            wrong.append(f"{settings_text}: {error}")
        settings.append(chosen)
    if wrong:
        raise UsageError("\n".join(wrong))
    if kept is not None and ray is None:
        yield from _resumed(scenarios, settings, workers, apart, picture, kept)
        return
    if ray is not None:
        results = _on_ray(scenarios, ray, picture)
    else:
        results = run_suite(scenarios, workers, picture=picture)
    for number, (chosen, result) in enumerate(zip(settings, results, strict=True)):
        yield Point(chosen, result, number)


def _resumed(
    scenarios: Sequence[Scenario],
    settings: Sequence[dict[str, Any]],
    workers: int,
    apart: bool,
    picture: bool,
    kept: KeptPoints,
) -> Iterator[Point]:
    left = []
    for number, chosen in enumerate(settings):
        result = kept.load(chosen)
        if result is None:
            left.append(number)
        else:
            yield Point(chosen, result, number)
    for index, result in run_points([scenarios[number] for number in left], workers, apart, picture):
        chosen = settings[left[index]]
        kept.save(chosen, result)
        yield Point(chosen, result, left[index])


def point_of(scenario: Scenario, chosen: Mapping[str, Any]) -> Scenario:
    """Return *scenario* with the settings *chosen*, checked."""
    return check(_changed(scenario, chosen), scenario.path)


def _check_path(path: str) -> None:
    """Check the path of a setting; of the cluster only the number of nodes can vary."""
    head = re.split(r"[.\[]", path)[0]
    if path.startswith("-"):
        return
    if path in (*NODES, "on") or (head in ScenarioSpec.model_fields and head != "on"):
        return
    near = difflib.get_close_matches(path, NODES, 1)
    if not (near or path.startswith(("cluster", "on."))):
        return
    guess = f"; did you mean '{near[0]}'?" if near else ""
    raise UsageError(
        f"--vary {brief(path, 200)}: expected {NODES[0]}=1,2, or on=A,B for whole clusters, presets or files{guess}"
    )


def _changed(scenario: Scenario, chosen: Mapping[str, Any]) -> dict[str, Any]:
    data = copy.deepcopy(scenario.data)
    data["expect"] = {}  # a sweep asks what happens, it expects nothing
    for path, value in chosen.items():
        if path.startswith("-"):
            data["args"] = [*_without_flag(data.get("args", ()), path), f"{path}={value}"]
        elif path in NODES:
            data["on"] = f"{scenario.spec.on.partition(':')[0]}:{value}"
        else:
            _set(data, path, value)
    return data


def _without_flag(arguments: Sequence[str], flag: str) -> list[str]:
    """Return *arguments* without *flag* and its value, which may be in the same word or in the next one."""
    left: list[str] = []
    words = iter(arguments)
    for word in words:
        if word == flag:
            next(words, None)
        elif not word.startswith(f"{flag}="):
            left.append(word)
    return left


def _set(data: dict[str, Any], path: str, value: Any) -> None:
    parts = [int(p) if p.isascii() and p.isdigit() and len(p) < 10 else p for p in re.split(r"[.\[\]]+", path) if p]
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


def _on_ray(scenarios: Sequence[Scenario], address: str, picture: bool) -> Iterator[Result]:
    """Run each point as a task of a Ray cluster (extra `[ray]`), whose machines have distsim and the scenario's folder
    at the same path."""
    try:
        import ray  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        raise UsageError("--ray: ray is not installed; pip install -e '.[ray]' in a clone of distsim") from None
    from distsim.scenario.suite import run_there

    ours = not ray.is_initialized()
    if ours:
        try:
            _knock(address)
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, ValueError, RuntimeError) as error:
            problem = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UsageError(
                f"--ray {address}: no Ray cluster there ({problem}); give host:port, auto for the one of this machine, "
                "or --ray alone to start one"
            ) from None
    task: Callable[..., Any] = ray.remote(run_there).remote
    try:
        jobs = [task(scenario.path.resolve(), scenario.data, False, picture) for scenario in scenarios]
        for scenario, job in zip(scenarios, jobs, strict=True):
            try:
                yield ray.get(job)
            except ray.exceptions.RayError as error:
                problem = str(error).strip().splitlines()[-1]
                raise UsageError(f"--ray {address}: {scenario.path} did not run there: {problem}") from None
    finally:
        if ours:
            ray.shutdown()


def _knock(address: str) -> None:
    """Raise at once if nothing listens at *host:port*, because Ray itself would try for minutes."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit() and "/" not in address:
        socket.create_connection((host, int(port)), timeout=10).close()


def write_csv(points: Sequence[Point], path: Path) -> None:
    """Write all settings and figures, one point per line."""
    settings = list(points[0].settings)
    figures = list(dict.fromkeys(name for point in points for name in point.result.figures))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*settings, "kind", "exit_code", *figures])
        for point in points:
            row = [point.settings[s] for s in settings]
            row_figures = [point.result.figures.get(f, "") for f in figures]
            writer.writerow([*row, point.result.verdict, point.result.exit_code, *row_figures])


def write_json(points: Sequence[Point], name: str, path: str) -> None:
    """Write all settings and figures as JSON.

    The keys are `schema` (distsim.sweep/1), `scenario`, and `points[]` with `settings`, `verdict`, `exit_code`,
    `wrong[]` and `figures`.
    """
    rows = [
        {
            "settings": point.settings,
            "verdict": point.result.verdict,
            "exit_code": point.result.exit_code,
            "wrong": point.result.wrong,
            "figures": point.result.figures,
        }
        for point in points
    ]
    document = {"schema": "distsim.sweep/1", "scenario": name, "points": rows}
    Path(path).write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8")
