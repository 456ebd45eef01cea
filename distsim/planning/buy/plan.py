"""Chooses the points that `distsim buy` runs.

For each kind of machine these are the fewest nodes that fit, then 2, 4 and 8 times those. Each kind is a generator that
yields settings to run and is sent their results, so that points of all kinds run side by side. Layouts are searched as
`distsim tune` does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from distsim.planning.command import Space
from distsim.planning.points import KeptPoints
from distsim.planning.search import FINAL_STEPS, FIRST_STEPS, Axis, Objective, Place, Search
from distsim.planning.tables import failure
from distsim.planning.variations import Point, run_kept
from distsim.scenario.pool import one_by_one

FACTORS = (1, 2, 4, 8)
"""Sizes that are compared, as multiples of the fewest nodes."""
MOST_LAYOUTS = 2
"""Layouts that are tried on twice the nodes: the best ones, beside those that did not fit."""
SCALES = 1.25
"""Least factor of tokens/s, for twice the nodes, at which larger sizes are still compared."""

Settings = dict[str, Any]
Ask = Generator[list[Settings], list[Point], Any]


@dataclass
class MachinePoints:
    """What ran on one kind of machine."""

    kind: str
    rows: list[Point] = field(default_factory=list)
    """The best layout on each number of nodes that is compared, the fewest nodes first."""
    failed: dict[int, Point] = field(default_factory=dict)
    """By number of nodes: a point of the least memory, where no layout ran."""
    scales_to: int | None = None
    """Nodes from which on twice as many are not worth it; None if all sizes scale."""


def fewest(least: int, most: int) -> Generator[int, bool, int | None]:
    """Find the smallest number that fits, by doubling and then bisection.

    Yields:
        A number to try; it is sent whether this number fits.

    Returns:
        The smallest number from *least* to *most* that fits, if every larger one does; None if none was found.
    """
    below, number = least - 1, least
    while not (yield number):
        if number == most:
            return None
        below, number = number, min(2 * number, most)
    while number - below > 1:
        middle = (below + number) // 2
        if (yield middle):
            number = middle
        else:
            below = middle
    return number


def plan_machine(kind: str, axes: Sequence[Axis], nodes: tuple[int, int]) -> Ask:
    """Yield the points of one kind of machine.

    Args:
        kind: The cluster without a number of nodes.
        axes: Settings of the layout.
        nodes: The fewest and the most nodes.

    Returns:
        The `MachinePoints`.
    """
    machine, searches = MachinePoints(kind), dict[int, Search]()
    sizes = fewest(*nodes)
    number = next(sizes)
    while True:
        search = searches[number] = Search(list(axes), Objective("tokens/s"))
        while not search.ranking() and (choices := search.next_points(1)):
            yield from _run(kind, {number: search}, {number: choices})
        try:
            number = sizes.send(bool(search.ranking()))
        except StopIteration as stop:
            first: int | None = stop.value
            break
    chosen = [] if first is None else [first * factor for factor in FACTORS if first * factor <= nodes[1]]
    smaller: Search | None = None
    worse: list[Place] = []
    for size in chosen:
        search = searches.setdefault(size, Search(list(axes), Objective("tokens/s")))
        if smaller is not None:
            worse += smaller.ranking()[MOST_LAYOUTS:]
            search.leave_out(worse)
        while choices := search.next_points(MOST_LAYOUTS):
            yield from _run(kind, searches, {size: choices})
        if smaller is not None and _rate(search) < SCALES * _rate(smaller):
            chosen = chosen[: chosen.index(size) + 1]
            break
        smaller = search
    for size, search in sorted(searches.items()):
        ranking = search.ranking()
        if size in chosen and ranking:
            machine.rows.append(_point(kind, size, search, ranking[0]))
        elif not ranking:
            peaks = {point: run.figures.get("peak_gpu_memory_bytes", 0.0) for point, run in search.results.items()}
            layout = min(peaks, key=lambda point: peaks[point])
            machine.failed[size] = _point(kind, size, search, layout)
    _cut(machine)
    return machine


def _run(kind: str, searches: Mapping[int, Search], requested: Mapping[int, list[Place]]) -> Ask:
    """Yield the *requested* layouts of each number of nodes, and add their results to *searches*."""
    wanted = [(size, layout) for size, choices in requested.items() for layout in choices]
    points = yield [{"on": f"{kind}:{size}"} | searches[size].settings(layout) for size, layout in wanted]
    for (size, layout), point in zip(wanted, points, strict=True):
        searches[size].add(layout, point.result)


def _rate(search: Search) -> float:
    """Return the tokens/s of the best layout; 0 if none fits."""
    ranking = search.ranking()
    return search.results[ranking[0]].figures.get("tokens_per_s", 0.0) if ranking else 0.0


def _point(kind: str, size: int, search: Search, layout: Place) -> Point:
    return Point({"on": f"{kind}:{size}"} | search.settings(layout), search.results[layout])


def _cut(machine: MachinePoints) -> None:
    """Note from which size on the sizes do not scale."""
    rates = [point.result.figures.get("tokens_per_s", 0.0) for point in machine.rows]
    for number, (before, after) in enumerate(pairwise(rates), 1):
        if after < SCALES * before:
            machine.scales_to = int(machine.rows[number - 1].settings["on"].rpartition(":")[2])
            return


def run_plans(
    space: Space, plans: Mapping[str, Ask], kept: KeptPoints, show: Callable[[Sequence[Point]], None]
) -> list[MachinePoints]:
    """Run the points that *plans* ask for until each has ended, and return what each returns.

    Args:
        space: The script.
        plans: A plan for each kind of machine.
        kept: Where points are kept.
        show: It is called with all points that have ended, after each one.
    """
    ended: list[Point] = []
    results: dict[str, MachinePoints] = {}
    batches: dict[str, list[Settings]] = {}
    points: dict[str, dict[int, Point]] = {}
    queue: deque[tuple[str, int]] = deque()

    def begin(kind: str, batch: list[Settings]) -> None:
        batches[kind], points[kind] = batch, {}
        queue.extend((kind, number) for number in range(len(batch)))

    def ask(most: int) -> list[tuple[tuple[str, int], Settings]]:
        keys = [queue.popleft() for _ in range(min(most, len(queue)))]
        return [((kind, number), batches[kind][number]) for kind, number in keys]

    for kind, plan in plans.items():
        begin(kind, next(plan))
    for (kind, number), result in run_kept(space.scenario, ask, kept, space.pool, last_step=FIRST_STEPS):
        settings = batches[kind][number]
        points[kind][number] = Point(settings, space.priced(settings, result))
        ended.append(points[kind][number])
        show(ended)
        if len(points[kind]) == len(batches[kind]):
            try:
                begin(kind, plans[kind].send([points[kind][index] for index in range(len(batches[kind]))]))
            except StopIteration as stop:
                results[kind] = stop.value
    return [results[kind] for kind in plans]


def run_finals(space: Space, points: Sequence[Point], kept: KeptPoints) -> None:
    """Run *points* for more steps, and replace their results."""
    settings = [point.settings for point in points]
    for number, result in run_kept(space.scenario, one_by_one(settings), kept, space.pool, last_step=FINAL_STEPS):
        final = space.priced(settings[number], result)
        if not failure(Point(settings[number], final)) and final.figures.get("step_s"):
            points[number].result = final
