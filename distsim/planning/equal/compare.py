"""Compares two runs of one program tensor by tensor, and finds the first tensor that differs.

*sharded* is the run whose ranks hold parts, and *whole* is the one without model parallelism. Parameters and their
gradients decide: a module may compute anything as long as every parameter is trained equally. Outputs and their
gradients show where a difference starts. The tensors of several ranks are equal to the whole tensor, are parts of
it, add up to it, or none of these.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distsim.errors import UsageError
from distsim.planning.equal.record import RecordedRun, RecordedTensor, TensorKey

Array = NDArray[Any]

PARTS = (2, 3)
"""Blocks into which a rank's shard may be cut before the shards are joined: the two halves of a gate or of a zigzag
sequence, and query, key and value of one weight."""


class How(enum.Enum):
    """Relation of the ranks' tensors to the whole tensor."""

    EQUAL = "equal"
    JOINED = "joined"
    SUM = "sum"
    MULTIPLE = "multiple"
    NONE = "none"


@dataclass(frozen=True)
class TensorRelation:
    """Relation of the ranks' tensors to the whole; *distance* is relative to the norm of the whole."""

    how: How
    distance: float
    detail: str = ""
    factor: float = 1.0
    """For MULTIPLE: the ranks' tensor divided by the whole one."""


def distance(whole: Array, other: Array) -> float:
    """Return |other - whole| / |whole|; infinite if a value is not a number or the shapes differ."""
    if whole.shape != other.shape:
        return float("inf")
    a, b = whole.astype(np.float64), other.astype(np.float64)
    apart = float(np.linalg.norm((b - a).reshape(-1)))
    norm = float(np.linalg.norm(a.reshape(-1)))
    if not np.isfinite(apart):
        return 0.0 if np.array_equal(a, b, equal_nan=True) else float("inf")
    return apart / norm if norm else (0.0 if not apart else float("inf"))


def relation(whole: Array, shards: Sequence[Array], threshold: float) -> TensorRelation:
    """Return the relation of *shards*, one per rank in order, to *whole*.

    MULTIPLE means that the ranks are equal, and larger or smaller than *whole* by a whole number. A relation whose
    distance exceeds *threshold* is NONE, with the smallest distance of all candidates.
    """
    distinct = _distinct(shards)
    nearest = float("inf")
    for parts in (distinct, shards):  # copies over an axis of the mesh, or parts that happen to be equal
        for how, detail, combined in _candidates(whole.shape, parts):
            if how is How.SUM and len(parts) > len(distinct):
                continue  # equal tensors that are too small are a multiple
            apart = distance(whole, combined)
            if apart <= threshold:
                return TensorRelation(how, apart, detail)
            nearest = min(nearest, apart)
        if len(shards) == len(distinct):
            break
    if len(distinct) == 1 or all(distance(distinct[0], shard) <= threshold for shard in distinct):
        factor = _factor(whole, distinct[0], threshold)
        if factor is not None:
            return TensorRelation(How.MULTIPLE, nearest, f"{factor:g} times", factor)
    return TensorRelation(How.NONE, nearest)


def joined(shapes: Sequence[tuple[int, ...]], whole: tuple[int, ...]) -> int | None:
    """Return the dimension along which tensors of *shapes* make one of shape *whole*; None if none or several do."""
    fits = [
        axis
        for axis in range(len(whole))
        if all(len(s) == len(whole) and s[:axis] + s[axis + 1 :] == whole[:axis] + whole[axis + 1 :] for s in shapes)
        and sum(shape[axis] for shape in shapes) == whole[axis]
    ]
    return fits[0] if len(fits) == 1 else None


def _distinct(shards: Sequence[Array]) -> list[Array]:
    """Return *shards* without copies of earlier ones."""
    kept: list[Array] = []
    for shard in shards:
        if not any(shard.shape == other.shape and np.array_equal(shard, other, equal_nan=True) for other in kept):
            kept.append(shard)
    return kept


def _candidates(shape: tuple[int, ...], shards: Sequence[Array]) -> Iterator[tuple[How, str, Array]]:
    """Yield the tensors of *shape* that *shards* may form, the simplest first."""
    if len(shards) == 1 or all(shard.shape == shape for shard in shards):
        # several copies of one tensor that differ by rounding
        farthest = max(shards, key=lambda shard: distance(shards[0], shard))
        yield How.EQUAL, "", farthest if farthest.shape == shape else shards[0]
    if len(shards) == 1:
        return
    yield from _one_axis(shape, shards)
    for width in range(2, len(shards) // 2 + 1):  # a mesh of two axes: one within blocks of ranks, one across them
        if len(shards) % width:
            continue
        blocks = [shards[at : at + width] for at in range(0, len(shards), width)]
        strides = [shards[at :: len(shards) // width] for at in range(len(shards) // width)]
        for groups in (blocks, strides):
            for how, detail, inner in _inner(groups):
                for other, more, combined in _one_axis(shape, inner):
                    added = How.SUM in (how, other)
                    yield How.SUM if added else How.JOINED, f"{detail}, {more}", combined


def _inner(groups: list[Sequence[Array]]) -> Iterator[tuple[How, str, list[Array]]]:
    """Yield the groups of ranks, each made one tensor in one way."""
    for axis in range(groups[0][0].ndim):
        if all(_joinable(group, axis) for group in groups):
            yield How.JOINED, f"dim {axis}", [np.concatenate(group, axis) for group in groups]
    if all(len({shard.shape for shard in group}) == 1 for group in groups):
        yield How.SUM, "sum", [_sum(group) for group in groups]


def _one_axis(shape: tuple[int, ...], shards: Sequence[Array]) -> Iterator[tuple[How, str, Array]]:
    for axis in range(len(shape)):
        if not _joinable(shards, axis) or sum(shard.shape[axis] for shard in shards) != shape[axis]:
            continue
        yield How.JOINED, f"dim {axis}", np.concatenate(shards, axis)
        if any(shard.shape != shards[0].shape for shard in shards):
            continue
        size = shards[0].shape[axis]
        yield How.JOINED, f"dim {axis}, in turn", _in_turn(shards, axis)
        for parts in PARTS:
            if size % parts == 0:
                cut = [np.split(shard, parts, axis) for shard in shards]
                yield (
                    How.JOINED,
                    f"dim {axis}, {parts} blocks",
                    np.concatenate([block[part] for part in range(parts) for block in cut], axis),
                )
        if size % 2 == 0:
            halves = [np.split(shard, 2, axis) for shard in shards]
            zigzag = [first for first, _ in halves] + [second for _, second in reversed(halves)]
            yield How.JOINED, f"dim {axis}, zigzag", np.concatenate(zigzag, axis)
    if all(shard.shape == shape for shard in shards):
        total = _sum(shards)
        yield How.SUM, "", total
        yield How.SUM, "mean", total / len(shards)


def _joinable(shards: Sequence[Array], axis: int) -> bool:
    first = shards[0].shape
    return all(
        shard.ndim == len(first) and shard.shape[:axis] + shard.shape[axis + 1 :] == first[:axis] + first[axis + 1 :]
        for shard in shards
    )


def _in_turn(shards: Sequence[Array], axis: int) -> Array:
    """Return the elements of the ranks in turn, as a strided split gives them out."""
    stacked = np.stack(shards, axis + 1)
    shape = list(shards[0].shape)
    shape[axis] *= len(shards)
    return stacked.reshape(shape)


def _sum(shards: Sequence[Array]) -> Array:
    total: Array = np.sum([shard.astype(np.float64) for shard in shards], axis=0)
    return total


def _factor(whole: Array, shard: Array, threshold: float) -> float | None:
    """Return the factor by which *shard* is too large if it is a whole number from 2 or its inverse."""
    if whole.shape != shard.shape:
        return None
    a, b = whole.astype(np.float64).reshape(-1), shard.astype(np.float64).reshape(-1)
    norm = float(a @ a)
    ratio = float(a @ b) / norm if norm else 0.0
    for factor in (ratio, 1 / ratio if ratio else 0.0):
        if factor >= 1.5 and abs(factor - round(factor)) < 1e-3 * factor:
            exact = float(round(factor)) if factor is ratio else 1.0 / round(factor)
            return exact if distance(a, b / exact) <= threshold else None
    return None


LEAST = 1e-5
"""Distance below which tensors are equal; healthy layouts differed by at most 3.8e-7 (silent.md, section 5)."""
TIMES = 30.0
"""Tolerance, as a multiple of the change that a rounding of the parameters causes."""
AT_START = 1e-6
"""Largest relative distance at which parameters count as equal before the first step."""
PHASES = ("output", "output_gradient", "gradient", "parameter")
DECIDE = ("gradient", "parameter")
HEALTHY = (How.EQUAL, How.JOINED)


@dataclass(frozen=True)
class Deviation:
    """A tensor of the sharded run whose parts do not correspond to the tensor of the whole run."""

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
    """Return the ranks of *sharded* that share the work of each rank of *whole*: they read the same input."""
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
                f"rank {rank} of the first layout reads inputs that no rank of the second layout reads: give the "
                "second layout as many ranks as the first has data-parallel replicas (--and-nproc-per-node), and the "
                "same seeds"
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
    """Compare *sharded* with *whole*.

    *perturbed* is *whole* repeated with parameters that were changed by one rounding error.
    """
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
    """Record where the difference starts."""
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
        """Yield every tensor in the order of the program; yields those that differ."""
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
        """Return the records of both runs in the order of the sharded run's ranks."""
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
        """Return those of *ranks* whose model starts with the whole model's input, and later pipeline stages with
        names of their own.
        """
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
    """Return the tensors that the model was first called with."""
    return [entry.load() for key, entry in entries.items() if key.kind == "input" and (key.step, key.root) == (0, 0)]


def _same(mine: list[Array], other: list[Array]) -> bool:
    return len(mine) == len(other) and all(np.array_equal(a, b) for a, b in zip(mine, other, strict=True))


def _makes(whole: list[Array], parts: list[list[Array]]) -> bool:
    """Return whether the inputs of the ranks are equal to *whole*, or form it together."""
    return all(len(part) == len(whole) for part in parts) and all(
        relation(target, [part[number] for part in parts], 0.0).how in HEALTHY for number, target in enumerate(whole)
    )
