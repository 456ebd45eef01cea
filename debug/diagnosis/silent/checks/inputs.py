"""Checks of inputs: equal batches, divided data, mixed modes, epochs, unequal replicated inputs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from distsim.debug.diagnosis.silent.facts import EpochFact, InputFact, Sighting, SilentKind, StepFact
from distsim.debug.diagnosis.silent.view import (
    ParameterKey,
    ReplicaSet,
    SilentEvidence,
    View,
    activation_groups,
    differ,
)
from distsim.debug.matching.agreement import majority
from distsim.debug.messages import are, ranks_text
from distsim.debug.records import Site

Sets = dict[ParameterKey, list[ReplicaSet]]
STEPS = 4
"""Number of steps with equal inputs before they are reported. A warm-up batch is often the same on all ranks."""
PASSES = 3
"""Number of passes over the data in one order, with steps between them, before they are reported. Two passes may be a
look at one batch or at the length of an epoch, and those before the first step collect statistics.
"""
FEWEST, SHARED = 12, 0.1
"""Number of samples, and share of a rank's samples, that another rank must have read as well. Ranks that draw from the
whole data do not share twelve with one rank and none with the next.
"""
FROM_LOCAL = "DTensor.from_local"
"""What is said to take the input where the program itself makes a DTensor."""
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


def _complete(view: View, sets: Sets) -> list[tuple[int, tuple[int, ...]]]:
    """Return those data-parallel ranks of which each was looked at: what others read, nobody knows."""
    return [(optimizer, ranks) for optimizer, ranks in _data_parallel(view, sets) if set(ranks) <= view.facts.keys()]


def same_batch(view: View, sets: Sets) -> Iterator[Sighting]:
    """Report data-parallel ranks whose inputs are equal in every step."""
    for optimizer, ranks in _data_parallel(view, sets):
        equal, seen, site = 0, set(), None
        for _, steps in view.steps_of(optimizer, ranks):
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
                    ranks,
                    STEPS,
                    f"{{ranks}} are data parallel, and their models had equal inputs in all of {equal} steps: "
                    "each rank trains on the same batches.",
                    site=site,
                )


def _inputs(steps: Mapping[int, StepFact], ranks: Sequence[int]) -> list[list[InputFact]] | None:
    """Return the inputs of each rank in one step, or None if the ranks' inputs cannot be compared."""
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
        for number, steps in view.steps_of(optimizer, ranks):
            calls = [steps[rank].window.inputs for rank in ranks]
            if any(len(of_rank) != len(calls[0]) for of_rank in calls):
                continue
            for i, first in enumerate(calls[0]):
                facts = [of_rank[i] for of_rank in calls]
                if {fact.model for fact in facts} != {first.model} or len({fact.training for fact in facts}) < 2:
                    continue
                in_training = [rank for rank, fact in zip(ranks, facts, strict=True) if fact.training]
                yield Sighting(
                    SilentKind.MODE_DIFFERS,
                    ranks,
                    number,
                    f"{{tensor}} is in training mode on ranks {in_training} of {{ranks}} alone: dropout and "
                    "normalization differ between replicas.",
                    tensor=first.model,
                    site=first.site,
                )
                return


def epochs_alike(view: View, sets: Sets) -> Iterator[Sighting]:
    """Report a shuffling DistributedSampler whose passes over the data have the same order (no `set_epoch`)."""
    for rank in view.facts:
        passes: dict[tuple[int, int], set[int]] = defaultdict(set)
        epochs = ((number, one) for number, window in enumerate(view.windows(rank)) for one in window.epochs)
        for number, fact in epochs:
            if fact.shuffles:
                passes[fact.sampler, fact.epoch].add(number)
            if len(passes[fact.sampler, fact.epoch]) == PASSES:
                yield Sighting(
                    SilentKind.EPOCHS_ALIKE,
                    (rank,),
                    number + 1,
                    f"A DistributedSampler that shuffles is iterated again at epoch {fact.epoch}: every epoch has the "
                    "same order.",
                    site=fact.site,
                )
                break


def replicate_is_not(view: View, sets: Sets) -> Iterator[Sighting]:
    """Report a module input, or a DTensor, that is taken for replicated over a mesh but differs between its ranks."""
    windows = {rank: list(view.windows(rank)) for rank in view.facts}
    for number in range(min(map(len, windows.values()), default=0)):
        for rank, of_rank in windows.items():
            for i, fact in enumerate(of_rank[number].placements):
                if rank != fact.ranks[0] or not windows.keys() >= set(fact.ranks):
                    continue
                placements = {other: windows[other][number].placements for other in fact.ranks}
                if any(len(facts) != len(of_rank[number].placements) for facts in placements.values()):
                    continue
                vectors = {other: facts[i].vector for other, facts in placements.items()}
                if any(facts[i].shape != fact.shape for facts in placements.values()) or differ(vectors, 0.0):
                    text = f"The input of {fact.module} is declared Replicate()"
                    if fact.module == FROM_LOCAL:
                        text = f"{FROM_LOCAL} takes a plain tensor for the same on all ranks (Replicate())"
                    reason = f"{text}, but its values differ between {{ranks}}."
                    yield Sighting(SilentKind.REPLICATE_IS_NOT, fact.ranks, number + 1, reason, site=fact.site)
                    return


def _passes(view: View, ranks: Sequence[int]) -> Iterator[tuple[int, dict[int, EpochFact]]]:
    """Yield the passes of ranks over the data of one sampler each, with the step before which they began."""
    facts: dict[int, list[tuple[int, EpochFact]]] = {
        rank: [(number, one) for number, window in enumerate(view.windows(rank)) for one in window.epochs]
        for rank in ranks
    }
    for index in range(min(map(len, facts.values()), default=0)):
        of_pass = {rank: facts[rank][index][1] for rank in ranks}
        if len({fact.sampler for fact in of_pass.values()}) == 1:
            yield facts[ranks[0]][index][0], of_pass


def splits_differ(view: View, sets: Sets) -> Iterator[Sighting]:
    """Report data-parallel ranks that divide the data by samplers with different settings."""
    for _, ranks in _complete(view, sets):
        for number, facts in _passes(view, ranks):
            settings = {rank: _settings(fact) for rank, fact in facts.items()}
            names = [name for name in settings[ranks[0]] if len({one[name] for one in settings.values()}) > 1]
            if names:
                vote = majority({rank: settings[rank][names[0]] for rank in ranks})
                listed = ", ".join(f"{settings[rank][names[0]]} on rank {rank}" for rank in ranks[:8])
                reason = (
                    f"{ranks_text(ranks)} split the data differently: {names[0]} of the DistributedSampler is {listed}."
                )
                odd = ranks if vote.tie else vote.culprits
                yield Sighting(SilentKind.SPLITS_DIFFER, odd, number, reason, site=facts[odd[0]].site)
                break


def _settings(fact: EpochFact) -> Mapping[str, int]:
    settings = {"num_replicas": fact.replicas, "the length of the data": fact.size, "shuffle": int(fact.shuffles)}
    return {**settings, "seed": fact.seed, "epoch": fact.epoch} if fact.shuffles else settings


def samples_unseen(view: View, sets: Sets) -> Iterator[Sighting]:
    """Report parts of the data, as a DistributedSampler divides them, that no rank reads."""
    everyone = tuple(view.facts)
    for _, ranks in _complete(view, sets):
        for number, facts in _passes(view, everyone):
            first = facts[ranks[0]]
            parts = {fact.part for fact in facts.values()}
            if len({fact.replicas for fact in facts.values()}) > 1 or len(parts) >= first.replicas:
                continue
            missing = sorted(set(range(first.replicas)) - parts)
            reason = (
                f"The DistributedSampler divides {first.size} samples into {first.replicas} parts, and no rank reads "
                f"{'part' if len(missing) == 1 else 'parts'} {', '.join(map(str, missing[:8]))}."
            )
            yield Sighting(SilentKind.SAMPLES_UNSEEN, ranks, number, reason, site=first.site)
            break


def samples_overlap(view: View, sets: Sets) -> Iterator[Sighting]:
    """Report data-parallel ranks that read samples of each other, while others have divided the data."""
    for optimizer, ranks in _complete(view, sets):
        for number, facts in _passes(view, ranks):
            parts = {rank: (fact.part, fact.replicas) for rank, fact in facts.items()}
            twice = [rank for rank in ranks if list(parts.values()).count(parts[rank]) > 1]
            if (twice and len(twice) < len(ranks)) or (twice and parts[twice[0]][1] > 1):
                reason = (
                    f"{{ranks}} read the same part of the data: rank={parts[twice[0]][0]} of their DistributedSampler."
                )
                yield Sighting(SilentKind.SAMPLES_OVERLAP, tuple(twice), number, reason, site=facts[twice[0]].site)
                return
        yield from _overlap(view, optimizer, ranks)


def _overlap(view: View, optimizer: int, ranks: tuple[int, ...]) -> Iterator[Sighting]:
    passes = {rank: _read(view, optimizer, rank) for rank in ranks}
    for index in range(min(len(of_rank) for of_rank in passes.values())):
        read = {rank: passes[rank][index] for rank in ranks}
        shared = {(a, b): len(read[a][0] & read[b][0]) for a, b in combinations(ranks, 2)}
        alike = [p for p, count in shared.items() if count >= max(FEWEST, SHARED * min(len(read[r][0]) for r in p))]
        odd = set(alike[0]).intersection(*alike) if alike else set()
        own = alike if len(alike) == 1 else [pair for pair in shared if not odd.isdisjoint(pair)]
        others = [count for pair, count in shared.items() if pair not in own]
        if not odd or not others or max(others) > 1:  # a DistributedSampler repeats some at its end
            continue
        most = max(alike, key=lambda pair: shared[pair])
        first = min(odd)
        samples, number, site = read[first]
        reason = (
            f"{{ranks}} {are(sorted(odd), 'reads', 'read')} samples of other ranks: {shared[most]} of {len(samples)} "
            f"in one pass over the data are on ranks {most[0]} and {most[1]}, while other ranks share none."
        )
        yield Sighting(SilentKind.SAMPLES_OVERLAP, tuple(sorted(odd)), number, reason, site=site)
        return


def _read(view: View, optimizer: int, rank: int) -> list[tuple[set[int], int, Site | None]]:
    """Return the samples of each pass of a rank over its data, with the step and line at which the pass began.

    A pass ends where a sample comes again.
    """
    passes: list[tuple[set[int], int, Site | None]] = []
    for number, steps in view.steps_of(optimizer):
        for fact in steps[rank].window.inputs if rank in steps else ():
            if not passes or not passes[-1][0].isdisjoint(fact.samples):
                passes.append((set(), number, fact.site))
            passes[-1][0].update(fact.samples)
    return passes
