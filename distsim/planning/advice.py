"""Finds changes that make a training program fit into GPU memory.

Nothing is advised that was not simulated. A single change comes first, the cheapest one; then a combination of the
strongest changes, without those that turn out not to be needed. The fewest nodes, and the largest micro-batch and
sequence, are found by interpolation: memory is about a + b / nodes, and about a + b * batch.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from distsim.cluster import load_cluster
from distsim.cluster.files.load import kind_of
from distsim.errors import RankFailure, UsageError
from distsim.planning.memory import STEPS, Fit, MemoryNeed, NothingOnGpu, measure
from distsim.planning.points import Flag, role_of, script_flags, with_flag
from distsim.scenario.apart import run_forked
from distsim.scenario.pool import PointPool
from distsim.sim import RunRequest
from distsim.sim.faults.fault import Rule
from distsim.text.untrusted_input import digits

MOST_NODES = 64
"""Most nodes that are searched where the user gave no range."""
MOST_SINGLE = 5
"""Largest number of single changes that are tried."""
MOST_STEPS = 12
"""Largest number of runs of one search by interpolation."""
MOST_DEGREE = 8
"""Largest degree of parallelism that is tried."""
MOST_FACTOR = 64
"""Largest multiple of the given micro-batch or sequence that is searched."""
LEAST_GAIN = 0.005
"""Share of the memory that twice the nodes must save; else no number of nodes helps."""

Pairs = tuple[tuple[str, str | None], ...]
"""Flags with their new values; None: the flag takes no value."""


@dataclass(slots=True, eq=False)
class LayoutChange:
    """A change of the command that might make it fit."""

    text: str
    """The change as typed on a command line: `--mbs=2 --accum=4`, `--on dgx-h100:2`."""
    fit: MemoryNeed | None = None
    """Memory that the changed program needs; None if it did not run to its second step."""
    problem: str = ""
    """Why it did not."""

    @property
    def fits(self) -> bool:
        """Return whether it ran, and its memory was enough."""
        return self.fit is not None and self.fit.fits


@dataclass(slots=True)
class Advice:
    """What was found to help."""

    tried: list[LayoutChange]
    """Changes of flags, in the order in which they were tried."""
    change: LayoutChange | None = None
    """The change, or the least combination of changes, that fits on the same nodes."""
    nodes: dict[int, LayoutChange] = field(default_factory=dict)
    """By number of nodes: the unchanged program."""
    fewest: int | None = None
    """The fewest nodes on which it fits; None: none was found."""
    largest: dict[str, int | None] = field(default_factory=dict)
    """By flag: the largest micro-batch or sequence that fits, all else as given; None: not even the smallest."""


class Trials:
    """Runs changed programs, each of them once.

    Args:
        request: The program as given.
        fit: Its memory.
        say: It is called with the change before each run.
        pool: Where they run, each in a process of its own; None: here, one by one.
    """

    def __init__(
        self, request: RunRequest, fit: Fit, say: Callable[[str], None], pool: PointPool | None = None
    ) -> None:
        self.request, self.fit, self._say, self._pool = request, fit, say, pool
        given = Future[LayoutChange]()
        given.set_result(LayoutChange("", fit.need))
        self._begun = {(str(request.on), *request.args): given}
        self._beginning = threading.Lock()

    def run(self, request: RunRequest, text: str) -> LayoutChange:
        """Return the outcome of *request*, which *text* describes."""
        key, mine = (str(request.on), *request.args), Future[LayoutChange]()
        with self._beginning:
            run = self._begun.setdefault(key, mine)
        if run is mine:
            self._say(text)
            run.set_result(LayoutChange(text, *self._measured(request)))
        return run.result()

    def _measured(self, request: RunRequest) -> tuple[MemoryNeed | None, str]:
        trial = (request, min(STEPS, self.fit.training.steps))
        return _trial(trial) if self._pool is None else next(self._pool.map(_trial_apart, [trial]))

    def side_by_side(self, searches: Sequence[Callable[[], Any]]) -> list[Any]:
        """Return what *searches* return. None needs what another one finds."""
        if self._pool is None:
            return [search() for search in searches]
        with ThreadPoolExecutor(len(searches)) as threads:
            return [future.result() for future in [threads.submit(search) for search in searches]]

    def change(self, pairs: Pairs) -> LayoutChange:
        """Return the outcome with other values of flags."""
        arguments = list(self.request.args)
        for name, value in pairs:
            arguments = with_flag(arguments, name, value)
        text = " ".join(name if value is None else f"{name}={value}" for name, value in pairs)
        return self.run(replace(self.request, args=arguments), text)

    def on_nodes(self, nodes: int) -> LayoutChange:
        """Return the outcome on another number of nodes."""
        on = f"{kind_of(str(self.request.on))}:{nodes}"
        return self.run(on_cluster(self.request, on), f"--on {on}")


def on_cluster(request: RunRequest, on: str) -> RunRequest:
    """Return *request* on the cluster *on*, with the faults of what it has: a fault on node 3 does not strike two
    nodes."""
    conditions = request.conditions
    if conditions is not None:
        conditions = replace(conditions, rules=[rule for rule in conditions.rules if _can_strike(rule, request, on)])
    return replace(request, on=on, nnodes=None, conditions=conditions)


def _can_strike(rule: Rule, request: RunRequest, on: str) -> bool:
    try:
        cluster = load_cluster(on)
        rule.check(cluster, len(cluster.place(None, request.nproc_per_node)))
    except UsageError:
        return False
    return True


def advise(
    request: RunRequest,
    fit: Fit,
    known: dict[int, LayoutChange],
    bounds: tuple[int, int] | None,
    say: Callable[[str], None],
    pool: PointPool | None = None,
) -> Advice:
    """Find what makes a program fit, and how much of it fits.

    Args:
        request: The program as given.
        fit: Its memory.
        known: The same program by number of nodes.
        bounds: The fewest and the most nodes that are searched; None: up to those of *request* if it fits there.
        say: It is called with each change before its run.
        pool: Where changed programs run; None: here, one by one.
    """
    trials, advice = Trials(request, fit, say, pool), Advice([], nodes=known)
    flags = _flags_by_role(request)
    most = max(known) if fit.fits else max(MOST_NODES, 2 * max(known))

    def change() -> LayoutChange | None:
        return None if fit.fits else _single(trials, flags, advice.tried) or _combination(trials, flags, advice.tried)

    def fewest() -> int | None:
        return fewest_nodes(trials, known, bounds or (1, most))

    def largest() -> dict[str, int | None]:
        return _largest_sizes(trials, flags)

    advice.change, advice.fewest, advice.largest = trials.side_by_side([change, fewest, largest])
    return advice


def _largest_sizes(trials: Trials, flags: Mapping[str, Flag]) -> dict[str, int | None]:
    """Return the largest micro-batch and sequence that fit, each alone, by flag."""
    training, batch = trials.fit.training, trials.fit.training.micro_batch
    sizes: list[tuple[Flag, int, int]] = []
    if (flag := flags.get("micro_batch")) is not None and (batch := _value(trials, flag, batch)):
        sizes.append((flag, batch, 1))
    length = training.micro_batch * training.sequence_length // max(batch, 1)
    if (flag := flags.get("sequence")) is not None and (length := _value(trials, flag, length)):
        unit = 1 << max(0, length.bit_length() - 4)
        if length % unit == 0:
            sizes.append((flag, length, unit))
    values = trials.side_by_side([partial(_largest, trials, *size) for size in sizes]) if sizes else []
    return {flag.name: value for (flag, *_), value in zip(sizes, values, strict=True)}


def _value(trials: Trials, flag: Flag, seen: int) -> int:
    """Return the value of a flag: as given, or the one *seen* in the run if it needs the same memory; 0 if unknown.

    What a rank looks up may be a part of a sequence (context parallelism), or have its sequences in the second
    dimension.
    """
    if (given := digits(flag.value or "")) or not seen:
        return given or 0
    same = trials.change(((flag.name, str(seen)),)).fit
    peak = trials.fit.fullest.peak_allocated_bytes
    if same is None or abs(same.allocated - peak) > LEAST_GAIN * peak:
        return 0
    return seen


def _flags_by_role(request: RunRequest) -> dict[str, Flag]:
    flags: dict[str, Flag] = {}
    for flag in script_flags(Path(request.program), request.args) if not request.module else ():
        if (role := role_of(flag)) is not None:
            flags.setdefault(role, flag)
    return flags


def _trial(trial: tuple[RunRequest, int]) -> tuple[MemoryNeed | None, str]:
    """Run a program for at least some steps; return what it needs, or why it did not run so far."""
    request, least_steps = trial
    try:
        fit = measure(request, with_lines=False)
    except NothingOnGpu as error:
        return None, str(RankFailure(error.outcome.failures)) or error.last_line
    except UsageError as error:
        return None, str(error)
    if failures := fit.outcome.failures:
        return None, str(RankFailure(failures))
    return (None, "it made no step") if fit.training.steps < least_steps else (fit.need, "")


def _trial_apart(trial: tuple[RunRequest, int]) -> tuple[MemoryNeed | None, str]:
    """Do the same in a fork."""
    ended = run_forked(partial(_trial, trial), quiet=True)
    if ended.value is not None:
        outcome: tuple[MemoryNeed | None, str] = ended.value
        return outcome
    return None, f"its process ended with {ended.signal_name or f'exit code {ended.code}'}"


def _single(trials: Trials, flags: Mapping[str, Flag], tried: list[LayoutChange]) -> LayoutChange | None:
    """Try single changes that may save enough, the weakest of each kind first, until one fits."""
    fit = trials.fit
    held, missing = fit.fullest.memory, max(fit.fullest.peak_allocated_bytes - fit.capacity, 0)
    activations = held.get("activations", 0)
    states = held.get("parameters", 0) + held.get("gradients", 0) + held.get("optimizer", 0)
    for role, alternatives in _alternatives(trials, flags):
        saved = activations if role in ("micro_batch", "recomputation") else activations + states
        for share, pairs in reversed(alternatives):
            if len(tried) == MOST_SINGLE:
                return None
            if saved * (1.0 - share) <= missing:
                continue
            tried.append(trials.change(pairs))
            if tried[-1].fits:
                return tried[-1]
    return None


def _combination(trials: Trials, flags: Mapping[str, Flag], tried: list[LayoutChange]) -> LayoutChange | None:
    """Add the strongest change of each kind until they fit together, then leave out what is not needed."""
    parts: list[Pairs] = []
    needed, result = trials.fit.needed, None
    for _, alternatives in _alternatives(trials, flags):
        for _, pairs in alternatives:
            change = trials.change(sum([*parts, pairs], ()))
            if change not in tried:
                tried.append(change)
            if change.fit is None:  # the program refuses it: a weaker one may be possible
                continue
            if change.fits or change.fit.needed < needed:
                parts.append(pairs)
                needed, result = change.fit.needed, change
            break
        if result is not None and result.fits:
            break
    if result is None or not result.fits:
        return None
    for part in list(parts[:-1]):
        change = trials.change(sum((other for other in parts if other is not part), ()))
        if change not in tried:
            tried.append(change)
        if change.fits:
            parts, result = [other for other in parts if other is not part], change
    return result


def _alternatives(trials: Trials, flags: Mapping[str, Flag]) -> Iterator[tuple[str, list[tuple[float, Pairs]]]]:
    """Yield kinds of changes for which the script has a flag, those that cost least speed first.

    Each has its alternatives, the strongest first, with the share of the memory that is left at best. What the script
    does already is not among them.
    """
    fit = trials.fit
    if (flag := flags.get("micro_batch")) is not None:
        size = digits(flag.value or "") or fit.training.micro_batch or 1
        yield (
            "micro_batch",
            [
                (1.0 / factor, _smaller_batch(flag, flags.get("accumulation"), size, factor))
                for factor in range(size, 1, -1)
                if size % factor == 0 and (factor == size or factor & (factor - 1) == 0)
            ],
        )
    for role, off in (("sharding", ()), ("recomputation", ("none", "off", "no"))):
        if (flag := flags.get(role)) is not None:
            yield role, [(0.0, ((flag.name, value),)) for value in _stronger(flag, off)]
    for role in ("expert_parallel", "tensor_parallel", "pipeline", "context_parallel"):
        flag = flags.get(role)
        if flag is not None and (degree := digits(flag.value or "1")):
            most = min(MOST_DEGREE, fit.training.num_gpus)
            degrees = [degree << power for power in range(3, 0, -1) if degree << power <= most]
            yield role, [(degree / larger, ((flag.name, str(larger)),)) for larger in degrees]


def _smaller_batch(flag: Flag, accumulation: Flag | None, size: int, factor: int) -> Pairs:
    pairs: Pairs = ((flag.name, str(size // factor)),)
    if accumulation is None or (steps := digits(accumulation.value or "")) is None:
        return pairs
    return (*pairs, (accumulation.name, str(factor * steps)))


def _stronger(flag: Flag, off: Sequence[str]) -> list[str | None]:
    """Return the choices after the present one, the last one first; a script lists them from the weakest on."""
    if flag.is_switch:
        return [] if flag.value == "True" else [None]
    now = flag.choices.index(flag.value) if flag.value in flag.choices else -1
    later = [choice for choice in flag.choices[now + 1 :] if choice not in off]
    return list(reversed(later))


def fewest_nodes(trials: Trials, known: dict[int, LayoutChange], nodes: tuple[int, int]) -> int | None:
    """Return the fewest nodes on which the unchanged program fits, from those of *nodes*; None if none is enough.

    Args:
        trials: What runs it.
        known: Outcomes by number of nodes; those of this search are added.
        nodes: The fewest and the most nodes.
    """
    return _least(known, trials.on_nodes, lambda number: 1.0 / number, lambda left: math.ceil(1.0 / left), nodes)


def _largest(trials: Trials, flag: Flag, now: int, unit: int) -> int | None:
    """Return the largest value of a flag that fits, all else as given.

    Args:
        trials: What runs it.
        flag: A flag in which the memory is linear.
        now: Its value.
        unit: Its values are multiples of this number, which divides *now*.
    """

    def run(number: int) -> LayoutChange:
        return trials.change(((flag.name, str(-number * unit)),))

    known, most = {-(now // unit): LayoutChange("", trials.fit.need)}, MOST_FACTOR * now // unit
    number = _least(known, run, lambda number: -float(number), lambda left: -math.floor(left), (-most, -1))
    return None if number is None else -number * unit


def _least(
    tried: dict[int, LayoutChange],
    run: Callable[[int], LayoutChange],
    basis: Callable[[int], float],
    number_of: Callable[[float], int],
    bounds: tuple[int, int],
) -> int | None:
    """Return the least number that fits, if every larger one does, by interpolation.

    Args:
        tried: Outcomes by number; those of this search are added.
        run: Runs one number.
        basis: The function of the number in which the memory is linear.
        number_of: The least number whose basis is at most a given positive one.
        bounds: The least and the largest number.
    """
    for _ in range(MOST_STEPS):
        bad = max((number for number, change in tried.items() if not change.fits), default=bounds[0] - 1)
        good = min((number for number, change in tried.items() if change.fits and number > bad), default=None)
        if good is not None and good - bad == 1:
            return good
        if good is None and bad >= bounds[1]:
            return None
        guess, helps = _interpolated(tried, basis, number_of, bounds[1])
        if not helps and good is None:
            return None
        low, high = bad + 1, bounds[1] if good is None else good - 1
        if guess is None:
            guess = (2 * bad if bad > 0 else bad // 2) if good is None else 2 * good if good < 0 else good // 2
        number = min(max(guess, low), high)
        tried[number] = run(number)
    return min((number for number, change in tried.items() if change.fits), default=None)


def _interpolated(
    tried: Mapping[int, LayoutChange], basis: Callable[[int], float], number_of: Callable[[float], int], most: int
) -> tuple[int | None, bool]:
    """Return the number at which the memory is predicted to be enough (None: unknown; *most*: none is predicted), and
    whether larger ones help.
    """
    points = [
        (basis(number), float(change.fit.allocated), float(change.fit.capacity))
        for number, change in tried.items()
        if change.fit is not None
    ]
    points.sort(key=lambda point: abs(point[1] - point[2]))
    if len(points) < 2:
        return None, True
    (x1, y1, capacity), (x2, y2, _) = points[:2]
    slope = (y1 - y2) / (x1 - x2)
    if slope * max(x1, x2) / 2 < LEAST_GAIN * capacity:
        return None, False
    left = x1 + (capacity - y1) / slope
    return (number_of(left) if left > 0 else most), True
