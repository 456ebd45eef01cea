"""Checks of inputs: equal batches, mixed train/eval modes, unshuffled epochs, unequal replicated inputs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from distsim.debug.diagnosis.silent.facts import InputFact, Severity, Sighting, SilentKind, StepFact
from distsim.debug.diagnosis.silent.view import (
    ParameterKey,
    ReplicaSet,
    SilentEvidence,
    View,
    activation_groups,
    differ,
)

__all__ = ["epochs_alike", "mode_differs", "replicate_is_not", "same_batch"]

Sets = dict[ParameterKey, list[ReplicaSet]]
STEPS = 4
"""Number of steps with equal inputs before they are reported. A warm-up batch is often the same on all ranks."""
PASSES = 3
"""Number of passes over the data in one order before they are reported. Two passes may be a look at one batch or at
the length of an epoch.
"""
DATA_PARALLEL = (SilentEvidence.DDP, SilentEvidence.REDUCED, SilentEvidence.EQUALIZED)


def _data_parallel(view: View, sets: Sets) -> list[tuple[int, tuple[int, ...]]]:
    """Return (optimizer, ranks) of data-parallel ranks, which should read different data.

    Ranks that exchange activations are left out: they share a forward pass and may share a batch.
    """
    groups = [set(group) for group in activation_groups(view)]
    pairs = {
        (key.optimizer, one.ranks) for key, of_key in sets.items() for one in of_key if one.evidence in DATA_PARALLEL
    }
    pairs |= {
        (key.optimizer, fact.fsdp)
        for key, facts in view.parameters.items()
        for fact in facts.values()
        if len(fact.fsdp) > 1
    }
    return sorted(pair for pair in pairs if not any(len(group & set(pair[1])) > 1 for group in groups))


def same_batch(view: View, sets: Sets) -> Iterator[Sighting]:
    """Report data-parallel ranks whose inputs are equal in every step."""
    for optimizer, ranks in _data_parallel(view, sets):
        equal, seen, site = 0, set(), None
        for _, steps in view.steps_of(optimizer):
            inputs = _inputs(steps, ranks)
            if inputs is None:
                continue
            if not all(_are_equal([of_rank[i] for of_rank in inputs]) for i in range(len(inputs[0]))):
                break
            equal += 1
            seen.add(b"".join(vector.tobytes() for fact in inputs[0] for vector in fact.vectors))
            site = site or inputs[0][0].site
        else:
            if equal >= STEPS and len(seen) > 1:
                yield Sighting(
                    SilentKind.SAME_BATCH,
                    Severity.WARNING,
                    ranks,
                    "",
                    STEPS,
                    site,
                    "",
                    f"{{ranks}} are data parallel, and their models had equal inputs in all of {equal} steps: "
                    "each rank "
                    "trains on the same batches.",
                    "Give each rank its own part of the data: DataLoader(..., "
                    "sampler=DistributedSampler(dataset)), or "
                    "a different seed for each rank.",
                )


def _inputs(steps: Mapping[int, StepFact], ranks: Sequence[int]) -> list[list[InputFact]] | None:
    """Return the inputs of each rank in one step, or None if the ranks' inputs cannot be compared."""
    if any(rank not in steps for rank in ranks):
        return None
    inputs = [[fact for fact in steps[rank].window.inputs if fact.training] for rank in ranks]
    if not inputs[0] or any(len(of_rank) != len(inputs[0]) for of_rank in inputs):
        return None
    return None if all(fact.constant for fact in inputs[0]) else inputs


def _are_equal(facts: Sequence[InputFact]) -> bool:
    first, *others = facts
    return all(
        other.shapes == first.shapes
        and all(bool((a == b).all()) for a, b in zip(first.vectors, other.vectors, strict=True))
        for other in others
    )


def mode_differs(view: View, sets: Sets) -> Iterator[Sighting]:
    """Report a model that is in training mode on one rank and in evaluation mode on another, in the same call."""
    pairs = {(key.optimizer, one.ranks) for key, of_key in sets.items() for one in of_key if not one.evidence.is_guess}
    for optimizer, ranks in sorted(pairs):
        for number, steps in view.steps_of(optimizer):
            calls = [steps[rank].window.inputs for rank in ranks if rank in steps]
            if len(calls) < len(ranks) or any(len(of_rank) != len(calls[0]) for of_rank in calls):
                continue
            for i, first in enumerate(calls[0]):
                facts = [of_rank[i] for of_rank in calls]
                if {fact.model for fact in facts} != {first.model} or len({fact.training for fact in facts}) < 2:
                    continue
                in_training = [rank for rank, fact in zip(ranks, facts, strict=True) if fact.training]
                yield Sighting(
                    SilentKind.MODE_DIFFERS,
                    Severity.WARNING,
                    ranks,
                    first.model,
                    number,
                    first.site,
                    "",
                    f"{{tensor}} is in training mode on ranks {in_training} of {{ranks}} alone: dropout and "
                    "normalization "
                    "differ between replicas.",
                    "Call model.train() or model.eval() on every rank.",
                )
                return


def epochs_alike(view: View, sets: Sets) -> Iterator[Sighting]:
    """Report a shuffling DistributedSampler whose passes over the data have the same order (no `set_epoch`)."""
    for rank in view.facts:
        passes: dict[tuple[int, int], int] = defaultdict(int)
        for number, window in enumerate(view.windows(rank)):
            for fact in window.epochs:
                passes[fact.sampler, fact.epoch] += 1
                if passes[fact.sampler, fact.epoch] == PASSES:
                    yield Sighting(
                        SilentKind.EPOCHS_ALIKE,
                        Severity.WARNING,
                        (rank,),
                        "",
                        number + 1,
                        fact.site,
                        "",
                        f"A DistributedSampler that shuffles is iterated again at epoch {fact.epoch}: every epoch "
                        "has the "
                        "same order.",
                        "Call sampler.set_epoch(epoch) before each epoch.",
                    )
                    break
            else:
                continue
            break


def replicate_is_not(view: View, sets: Sets) -> Iterator[Sighting]:
    """Report a module input that is declared as replicated over a mesh but differs between its ranks."""
    for step in view.order:
        steps = view.steps[step]
        for rank, of_rank in steps.items():
            for i, fact in enumerate(of_rank.window.placements):
                if rank != fact.ranks[0] or any(other not in steps for other in fact.ranks):
                    continue
                placements = {other: steps[other].window.placements for other in fact.ranks}
                if any(len(facts) != len(of_rank.window.placements) for facts in placements.values()):
                    continue
                vectors = {other: facts[i].vector for other, facts in placements.items()}
                if any(facts[i].shape != fact.shape for facts in placements.values()) or differ(vectors, 0.0):
                    yield Sighting(
                        SilentKind.REPLICATE_IS_NOT,
                        Severity.ERROR,
                        fact.ranks,
                        "",
                        step[1],
                        fact.site,
                        "",
                        f"The input of {fact.module} is declared Replicate(), but its values differ between {{ranks}}.",
                        "Give all of {ranks} the same input: load one batch for each data-parallel group, or "
                        "broadcast it "
                        "inside the tensor-parallel group.",
                    )
                    return
