"""Searches a grid of settings for the best one: best-first from the points known, invalid ones pruned.

Every point ends after few steps; the best ones run again for more. What runs out of memory rules out all points that
need at least as much. Nothing here simulates: a caller runs the points that `Search.next_points` asks for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from distsim.planning.points import Flag, role_of
from distsim.planning.variations import Variation, grid
from distsim.scenario.expect.result import Result
from distsim.text.units import format_bytes, format_time

FIRST_STEPS = 2
"""Steps of every point: the second is the first that finds the optimizer's state and the allocator's segments."""
FINAL_STEPS = 4
"""Steps of the best points."""
MOST_FINALISTS = 4
LEADERS = 3
"""Points near these are tried first."""
_LEVELS = {"none": 0, "off": 0, "no": 0, "false": 0, "0": 0, "selective": 1, "op": 1, "full": 2, "on": 2, "true": 2}
_GROWS = {"micro_batch": 1.0, "tensor_parallel": -1.0}
_LENGTHS = r"(max-)?seq(uence)?(-len(gth)?)?|layers|num-layers|hidden(-size)?"

Place = tuple[int, ...]
"""A point of the grid: the place of its value on each axis."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One setting that varies."""

    path: str
    values: tuple[Any, ...]
    memory: tuple[float, ...] | None = None
    """For each value a number that grows with the memory of a GPU; None if that is not known."""


def axis_of(variation: Variation) -> Axis:
    """Return the axis of *variation*, with the effect on memory that the flag's name suggests."""
    values = variation.values
    role = role_of(Flag(variation.path, None)) if variation.path.startswith("-") else None
    name = variation.path.lstrip("-").rpartition(".")[2].replace("_", "-")
    memory: tuple[float, ...] | None = None
    if role == "recomputation":
        levels = [_LEVELS.get(str(value).lower()) for value in values]
        memory = tuple(-float(level) for level in levels if level is not None)
    elif variation.path in ("on", "cluster.nodes", "on.nodes"):
        memory = _of_nodes(values)
    elif role in _GROWS or re.fullmatch(_LENGTHS, name):
        memory = tuple(_GROWS.get(role or "", 1.0) * v for v in values if isinstance(v, int | float))
    return Axis(variation.path, values, memory if memory is not None and len(memory) == len(values) else None)


def _of_nodes(values: Sequence[Any]) -> tuple[float, ...] | None:
    """Return the memory order of numbers of nodes: more nodes of one kind need no more memory per GPU."""
    parts = [str(value).rpartition(":") for value in values]
    if len({preset for preset, _, _ in parts}) > 1 or not all(nodes.isdigit() for _, _, nodes in parts):
        return None
    return tuple(-float(nodes) for _, _, nodes in parts)


def tokens_rate(result: Result) -> float:
    """Return tokens per second and GPU, or steps where tokens are not known; 0 if no step was completed."""
    figures = result.figures
    if not figures.get("fits") or result.exit_code or not figures.get("step_s"):
        return 0.0
    return figures.get("tokens_per_s", 1.0 / figures["step_s"]) / max(figures.get("gpus", 1.0), 1.0)


@dataclass(frozen=True, slots=True)
class Objective:
    """Quantity that a search optimizes."""

    name: str
    """tokens/s, cost or memory."""

    def score(self, result: Result) -> float:
        """Return a number that is larger for a better point; 0 for a point that reached no step or does not fit."""
        rate = 0.0 if not result.ran or result.limit else tokens_rate(result)
        if self.name == "memory" and rate:
            return 1.0 / max(result.figures["peak_gpu_memory_bytes"], 1.0)
        price = result.figures.get("price")
        return rate / price if self.name == "cost" and price else rate


@dataclass
class Search:
    """Decides which points of the space run next."""

    axes: list[Axis]
    objective: Objective
    results: dict[Place, Result] = field(default_factory=dict)
    """Results of the points that have run."""
    finals: dict[Place, Result] = field(default_factory=dict)
    """Results of the points that ran for `FINAL_STEPS` steps."""
    _left: list[Place] = field(default_factory=list)
    _under_way: set[Place] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._left = grid([range(len(axis.values)) for axis in self.axes])

    def settings(self, point: Place) -> dict[str, Any]:
        """Return the values at *point* by their paths."""
        return {axis.path: axis.values[i] for axis, i in zip(self.axes, point, strict=True)}

    def add(self, point: Place, result: Result) -> None:
        """Add the result of a point."""
        self._under_way.discard(point)
        self.results[point] = result

    def leave_out(self, points: Sequence[Place]) -> None:
        """Do not try *points*."""
        self._left = [point for point in self._left if point not in points]

    @property
    def ruled_out(self) -> list[Place]:
        """Return points that were not run since others that need no more memory ran out of it."""
        return [point for point in self._left if point not in self.results and self._needs_too_much(point)]

    @property
    def untried(self) -> list[Place]:
        """Return the points that have not run."""
        return [point for point in self._left if point not in self.results and not self._needs_too_much(point)]

    def _needs_too_much(self, point: Place) -> bool:
        full = [other for other, result in self.results.items() if result.figures.get("fits") == 0.0]
        return any(self._needs_as_much(point, other) for other in full)

    def _needs_as_much(self, point: Place, other: Place) -> bool:
        """Return whether *point* needs at least the memory of *other*, as far as the axes tell."""
        for axis, mine, its in zip(self.axes, point, other, strict=True):
            if mine != its and (axis.memory is None or axis.memory[mine] < axis.memory[its]):
                return False
        return True

    def ranking(self) -> list[Place]:
        """Return the points that fit, the best first. If a point has also run with more steps, that result counts."""
        scores = {point: self.objective.score(self.finals.get(point, result)) for point, result in self.results.items()}
        return sorted((point for point, score in scores.items() if score), key=lambda point: (-scores[point], point))

    def next_points(self, most: int) -> list[Place]:
        """Return up to *most* points: those nearest to the best ones, or those of least memory if none fits yet.

        They are under way until they are added, and not returned again.
        """
        leaders = self.ranking()[:LEADERS]
        left = [point for point in self.untried if point not in self._under_way]
        if leaders:
            key = {point: self._distance(point, leaders) for point in left}
        else:
            key = {point: self._memory(point) for point in left}
        following = sorted(left, key=lambda point: (key[point], point))[:most]
        self._under_way.update(following)
        return following

    def _distance(self, point: Place, leaders: Sequence[Place]) -> float:
        return min(
            rank + sum(abs(mine - its) for mine, its in zip(point, leader, strict=True))
            for rank, leader in enumerate(leaders)
        )

    def _memory(self, point: Place) -> float:
        """Return the position of *point* on the axes that affect memory."""
        return sum(
            sorted(axis.memory).index(axis.memory[i]) if axis.memory is not None else 0.0
            for axis, i in zip(self.axes, point, strict=True)
        )

    def finalists(self) -> list[Place]:
        """Return the points to run with more steps: a quarter of those that fit, but at least two."""
        fitting = self.ranking()
        return fitting[: max(2, min(MOST_FINALISTS, math.ceil(len(fitting) / 4)))]


LEAST = 0.01
"""Smallest share of a step that is worth mentioning."""
ATTENTION = 0.05
"""Share of all flops below which extra computation is attributed to attention's backward, which recomputes its scores.
"""
PARTS = {
    "compute": "step_compute_s",
    "exposed communication": "step_exposed_s",
    "bubble": "step_bubble_s",
    "host-bound": "step_host_s",
}


def spent(result: Result) -> str:
    """Describe how the time of a step is spent: `81% compute, 12% exposed communication (all_gather of dp 8%), 7%
    host-bound`.
    """
    figures, step_s = result.figures, result.figures["step_s"]
    parts = []
    for name, figure in PARTS.items():
        share = figures.get(figure, 0.0) / step_s
        if share < LEAST:
            continue
        text = f"{share:.0%} {name}"
        if name == "exposed communication" and (waits := _waits(result, step_s)):
            text += f" ({waits})"
        parts.append(text)
    recomputed = 1.0 - figures.get("mfu", 0.0) / (figures.get("hfu") or 1.0) if "mfu" in figures else 0.0
    if recomputed > ATTENTION:
        parts.append(f"{recomputed:.0%} of its flops are recomputed")
    return f"a step of {format_time(step_s)}: {', '.join(parts)}"


def _waits(result: Result, step_s: float) -> str:
    training = result.document.get("training", {})
    pacing = [rank for rank in training.get("ranks", ()) if rank["rank"] == training.get("pacing_rank")]
    waits: list[dict[str, Any]] = pacing[0]["waits"] if pacing else []
    shares = [((wait["moving_s"] + wait["late_s"]) / step_s, wait) for wait in waits]
    shares_text = [f"{wait['op']} of {wait['group']} {share:.0%}" for share, wait in shares[:2] if share >= LEAST]
    return ", ".join(shares_text)


def difference(best: Result, other: Result, objective: str) -> str:
    """Return by how much *other* is worse than *best*, and which parts of its step cause that."""
    if objective == "memory":
        more = other.figures["peak_gpu_memory_bytes"] - best.figures["peak_gpu_memory_bytes"]
        return f"{format_bytes(int(more))} more at the peak"
    best_s, other_s = 1.0 / tokens_rate(best), 1.0 / tokens_rate(other)  # of one GPU, for a token
    slower = other_s / best_s - 1.0
    grown = []
    for name, figure in PARTS.items():
        mine = best.figures.get(figure, 0.0) / best.figures["step_s"] * best_s
        its = other.figures.get(figure, 0.0) / other.figures["step_s"] * other_s
        share = (its - mine) / best_s
        if abs(share) >= LEAST / 2:
            word = "more" if share > 0 else "less"
            waits = _waits(other, other.figures["step_s"]) if name == "exposed communication" and share > 0 else ""
            grown.append(
                (-abs(share), f"{abs(share):.1%} {word} {name}" + (f" ({waits} of its step)" if waits else ""))
            )
    parts = ", ".join(text for _, text in sorted(grown))
    return f"takes {slower:.1%} longer for a token" + (f": {parts}" if parts else "")
