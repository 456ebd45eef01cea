"""Compares two runs of one program tensor by tensor, and finds the first tensor that differs.

*sharded* is the run whose ranks hold parts, *whole* the one without model parallelism. Parameters and their gradients
decide: a module may compute anything as long as every parameter is trained equally. Outputs and their gradients show
where a difference begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distsim.errors import UsageError
from distsim.scenario.equal.record import RecordedRun, RecordedTensor, TensorKey
from distsim.scenario.equal.relation import How, TensorRelation, distance, joined, relation

__all__ = ["Comparison", "Deviation", "compare", "starts", "teams"]

LEAST = 1e-5
"""Distance below which tensors are equal; healthy layouts differed by at most 3.8e-7 (silent.md, section 5)."""
TIMES = 30.0
"""Tolerance, as a multiple of the change that a rounding of the parameters causes."""
AT_START = 1e-6
"""Distance up to which parameters are one before the first step."""
PHASES = ("output", "output_gradient", "gradient", "parameter")
DECIDE = ("gradient", "parameter")
HEALTHY = (How.EQUAL, How.JOINED)

Array = NDArray[Any]


@dataclass(frozen=True)
class Deviation:
    """One tensor of the sharded run that does not make the whole run's."""

    key: TensorKey
    ranks: tuple[int, ...]
    relation: TensorRelation
    threshold: float
    site: str
    module: str = ""
    """Class of the module."""
    on_residual: bool = False
    """An output that is the whole one once the ranks' parts on top of an equal tensor are added up."""


@dataclass
class Comparison:
    """Comparison of two runs."""

    compared: dict[str, int] = field(default_factory=dict)
    """Tensors of each kind."""
    steps: int = 0
    farthest: float = 0.0
    """The largest distance between equal tensors."""
    deciding: list[Deviation] = field(default_factory=list)
    """Gradients and parameters that differ, of the first step that has any."""
    first: Deviation | None = None
    """The tensor at which the difference begins."""
    partial: Deviation | None = None
    """The last output before `first` of which each rank had a part of the sum."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Parameters that were not compared, and why."""
    replaced: list[str] = field(default_factory=list)
    """Parameters to which the second layout was given the first one's values."""

    @property
    def differs(self) -> bool:
        """Return whether a parameter is trained differently."""
        return bool(self.deciding)


def teams(sharded: RecordedRun, whole: RecordedRun) -> dict[int, list[int]]:
    """The ranks of *sharded* that share the work of each rank of *whole*: they read the same input."""
    if len(whole.ranks) == 1:
        return {next(iter(whole.ranks)): sorted(sharded.ranks)}
    size, rest = divmod(len(sharded.ranks), len(whole.ranks))
    inputs = {rank: _inputs(entries) for rank, entries in whole.ranks.items()}
    alike = all(_same(inputs[rank], other) for rank in inputs for other in inputs.values())
    if alike and not rest:
        ranks = sorted(sharded.ranks)
        return {rank: ranks[at * size : (at + 1) * size] for at, rank in enumerate(sorted(whole.ranks))}
    result: dict[int, list[int]] = {rank: [] for rank in sorted(whole.ranks)}
    for rank, entries in sorted(sharded.ranks.items()):
        mine = _inputs(entries)
        match = next((other for other, other_inputs in inputs.items() if _same(mine, other_inputs)), None)
        if match is None:
            raise UsageError(
                f"rank {rank} of the first layout reads what no rank of the second one does: give the second layout as "
                "many ranks as the first has data-parallel replicas (--and-nproc-per-node), and the same seeds"
            )
        result[match].append(rank)
    return result


def starts(
    sharded: RecordedRun, whole: RecordedRun, ranks_of: Mapping[int, Sequence[int]]
) -> dict[int, dict[str, Array]]:
    """Return the parameters of each rank of *whole* that must begin with the values of *sharded*."""
    needed: dict[int, dict[str, Array]] = {}
    for rank, entries in whole.ranks.items():
        needed[rank] = {}
        for key, entry in entries.items():
            if key.kind != "start":
                continue
            parts = [sharded.ranks[other][key].load() for other in ranks_of[rank] if key in sharded.ranks[other]]
            target = entry.load()
            if not parts or relation(target, parts, AT_START).how in HEALTHY:
                continue
            if all(part.shape == target.shape for part in parts):
                if all(np.array_equal(part, parts[0]) for part in parts):
                    needed[rank][key.name] = parts[0]
                continue
            axis = joined([part.shape for part in parts], target.shape)
            if axis is not None:
                needed[rank][key.name] = np.concatenate(parts, axis)
    return needed


def compare(sharded: RecordedRun, whole: RecordedRun, perturbed: RecordedRun) -> Comparison:
    """Compare *sharded* with *whole*; *perturbed* is *whole* run again from parameters changed by one rounding."""
    result = Comparison()
    deviations: list[Deviation] = []
    for rank, ranks in teams(sharded, whole).items():
        team = _Team(sharded, whole.ranks[rank], perturbed.ranks.get(rank, {}), ranks)
        result.left_out |= team.left_out
        deviations += team.compare(result)
    decisive = [one for one in deviations if one.key.kind in DECIDE]
    if decisive:
        step = min(one.key.step for one in decisive)
        result.deciding = [one for one in decisive if one.key.step == step]
        _begin(result, [one for one in deviations if one.key.step <= step])
    return result


def _begin(comparison: Comparison, deviations: list[Deviation]) -> None:
    """Say where the difference begins."""
    for one in sorted(deviations, key=lambda one: (one.key.step, PHASES.index(one.key.kind))):
        inner = one.key.kind not in DECIDE
        if inner and one.relation.how is How.SUM and not one.on_residual:
            if one.key.kind == "output":
                comparison.partial = one
        elif not inner or one.relation.how is not How.MULTIPLE:
            # gradients of outputs may be scaled in a layout that scales those of the parameters back
            comparison.first = one
            return


class _Team:
    """Ranks of the sharded run, and the rank of the whole run whose work they share."""

    def __init__(
        self,
        sharded: RecordedRun,
        whole: Mapping[TensorKey, RecordedTensor],
        perturbed: Mapping[TensorKey, RecordedTensor],
        ranks: Sequence[int],
    ) -> None:
        self.sharded, self.whole, self.perturbed = sharded, whole, perturbed
        self.left_out: dict[str, str] = {}
        self.ranks = self._models(ranks)
        self.parameters = set(self._parameters())
        self._equals: list[Array] = []
        """Outputs of this step that all ranks have whole."""

    def compare(self, comparison: Comparison) -> Iterator[Deviation]:
        """Every tensor in the order of the program; yields those that differ."""
        step = -1
        for key in self._order():
            if key.step != step:
                step, self._equals = key.step, self._first_inputs(key.step)
            ranks = [rank for rank in self.ranks if key in self.sharded.ranks[rank]]
            entry = self.whole[key]
            target = entry.load()
            threshold = self._threshold(key, target)
            parts = [self.sharded.ranks[rank][key].load() for rank in ranks]
            how = relation(target, parts, threshold)
            comparison.compared[key.kind] = comparison.compared.get(key.kind, 0) + 1
            comparison.steps = max(comparison.steps, key.step + 1)
            if how.how in HEALTHY:
                comparison.farthest = max(comparison.farthest, how.distance)
                if how.how is How.EQUAL and key.kind == "output":
                    self._equals.append(target)
                continue
            on_residual = (
                key.kind == "output" and how.how is How.NONE and self._is_on_residual(target, parts, threshold)
            )
            site = self.sharded.ranks[ranks[0]][key].site
            yield Deviation(
                key, tuple(ranks), how, threshold, site, self.sharded.classes.get(key.name, ""), on_residual
            )

    def _threshold(self, key: TensorKey, target: Array) -> float:
        moved = self.perturbed.get(key)
        return LEAST if moved is None else max(LEAST, TIMES * min(1.0, distance(target, moved.load())))

    def _order(self) -> Iterator[TensorKey]:
        """Return what both runs recorded, in the order of the sharded run's ranks."""
        seen: dict[TensorKey, None] = {}
        for rank in self.ranks:
            seen |= dict.fromkeys(self.sharded.ranks[rank])
        known = [key for key in seen if key in self.whole and (key.kind not in DECIDE or key.name in self.parameters)]
        return iter(sorted((k for k in known if k.kind in PHASES), key=lambda k: (k.step, PHASES.index(k.kind))))

    def _first_inputs(self, step: int) -> list[Array]:
        return [entry.load() for key, entry in self.whole.items() if key.kind == "input" and key.step == step]

    def _is_on_residual(self, target: Array, parts: list[Array], threshold: float) -> bool:
        """Return whether each of *parts* is one common tensor plus a part of a sum, and *target* is that tensor plus
        the sum.
        """
        if len(parts) < 2 or any(part.shape != target.shape for part in parts):
            return False
        total = np.sum([part.astype(np.float64) for part in parts], axis=0)
        return any(
            distance(target, total - (len(parts) - 1) * equal) <= threshold
            for equal in self._equals
            if equal.shape == target.shape
        )

    def _models(self, ranks: Sequence[int]) -> list[int]:
        """*ranks*, whose models begin with the whole model's input, or are stages behind it with names of their own."""
        whole = _inputs(self.whole)
        mine = {rank: _inputs(self.sharded.ranks[rank]) for rank in ranks}
        parts = {rank: value for rank, value in mine.items() if value}
        if whole and parts and _makes(whole, list(parts.values())):
            return list(ranks)
        first = [rank for rank in ranks if _same(mine[rank], whole)]
        if not first:
            raise UsageError(
                "the two layouts do not read the same input: seed the program, and keep the data-parallel size "
                "(--and-nproc-per-node), or there is nothing to compare"
            )
        names = {key.name for rank in first for key in self.sharded.ranks[rank] if key.kind == "start"}
        for rank in ranks:
            own = (key.name for key in self.sharded.ranks[rank] if key.kind == "start")
            if rank not in first and not names.isdisjoint(own):
                raise UsageError(
                    f"the model of rank {rank} begins with another input than the second layout's and has rank "
                    f"{first[0]}'s names: if they are data-parallel replicas, give the second layout as many ranks as "
                    "there are replicas (--and-nproc-per-node N); if they are stages of a pipeline, say what its "
                    f'modules are (--map "{rank}:layers.0=layers.4")'
                )
        return list(ranks)

    def _parameters(self) -> Iterator[str]:
        """Return the names of parameters that match in both runs before the first step."""
        known: dict[str, bool] = {}
        constant: dict[str, bool] = {}
        for key, entry in self.whole.items():
            if key.kind != "start":
                continue
            ranks = [rank for rank in self.ranks if key in self.sharded.ranks[rank]]
            if not ranks:
                self.left_out[key.name] = "no rank of the first layout has a parameter of this name"
                continue
            target = entry.load()
            how = relation(target, [self.sharded.ranks[rank][key].load() for rank in ranks], AT_START)
            known[key.name] = how.how in HEALTHY
            constant[key.name] = bool((target == target.flat[0]).all())
            if not known[key.name]:
                self.left_out[key.name] = "before the first step the ranks' values do not make the other layout's"
        for name, fits in known.items():
            if fits and (not constant[name] or _neighbours_fit(name, known, constant)):
                yield name
            elif fits:
                self.left_out[name] = "it begins constant, in a module whose other parameters do not match"
        for key in (key for rank in self.ranks for key in self.sharded.ranks[rank] if key.kind == "start"):
            if key not in self.whole:
                self.left_out[key.name] = "the second layout has no parameter of this name"


def _neighbours_fit(name: str, known: Mapping[str, bool], constant: Mapping[str, bool]) -> bool:
    """Return whether the non-constant parameters match in the smallest module around *name* that has any."""
    module = name.rpartition(".")[0]
    while True:
        inside = [other for other in known if (not module or other.startswith(f"{module}.")) and not constant[other]]
        if inside:
            return all(known[other] for other in inside)
        if not module:
            return True
        module = module.rpartition(".")[0]


def _inputs(entries: Mapping[TensorKey, RecordedTensor]) -> list[Array]:
    """The tensors that the model was first called with."""
    return [entry.load() for key, entry in entries.items() if key.kind == "input" and (key.step, key.root) == (0, 0)]


def _same(mine: list[Array], other: list[Array]) -> bool:
    return len(mine) == len(other) and all(np.array_equal(a, b) for a, b in zip(mine, other, strict=True))


def _makes(whole: list[Array], parts: list[list[Array]]) -> bool:
    """Return whether the inputs of the ranks are equal to *whole*, or form it together."""
    return all(len(part) == len(whole) for part in parts) and all(
        relation(target, [part[number] for part in parts], 0.0).how in HEALTHY for number, target in enumerate(whole)
    )
