"""Checks of how gradients are reduced: scale, reduce operator, output buffers, missing gradients.

They report means that were divided twice or not at all, targets that weigh differently, and calls whose arguments
are wrong whatever the tensors hold.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distsim.debug.diagnosis.silent.facts import ClipFact, LossFact, Sighting, SilentKind, StepFact, Vector
from distsim.debug.diagnosis.silent.view import ParameterKey, ReplicaSet, SilentEvidence, View
from distsim.debug.messages import ranks_text

Sets = dict[ParameterKey, list[ReplicaSet]]
LINEAR = 1e-2
"""Relative error up to which a gradient counts as a linear combination of local gradients."""
EXACT = 0.02
"""Relative error up to which a scale counts as equal to a number that explains it, such as the world size."""
UNLIKE = 1.5
"""Ratio of two scales above which gradients count as scaled differently."""
MOST_STEPS = 32
"""Number of steps that are searched, from the first one. A fault of this kind is present from the start."""
LEAST = 0.05
"""A micro-batch is part of the gradient if its factor is above this fraction of the largest factor."""
MOST_PARTS = 8
"""Largest number of micro-batches or ranks whose factors can be solved for from a sketch of 16 numbers."""
HEAVIER = 1.05
"""Ratio of weights above which two targets count as weighted differently."""
STEPS = 2
"""Number of steps that must show the same fault before it is reported."""
REDUCED = (SilentEvidence.DDP, SilentEvidence.REDUCED, SilentEvidence.EQUALIZED)
NO_SUMS = ("MAX", "MIN", "PRODUCT")


def _groups(sets: Sets) -> list[tuple[int, tuple[int, ...], list[ParameterKey]]]:
    """Return (optimizer, ranks, parameters) for each set of ranks that reduce gradients together."""
    keys: dict[tuple[int, tuple[int, ...]], list[ParameterKey]] = defaultdict(list)
    for key, of_key in sets.items():
        for one in of_key:
            if one.evidence in REDUCED:
                keys[key.optimizer, one.ranks].append(key)
    return [(optimizer, ranks, of_group) for (optimizer, ranks), of_group in sorted(keys.items())]


def _coefficients(
    view: View, steps: Mapping[int, StepFact], ranks: Sequence[int], keys: Sequence[ParameterKey]
) -> dict[ParameterKey, float]:
    """Return, by parameter, the factor between the final gradient and the sum of all local gradients.

    Parameters whose final gradient is not a multiple of that sum are left out.
    """
    coefficients = {}
    for key, parts, final in _gradients(view, steps, ranks, keys):
        weights = _weights(final, [sum(micro for of_rank in parts.values() for micro in of_rank)])
        if weights is not None:
            coefficients[key] = float(weights[0])
    return coefficients


Parts = dict[int, list[Vector]]


def _gradients(
    view: View, steps: Mapping[int, StepFact], ranks: Sequence[int], keys: Sequence[ParameterKey]
) -> Iterator[tuple[ParameterKey, Parts, Vector]]:
    """Yield each parameter with its local gradients by rank and micro-batch, and its final gradient.

    The final gradient is the one that the optimizer reads. Parameters without sketches in this step, or under a DDP
    communication hook, are left out.
    """
    for key in keys:
        if any(view.parameters[key][rank].compressed for rank in ranks):
            continue
        final = view.vectors("gradients", steps, key, ranks)
        if final is not None and view.local(steps, key, ranks) is not None:
            yield key, {rank: steps[rank].local[view.numbers[rank][key]] for rank in ranks}, final[ranks[0]]


def _weights(reached: Vector, parts: Sequence[Any]) -> NDArray[np.floating[Any]] | None:
    """Solve for the factors by which *parts* add up to the gradient *reached*.

    Return None if they do not add up to it within `LINEAR`, or if the factors are not unique.
    """
    columns: NDArray[np.float64] = np.array(parts, dtype=np.float64).T
    goal = np.asarray(reached, dtype=np.float64)
    weights: NDArray[np.floating[Any]]
    size = float(np.linalg.norm(goal))
    if size <= 0.0 or not columns.any():
        return None
    if columns.shape[1] == 1:  # the case of a healthy step, ten times as fast
        weights = columns.T @ goal / float((columns * columns).sum())
    elif np.linalg.matrix_rank(columns) < columns.shape[1]:
        return None
    else:
        weights = np.linalg.lstsq(columns, goal, rcond=None)[0]
    return weights if float(np.linalg.norm(goal - columns @ weights)) <= LINEAR * size else None


def _losses(steps: Mapping[int, StepFact], ranks: Sequence[int], micro: int) -> list[LossFact] | None:
    """Return the losses of all ranks in a step.

    Return None if a loss has an unknown weight, or if a rank called the loss function more or fewer than *micro*
    times.
    """
    losses: list[LossFact] = []
    for rank in ranks:
        known = [one for one in steps[rank].window.losses if one.weight is not None or one.reduction == "none"]
        if len(known) != micro or any(one.reduction == "none" for one in known):
            return None
        losses += known
    return losses


def _micro(view: View, steps: Mapping[int, StepFact], ranks: Sequence[int], key: ParameterKey) -> int:
    """Return the number of micro-batches in a step, or 0 if it differs between ranks."""
    counts = {len(steps[rank].local.get(view.numbers[rank][key], ())) for rank in ranks}
    return counts.pop() if len(counts) == 1 else 0


def gradient_scale(view: View, sets: Sets) -> Iterator[Sighting]:
    """Report gradients that are N times, or 1/N of, the gradient of the mean loss.

    N is the number of ranks, of micro-batches, or their product. Clipped steps are not checked.
    """
    for optimizer, ranks, keys in _groups(sets):
        explanations: list[tuple[str, StepFact, int]] = []
        for number, steps in view.steps_of(optimizer, ranks):
            if any(steps[rank].window.clips for rank in ranks):
                continue
            coefficients = _coefficients(view, steps, ranks, keys)
            micro = _micro(view, steps, ranks, next(iter(coefficients), keys[0]))
            losses = _losses(steps, ranks, micro) if coefficients and micro else None
            if losses is None:
                continue
            weight = sum((one.weight or 0.0) * (one.targets if one.reduction == "sum" else 1) for one in losses)
            scale = weight * float(np.median(list(coefficients.values())))
            explanations.append((_explained(scale, len(ranks), micro), steps[ranks[0]], number))
        words = {words for words, _, _ in explanations}
        if len(explanations) >= STEPS and len(words) == 1 and "" not in words:
            first = explanations[0]
            yield Sighting(
                SilentKind.GRADIENT_SCALE,
                ranks,
                first[2],
                f"The gradient that the optimizer finds on {{ranks}} is {first[0]} times the gradient of the mean "
                "loss.",
                site=first[1].site,
            )


def _explained(scale: float, ranks: int, micro: int) -> str:
    """Return what explains a scale other than 1, such as `1/4 (the ranks)`; empty if nothing does."""
    numbers = {"the ranks": ranks, "the micro-batches": micro, "ranks and micro-batches": ranks * micro}
    for words, number in numbers.items():
        if number > 1 and abs(scale - number) <= EXACT * number:
            return f"{number} ({words})"
        if number > 1 and abs(scale * number - 1.0) <= EXACT:
            return f"1/{number} ({words})"
    return ""


def mixed_scale(view: View, sets: Sets) -> Iterator[Sighting]:
    """Report parameters, ranks or micro-batches that enter one reduced gradient with different factors."""
    yield from _mixed_parameters(view, sets)
    for optimizer, ranks, keys in _groups(sets):
        last = ""
        for number, steps in itertools.islice(view.steps_of(optimizer, ranks), MOST_STEPS):
            before, last = last, _unlike_parts(view, steps, ranks, keys)
            if last and last == before:
                yield Sighting(
                    SilentKind.MIXED_SCALE,
                    ranks,
                    number,
                    f"{last} in the gradient that the optimizer finds on {{ranks}}.",
                    site=steps[ranks[0]].site,
                    suggestion="Reduce the accumulated gradient once, after the last micro-batch, over all of {ranks}.",
                )
                break


def _mixed_parameters(view: View, sets: Sets) -> Iterator[Sighting]:
    for optimizer, ranks, keys in _groups(sets):
        times = 0
        for number, steps in view.steps_of(optimizer, ranks):
            coefficients = _coefficients(view, steps, ranks, keys)
            sizes = {key: abs(one) for key, one in coefficients.items() if one}
            middle = float(np.median(list(sizes.values()))) if sizes else 0.0
            odd = [key for key, size in sizes.items() if not middle / UNLIKE < size < middle * UNLIKE]
            times = times + 1 if odd else 0
            if times == STEPS:
                for key in odd:
                    yield Sighting(
                        SilentKind.MIXED_SCALE,
                        ranks,
                        number,
                        f"The gradient of {{tensor}} is {coefficients[key] / middle:.3g} times as large as that "
                        "of the other parameters that are reduced over {ranks}.",
                        tensor=key.name,
                        site=steps[ranks[0]].site,
                        suggestion="Reduce all gradients over one group and with one operator, once each.",
                    )
                break


def _unlike_parts(view: View, steps: Mapping[int, StepFact], ranks: Sequence[int], keys: Sequence[ParameterKey]) -> str:
    """Return a sentence if micro-batches or ranks enter the gradient with different factors, else an empty string.

    All parameters whose factors can be solved for must agree.
    """
    micro_ratios, missing = [], []
    for _, parts, final in _gradients(view, steps, ranks, keys):
        if len({len(of_rank) for of_rank in parts.values()}) > 1 or max(len(parts), len(parts[ranks[0]])) > MOST_PARTS:
            return ""
        if _weights(final, [sum(micro for of_rank in parts.values() for micro in of_rank)]) is not None:
            return ""
        of_micro = _weights(final, [sum(parts_of) for parts_of in zip(*parts.values(), strict=True)])
        if of_micro is not None and of_micro.min() > LEAST * of_micro.max():  # zero: zero_grad came between
            micro_ratios.append(float(of_micro.max() / of_micro.min()))
        of_rank = _weights(final, [sum(parts[rank]) for rank in ranks])
        if of_rank is not None:
            missing.append(
                tuple(rank for rank, one in zip(ranks, of_rank, strict=True) if one < LINEAR * of_rank.max())
            )
    if min(micro_ratios, default=1.0) > UNLIKE:
        return f"Some micro-batches of a step count {min(micro_ratios):.3g} times as much as others"
    absent = set(missing)
    return f"The gradients of {ranks_text(missing[0])} are missing" if len(absent) == 1 and missing[0] else ""


def stale_gradient(view: View, sets: Sets) -> Iterator[Sighting]:
    """Report steps whose gradient still contains the gradient of the previous step (a missing `zero_grad`)."""
    for optimizer, ranks, keys in _groups(sets):
        times = 0
        last: dict[ParameterKey, Vector] = {}
        for number, steps in itertools.islice(view.steps_of(optimizer), MOST_STEPS):
            of_key = {key: (parts, final) for key, parts, final in _gradients(view, steps, ranks, keys)}
            count = _stale_ranks(of_key, last, len(ranks))
            times = times + 1 if count else 0
            if times == STEPS:
                yield Sighting(
                    SilentKind.STALE_GRADIENT,
                    ranks,
                    number,
                    "The gradient of the step before is still in the gradient that the optimizer finds, as if "
                    f"{count} of {len(ranks)} ranks did not clear it.",
                    site=steps[ranks[0]].site,
                )
                break
            last = {key: final for key, (_, final) in of_key.items()}


def _stale_ranks(
    gradients: Mapping[ParameterKey, tuple[Parts, Vector]], last: Mapping[ParameterKey, Vector], ranks: int
) -> int:
    """Return the number of ranks that kept the previous gradient, or 0 if there are none or parameters disagree."""
    counts = set()
    for key, (parts, final) in gradients.items():
        total = sum(micro for of_rank in parts.values() for micro in of_rank)
        if key not in last or _weights(final, [total]) is not None:
            return 0
        weights = _weights(final, [total, last[key]])
        count = 0.0 if weights is None else float(weights[1]) * ranks
        if abs(count - round(count)) > EXACT * ranks or not 1 <= round(count) <= ranks:
            return 0
        counts.add(round(count))
    return counts.pop() if len(counts) == 1 else 0


def clipped_before_reduction(view: View, sets: Sets) -> Iterator[Sighting]:
    """Report ranks that clip their local gradient before the gradients are reduced."""
    for optimizer, ranks, keys in _groups(sets):
        for number, steps in view.steps_of(optimizer, ranks):
            clips = [steps[rank].window.clips for rank in ranks]
            if any(len(of_rank) != 1 for of_rank in clips):
                continue
            factors = [_factor(of_rank[0]) for of_rank in clips]
            if max(factors) <= UNLIKE * min(factors):
                continue
            of_key = [
                (_weights(final, [sum(parts[rank]) * factor for rank, factor in zip(ranks, factors, strict=True)]), key)
                for key, parts, final in _gradients(view, steps, ranks, keys)
            ]
            clipped = [
                key for weights, key in of_key if weights is not None and np.ptp(weights) <= LINEAR * weights.max()
            ]
            if clipped and 2 * len(clipped) >= len(of_key):
                yield Sighting(
                    SilentKind.CLIPPED_BY_LOCAL_NORM,
                    ranks,
                    number,
                    "Each of {ranks} clips its gradient before the gradients are reduced: in the sum, their "
                    f"weights differ by a factor of {max(factors) / min(factors):.3g}.",
                    site=clips[0][0].site,
                    suggestion="Clip after the reduction, when all of {ranks} have the same gradient.",
                )
                break


def _factor(clip: ClipFact) -> float:
    """Return the factor by which a clipping multiplies gradients."""
    return 1.0 if not clip.norm else min(1.0, clip.limit / clip.norm)


def tokens_weigh_differently(view: View, sets: Sets) -> Iterator[Sighting]:
    """Report targets (tokens) that weigh more on one rank, or in one micro-batch, than in another."""
    for optimizer, ranks, keys in _groups(sets):
        times, largest = 0, 1.0
        first: tuple[int, LossFact] | None = None
        for number, steps in view.steps_of(optimizer, ranks):
            micro = max((len(steps[ranks[0]].local.get(view.numbers[ranks[0]][key], ())) for key in keys), default=0)
            losses = _losses(steps, ranks, micro)
            if losses is None or not all(one.counts_tokens for one in losses):
                continue
            weights = [
                abs(one.weight or 0.0) / (one.targets if one.reduction == "mean" else 1)
                for one in losses
                if one.targets
            ]
            totals = [abs(one.weight or 0.0) * (1 if one.reduction == "mean" else one.targets) for one in losses]
            is_mean = max(totals, default=0.0) <= HEAVIER * min(totals, default=0.0)  # else a factor that was meant
            is_uneven = bool(weights) and is_mean and max(weights) > HEAVIER * min(weights) > 0.0
            times = times + 1 if is_uneven else 0
            largest = max(largest, max(weights) / min(weights)) if is_uneven else largest
            if times == STEPS and first is None:
                first = number, losses[0]
        if first is not None:
            yield Sighting(
                SilentKind.TOKENS_WEIGH_DIFFERENTLY,
                ranks,
                first[0],
                f"A target weighs up to {largest:.2g} times as much on one rank or in one micro-batch of a step as in "
                "another: each mean is over its own count of targets.",
                site=first[1].site,
            )


def aliased_outputs(view: View, sets: Sets) -> Iterator[Sighting]:
    """Report gathers whose output tensors share memory, so that all hold the last value written."""
    for rank, number, window in view.events():
        for op, _, site in window.aliased:
            reason = f"The outputs of {op} at {site} share memory, so all of them hold the last value received."
            yield Sighting(SilentKind.ALIASED_OUTPUTS, (rank,), number + 1, reason, site=site)


def gradient_reduce_op(view: View, sets: Sets) -> Iterator[Sighting]:
    """Report gradients that are reduced with MAX, MIN or PRODUCT."""
    for rank in view.facts:
        for number, window in enumerate(view.windows(rank)):
            for call in window.calls:
                if call.reduce_op not in NO_SUMS:
                    continue
                for parameter in sorted(call.gradients):
                    yield Sighting(
                        SilentKind.GRADIENT_REDUCE_OP,
                        tuple(sorted(call.ranks)),
                        number + 1,
                        f"The gradient of {{tensor}} is reduced with {call.reduce_op} by {call.op} at {call.site}.",
                        tensor=view.facts[rank].parameters[parameter].name,
                        site=call.site,
                    )


def step_without_gradients(view: View, sets: Sets) -> Iterator[Sighting]:
    """Report an optimizer that steps twice in a row without a gradient of any parameter on any rank."""
    for optimizer in sorted({step[0] for step in view.order}):
        idle = 0
        for number, steps in view.steps_of(optimizer):
            has_none = all(
                step.parameters and step.without_gradient == len(step.parameters) and not step.has_closure
                for step in steps.values()
            )
            idle = idle + 1 if has_none else 0
            if idle == 2:
                first = min(steps)
                yield Sighting(
                    SilentKind.STEP_WITHOUT_GRADIENTS,
                    tuple(sorted(steps)),
                    number,
                    "The optimizer has made two steps, and no parameter of it had a gradient on any rank: "
                    "nothing trains.",
                    site=steps[first].site,
                )
                break
