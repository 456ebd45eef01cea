"""Checks of ranks that share a forward pass or a tensor: dropout, norms, tied weights, groups and parts."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from distsim.debug.diagnosis.silent.checks.gradients import REDUCED, clipped_before_reduction
from distsim.debug.diagnosis.silent.facts import LocalFact, Sighting, SilentKind, StepFact, Vector
from distsim.debug.diagnosis.silent.view import (
    EQUAL,
    ParameterKey,
    ReplicaSet,
    View,
    activation_groups,
    differ,
    distance,
    norm,
)
from distsim.debug.messages import site_text
from distsim.debug.records import Site

Sets = dict[ParameterKey, list[ReplicaSet]]
NORMS = 1e-3
"""Largest relative difference between the gradient norms by which ranks of one forward pass clip."""
OF_UPDATE = 1e-2


def _dropouts(view: View, sets: Sets, kind: SilentKind, has: str, then: str) -> Iterator[Sighting]:
    for group in activation_groups(view):
        if not _reduces_all(view, sets, group):
            yield from itertools.islice(_masks(view, group, kind, has, then), 1)


def _masks(view: View, group: tuple[int, ...], kind: SilentKind, has: str, then: str) -> Iterator[Sighting]:
    for step in view.order:
        steps = view.steps[step]
        facts = [steps[rank].window.dropouts for rank in group if rank in steps]
        if len(facts) < len(group) or any(len(of_rank) != len(facts[0]) for of_rank in facts):
            continue
        for i, first in enumerate(facts[0]):
            alike = [of_rank[i] for of_rank in facts]
            if any(one.shape != first.shape for one in alike):
                continue
            same_input = not differ({number: one.vector for number, one in enumerate(alike)})
            same_state = len({one.state for one in alike}) == 1
            if same_input != same_state and same_input == (kind is SilentKind.DROPOUT_DIFFERS):
                reason = f"The dropout at {first.site} has {has} on {{ranks}}, which share a forward pass: {then}."
                yield Sighting(kind, group, step[1], reason, site=steps[group[0]].site)


def _reduces_all(view: View, sets: Sets, group: tuple[int, ...], proven: bool = False) -> bool:
    """Return whether the gradients of all parameters are reduced over *group*; with *proven*, by calls on record, and
    not because equal copies get equal gradients.

    Such a group is data parallel although it exchanges activations, for example for a contrastive loss over the
    features of all ranks.
    """
    return all(
        any(
            one.evidence in REDUCED and (one.evidence.is_proof or not proven) and set(group) <= set(one.ranks)
            for one in sets.get(key, ())
        )
        for key, facts in view.parameters.items()
        if not facts.keys().isdisjoint(group)
    )


def shards_alike(view: View, sets: Sets) -> Iterator[Sighting]:
    """Report ranks that sum equal parts in every forward pass, as of weights that are split and were drawn alike."""
    for group in activation_groups(view):
        if _reduces_all(view, sets, group, proven=True):
            continue
        alike: dict[Site | None, set[bool]] = defaultdict(set)
        for step in view.order:
            steps = view.steps[step]
            sums = [[one for one in steps[r].window.sums if one.ranks == group] for r in group if r in steps]
            if len(sums) < len(group) or any(len(of_rank) != len(sums[0]) for of_rank in sums):
                continue
            for parts in zip(*sums, strict=True):
                vectors = {rank: part.vector for rank, part in zip(group, parts, strict=True)}
                if norm(vectors.values()):
                    alike[parts[0].site].add(not differ(vectors))
        for site in (site for site, are_alike in alike.items() if are_alike == {True}):
            yield Sighting(
                SilentKind.SHARDS_ALIKE,
                group,
                1,
                f"The parts that {{ranks}} sum at {site_text(site)} are equal in every forward pass: each of them "
                "computes what the others compute.",
                site=site,
            )


def dropout_differs(view: View, sets: Sets) -> Iterator[Sighting]:
    """Report ranks that drop copies of one activation with different masks."""
    has = "equal inputs and different random states"
    return _dropouts(view, sets, SilentKind.DROPOUT_DIFFERS, has, "copies of one activation get different masks")


def equal_dropout(view: View, sets: Sets) -> Iterator[Sighting]:
    """Report ranks that drop different parts of one activation with the same mask."""
    has = "different inputs and equal random states"
    return _dropouts(view, sets, SilentKind.EQUAL_DROPOUT, has, "parts of one activation get the same mask")


def clipped_by_local_norm(view: View, sets: Sets) -> Iterator[Sighting]:
    """Report ranks that clip by the norm of their own shard, or of their unreduced gradient, instead of the whole."""
    yield from clipped_before_reduction(view, sets)
    for group in activation_groups(view):
        for step in view.order:
            steps = view.steps[step]
            clips = {rank: steps[rank].window.clips[-1] for rank in group if rank in steps and steps[rank].window.clips}
            norms = [clip.norm for clip in clips.values() if clip.norm is not None and clip.is_plain]
            if len(norms) < len(group) or max(norms) <= min(clip.limit for clip in clips.values()):
                continue
            if max(norms) - min(norms) > NORMS * max(norms):
                yield Sighting(
                    SilentKind.CLIPPED_BY_LOCAL_NORM,
                    group,
                    step[1],
                    f"Gradients are clipped by norms that differ between {{ranks}} ({min(norms):.3g} to "
                    f"{max(norms):.3g}), which share a forward pass: each rank scales its part by a different factor.",
                    site=clips[group[0]].site,
                    suggestion="Clip by the norm of the whole model: add the squares of the parts over {ranks}, and "
                    "count what is replicated once.",
                )
                break


def tied_not_synchronized(view: View, sets: Sets) -> Iterator[Sighting]:
    """Report a weight that two pipeline stages share and that differs after the first step."""
    pairs = {
        tuple(sorted(call.ranks))
        for _, _, window in view.events()
        for call in window.calls
        if call.op in ("send", "recv") and len(call.ranks) == 2
    }
    for one, other in sorted(pair for pair in pairs if all(rank in view.facts for rank in pair)):
        yield from _untied(view, one, other)


def _untied(view: View, one: int, other: int) -> Iterator[Sighting]:
    first = {rank: [step for step in view.facts[rank].steps if step.number == 1] for rank in (one, other)}
    before = {rank: _all(first[rank], "before") for rank in first}
    ties = [
        (a, b)
        for a, vector in before[one].items()
        for b, twin in before[other].items()
        if _shape(view, one, a) == _shape(view, other, b)
        and not view.facts[one].parameters[a].constant
        and distance(vector, twin) <= EQUAL * norm([vector])
    ]
    if not ties or 2 * len(ties) > min(len(before[one]), len(before[other])):
        return  # stages that began from one seed
    after = {rank: _all(first[rank], "after") for rank in first}
    for a, b in ties:
        if a not in after[one] or b not in after[other]:
            continue
        update = max(distance(after[one][a], before[one][a]), distance(after[other][b], before[other][b]))
        apart = distance(after[one][a], after[other][b])
        if apart > max(OF_UPDATE * update, EQUAL * norm([after[one][a]])):
            names = view.facts[one].parameters[a].name, view.facts[other].parameters[b].name
            yield Sighting(
                SilentKind.TIED_NOT_SYNCHRONIZED,
                (one, other),
                1,
                "{tensor} were equal on {ranks}, two stages of a pipeline, before the first step, and are not "
                "after it: a tied weight whose gradients were not added up.",
                tensor=" and ".join(dict.fromkeys(names)),
                site=first[one][0].site,
                distance=apart / (update or 1.0),
            )


def _all(steps: Sequence[StepFact], role: str) -> Mapping[int, Vector]:
    return {number: vector for step in steps for number, vector in getattr(step, role).items()}


def _shape(view: View, rank: int, number: int) -> tuple[int, ...]:
    return view.facts[rank].parameters[number].shape


def group_ranks_sorted(view: View, sets: Sets) -> Iterator[Sighting]:
    """Report groups whose ranks torch has sorted, and in whose calls the order of ranks matters."""
    for _, number, window in view.events():
        for fact in window.groups:
            ranks = tuple(sorted(fact.ranks))
            reason = (
                f"new_group got the ranks {list(fact.ranks)} and sorted them: group rank 0 is rank {ranks[0]}, and "
                f"{fact.op} has its parts in the order {list(ranks)}."
            )
            yield Sighting(SilentKind.GROUP_RANKS_SORTED, ranks, number, reason, site=fact.site)


def parts_unlike_chunks(view: View, sets: Sets) -> Iterator[Sighting]:
    """Report a DTensor whose parts are not those that torch.chunk would give, or whose shape the ranks disagree on."""
    for rank, number, window in view.events():
        for index, fact in enumerate(window.parts):
            if rank != fact.ranks[0] or not view.facts.keys() >= set(fact.ranks):
                continue
            parts = [_part(view, other, number, index, fact) for other in fact.ranks]
            if None not in parts and (reason := _unlike([part for part in parts if part is not None])):
                yield Sighting(SilentKind.PARTS_UNLIKE_CHUNKS, fact.ranks, number, reason, site=fact.site)


def _part(view: View, rank: int, number: int, index: int, like: LocalFact) -> LocalFact | None:
    windows = list(view.windows(rank))
    parts = windows[number].parts if number < len(windows) else []
    part = parts[index] if index < len(parts) else None
    return part if part is not None and (part.ranks, part.dim) == (like.ranks, like.dim) else None


def _unlike(parts: Sequence[LocalFact]) -> str:
    """Return what is wrong with the parts of a DTensor; empty if torch takes them for what they are."""
    first = parts[0]
    sizes = [part.shape[first.dim] for part in parts]
    each = -(-sum(sizes) // len(sizes))
    chunks = [max(0, min(each, sum(sizes) - each * i)) for i in range(len(sizes))]
    shapes = ", ".join(str(list(part.shape)) for part in parts[:8])
    if sizes != chunks:
        return (
            f"The local shapes on {{ranks}} are {shapes}; Shard({first.dim}) means {chunks} rows there (torch.chunk)."
        )
    if any(part.whole is None for part in parts) and len(set(sizes)) > 1:
        whole = [part.shape[first.dim] * len(parts) for part in parts if part.whole is None]
        return f"The local shapes on {{ranks}} are {shapes}: without shape=, the ranks take the whole for {whole} rows."
    return ""
