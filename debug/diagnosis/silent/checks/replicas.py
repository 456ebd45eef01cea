"""Checks of replicas: parameters, buffers, hyperparameters and optimizer state that should be equal.

Parameters are compared before the first step, after each step, and between steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from distsim.debug.diagnosis.silent.facts import Severity, Sighting, SilentKind, StepFact, Vector
from distsim.debug.diagnosis.silent.view import (
    ParameterKey,
    ReplicaSet,
    View,
    clusters,
    differ,
    distance,
    norm,
    outvoted,
)
from distsim.debug.messages import ranks_text
from distsim.debug.report.stack_tree import merge_equal

OF_UPDATE = 1e-2
"""Largest difference of a parameter between replicas, as a fraction of its update in the step."""
OF_STATE = 1e-4
"""Largest difference of an optimizer moment between replicas, as a fraction of its norm."""
OF_BUFFER = 1e-4
"""Largest difference of a buffer between replicas, as a fraction of its norm."""
OWN = 1e-4
"""A gradient that differs from the rank's local gradient by less than this fraction of its norm was not reduced."""

Sets = dict[ParameterKey, list[ReplicaSet]]
Steps = Mapping[int, StepFact]


def _each(sets: Sets, guesses: bool = False) -> Iterator[tuple[ParameterKey, ReplicaSet]]:
    for key, of_key in sets.items():
        for one in of_key:
            if guesses or not one.evidence.is_guess:
                yield key, one


def _spread(vectors: Mapping[int, Vector]) -> float:
    first = next(iter(vectors.values()))
    return max(distance(first, vector) for vector in vectors.values())


def _hardware(ranks: Sequence[int]) -> str:
    return (
        f"If no line of the program does this, test the memory of {ranks_text(tuple(ranks))}: a bit may have flipped."
    )


def replicas_differ_at_start(view: View, sets: Sets) -> Iterator[Sighting]:
    """Report replicas whose parameters differ before the first step although their gradients are made equal."""
    for key, one in _each(sets):
        steps = view.steps.get((key.optimizer, 1), {})
        before = view.vectors("before", steps, key, one.ranks)
        if before is None or not differ(before):
            continue
        holders = [rank for rank in sorted(view.parameters[key]) if rank in steps]
        alike = [group for group in clusters(view.vectors("before", steps, key, holders) or before) if len(group) > 1]
        agree = ", and ".join(map(ranks_text, alike))
        reason = "The values of {tensor} on {ranks} differ before the first step"
        reason += f"; {agree} have equal values." if agree else "."
        yield Sighting(
            SilentKind.REPLICAS_DIFFER_AT_START,
            one.ranks,
            0,
            reason,
            tensor=key.name,
            site=steps[one.ranks[0]].site,
            evidence=one.evidence.sentence,
            distance=_spread(before) / (norm(before.values()) or 1.0),
        )


def replicas_diverge(view: View, sets: Sets) -> Iterator[Sighting]:
    """Report replicas that are equal before a step and differ after it."""
    for key, one in _each(sets, guesses=True):
        sighting = _divergence(view, key, one)
        if sighting is not None:
            yield sighting


def _divergence(view: View, key: ParameterKey, one: ReplicaSet) -> Sighting | None:
    sighting: Sighting | None = None
    equal_after = 0
    for number, steps in view.steps_of(key.optimizer):
        before = view.vectors("before", steps, key, one.ranks)
        after = view.vectors("after", steps, key, one.ranks)
        if before is None or after is None:
            continue
        update = max(distance(after[rank], before[rank]) for rank in one.ranks)
        if not differ(before):
            if sighting is not None and not one.evidence.is_proof:
                sighting = None  # the values have met again: local SGD
            if sighting is None and differ(after, OF_UPDATE * update):
                reason, suggestion = _why(view, key, one, steps)
                sighting = Sighting(
                    SilentKind.REPLICAS_DIVERGE,
                    one.ranks,
                    number,
                    reason,
                    tensor=key.name,
                    site=steps[one.ranks[0]].site,
                    evidence=one.evidence.sentence,
                    suggestion=suggestion,
                    level=Severity.ERROR if one.evidence.is_proof else Severity.WARNING,
                    distance=_spread(after) / (update or 1.0),
                    is_guess=one.evidence.is_guess,
                )
            equal_after = number if not differ(after) else 0
        elif sighting is None:  # else they differed before, which another check reports
            is_new = 0 < equal_after < number - 1 and one.evidence.is_proof and differ(before, OF_UPDATE * update)
            return _between(key, one, equal_after, number, steps, before) if is_new else None
    return sighting


def _between(
    key: ParameterKey, one: ReplicaSet, equal_after: int, number: int, steps: Steps, before: Mapping[int, Vector]
) -> Sighting | None:
    """Return the sighting of ranks that have left the others in steps in which the parameter was not compared."""
    odd = outvoted(before)
    if not odd:
        return None  # each goes its own way: local SGD
    return Sighting(
        SilentKind.REPLICAS_DIVERGE,
        odd,
        number - 1,
        f"{{tensor}} is equal after step {equal_after} and differs on {ranks_text(odd)} before step {number}. Between "
        "these it was not compared.",
        tensor=key.name,
        site=steps[one.ranks[0]].site,
        evidence=one.evidence.sentence.replace("{ranks}", ranks_text(one.ranks)),
        suggestion=f"Look for a change or an update that is made on {ranks_text(odd)} only. {_hardware(odd)}",
        level=Severity.ERROR,
        distance=_spread(before) / (norm(before.values()) or 1.0),
    )


def _why(view: View, key: ParameterKey, one: ReplicaSet, steps: Steps) -> tuple[str, str]:
    """Return the reason why the replicas diverged, and the suggestion."""
    gradients, local = view.vectors("gradients", steps, key, one.ranks), view.local(steps, key, one.ranks)
    reduce = "All-reduce the gradient of {tensor} over {ranks} before the step (call the DistributedDataParallel model "
    reduce += "itself, and end each accumulation outside of no_sync), or say that it may differ: "
    reduce += '--silent-allow "replicas_diverge:{first}".'
    if all(not step.gradients for step in steps.values()):
        return "The program itself updates {tensor}, and the updates differ between {ranks}.", reduce
    if gradients is None:
        without = [rank for rank in one.ranks if view.vectors("gradients", steps, key, [rank]) is None]
        return (
            f"Some ranks ({ranks_text(tuple(without))}) have no gradient of {{tensor}}, and the other ranks update it.",
            reduce,
        )
    if not differ(gradients, OWN * norm(gradients.values())):
        return (
            "The gradients of {tensor} are equal on {ranks}, but the updates are not: the optimizers differ.",
            "Give the optimizers of {ranks} the same settings and the same state.",
        )
    if local is not None and all(
        distance(gradients[rank], local[rank]) <= OWN * norm([local[rank]]) for rank in one.ranks
    ):
        return (
            "The gradient of {tensor} on each rank is that rank's own: no call made it equal before the step.",
            reduce,
        )
    if odd := outvoted(gradients, OWN):
        return (
            f"The gradient of {{tensor}} on {ranks_text(odd)} differs from that on the other ranks when the optimizer "
            "reads it.",
            f"{reduce} {_hardware(odd)}",
        )
    return "The gradients of {tensor} differ between {ranks} when the optimizer reads them.", reduce


def changed_outside_step(view: View, sets: Sets) -> Iterator[Sighting]:
    """Report replicas that are equal after a step and differ before the next one."""
    changes = list(_changes(view, sets))
    for change in changes:  # a bit flips in one tensor
        alone = sum(other.step == change.step for other in changes) == 1
        yield replace(change, suggestion=f"{change.suggestion} {_hardware(change.ranks)}") if alone else change


def _changes(view: View, sets: Sets) -> Iterator[Sighting]:
    for key, one in _each(sets):
        last: tuple[int, Mapping[int, Vector]] | None = None
        for number, steps in view.steps_of(key.optimizer):
            before = view.vectors("before", steps, key, one.ranks)
            if last is not None and before is not None and last[0] == number - 1:
                if not differ(last[1]) and differ(before):
                    moved = tuple(rank for rank in one.ranks if differ({0: last[1][rank], 1: before[rank]}))
                    yield Sighting(
                        SilentKind.CHANGED_OUTSIDE_STEP,
                        moved,
                        number - 1,
                        f"{{tensor}} changed on {ranks_text(moved)} after step {number - 1} and before step {number}, "
                        "outside of the optimizer, and the replicas are no longer equal.",
                        tensor=key.name,
                        site=steps[one.ranks[0]].site,
                        evidence=one.evidence.sentence.replace("{ranks}", ranks_text(one.ranks)),
                        suggestion="Make the change on every rank, or on one and broadcast it: averaged weights that "
                        "are copied back, say, or a checkpoint that one rank loads.",
                        distance=_spread(before) / (norm(before.values()) or 1.0),
                    )
                    break
            after = view.vectors("after", steps, key, one.ranks)
            last = None if after is None else (number, after)


def hyperparameter_differs(view: View, sets: Sets) -> Iterator[Sighting]:
    """Report replicas, or shards of one parameter, whose optimizers have different hyperparameters."""
    for optimizer, name, numbers_of, sentence in (*_replicated(view, sets), *_divided(view)):
        ranks = tuple(sorted(numbers_of))
        for number, steps in view.steps_of(optimizer, ranks):
            settings = {
                rank: steps[rank].hyperparameters[numbers_of[rank]]
                for rank in ranks
                if numbers_of[rank] in steps[rank].hyperparameters  # another optimizer's step lacks it
            }
            if len(settings) < len(ranks):
                continue
            first = settings[ranks[0]]
            if all(of_rank == first for of_rank in settings.values()):
                continue
            numbers = {rank: dict(of_rank) for rank, of_rank in settings.items()}
            unlike = _unlike(numbers)
            if unlike:
                groups = merge_equal({rank: numbers[rank].get(unlike) for rank in ranks})  # the largest is the last
                values = ", ".join(f"{value} on {ranks_text(some)}" for some, value in groups[:4])
                odd = tuple(rank for some, _ in groups[:-1] for rank in some)
                yield Sighting(
                    SilentKind.HYPERPARAMETER_DIFFERS,
                    tuple(sorted(odd)) if 2 * len(odd) < len(ranks) else ranks,
                    number,
                    f"`{unlike}` of the optimizer is {values}.",
                    tensor=name,
                    site=steps[ranks[0]].site,
                    evidence=sentence.replace("{ranks}", ranks_text(ranks)),
                    suggestion=f"Set `{unlike}` from values that all of {ranks_text(ranks)} have.",
                )
                break


def _replicated(view: View, sets: Sets) -> Iterator[tuple[int, str, dict[int, int], str]]:
    """Yield optimizer, name, index on each rank, and evidence sentence of each replicated parameter."""
    for key, one in _each(sets):
        yield key.optimizer, key.name, {rank: view.numbers[rank][key] for rank in one.ranks}, one.evidence.sentence


def _divided(view: View) -> Iterator[tuple[int, str, dict[int, int], str]]:
    """Yield the same fields for each parameter that FSDP shards, whatever the shapes of the shards."""
    places: dict[tuple[int, str, tuple[int, ...]], dict[int, int]] = {}
    for key, facts in view.parameters.items():
        for rank, fact in facts.items():
            if fact.fsdp and not fact.varies:
                places.setdefault((key.optimizer, key.name, fact.fsdp), {})[rank] = view.numbers[rank][key]
    for (optimizer, name, ranks), of_rank in places.items():
        if of_rank.keys() == set(ranks) and len(ranks) > 1:
            yield optimizer, name, of_rank, "{ranks} hold parts of {tensor}."


def _unlike(numbers: Mapping[int, Mapping[str, float]]) -> str:
    """Return the name of the first hyperparameter that differs between ranks, or an empty string."""
    first, *others = numbers.values()
    for name, value in first.items():
        if any(name in other and abs(other[name] - value) > 1e-12 * abs(value) for other in others):
            return name
    return ""


def optimizer_state_differs(view: View, sets: Sets) -> Iterator[Sighting]:
    """Report replicas whose optimizers start a step with different moments or step counts."""
    for key, one in _each(sets):
        equal_at = 0
        for number, steps in view.steps_of(key.optimizer, one.ranks):
            if not all(steps[rank].owns_state for rank in one.ranks):
                continue
            states = {rank: steps[rank].state.get(view.numbers[rank][key]) for rank in one.ranks}
            name, vectors = _unlike_state(states, number)
            if name and _is_spread(view, steps, one.ranks, key.optimizer):
                break
            if name:
                yield _state_sighting(view, key, one, number, name, vectors, equal_at)
                break
            equal_at = number


def _unlike_state(states: Mapping[int, Mapping[str, Vector] | None], number: int) -> tuple[str, Mapping[int, Vector]]:
    """Return the name of the first state entry that differs, and its sketches by rank; both empty if none differs."""
    known = {rank: state for rank, state in states.items() if state is not None}
    if len(known) < len(states):
        return "", {}
    for name in sorted({name for state in known.values() for name in state}):
        vectors = {rank: state[name] for rank, state in known.items() if name in state}
        if len(vectors) < len(known):
            if number == 1:
                return name, vectors
            continue
        if differ(vectors, OF_STATE * norm(vectors.values())):
            return name, vectors
    return "", {}


def _state_sighting(
    view: View,
    key: ParameterKey,
    one: ReplicaSet,
    number: int,
    name: str,
    vectors: Mapping[int, Vector],
    equal_at: int,
) -> Sighting:
    """Return the sighting of a state entry that differs before step *number*, and was equal before step *equal_at*."""
    last = view.steps.get((key.optimizer, number - 1), {}) if equal_at == number - 1 else {}
    ranks, step, everyone = one.ranks, number, ranks_text(one.ranks)
    entry = f"`{name}` of {{tensor}} in the optimizer's state"
    reason = f"{entry} differs between {everyone}."
    suggestion = f"Load the optimizer's state on all of {everyone}, or on none."
    after, gradients = view.vectors("after", last, key, one.ranks), view.vectors("gradients", last, key, one.ranks)
    if len(vectors) < len(ranks):
        reason = f"`{name}` of {{tensor}} exists before the first step only on {ranks_text(tuple(vectors))}."
    elif odd := outvoted(vectors, OF_STATE):
        ranks, who = odd, ranks_text(odd)
        reason = f"{entry} differs on {who} from that on the other ranks."
        if equal_at:
            reason = f"{entry} is equal before step {equal_at}, and differs on {who} before step {number}."
            suggestion = f"Look for code that writes to the optimizer's state on {who} only. {_hardware(odd)}"
        if gradients is not None and outvoted(gradients, OWN) == odd:
            step = number - 1
            reason = (
                f"The gradient of {{tensor}} on {who} differs from that on the other ranks when the optimizer reads "
            )
            reason += f"it, and so does `{name}` in its state."
            suggestion = f"Make the gradient of {{tensor}} equal on {everyone} before the step. {_hardware(odd)}"
        elif after is not None and not differ(after):
            step = number - 1
            reason = f"{entry} changed on {who} after step {step} and before step {number}, outside of the optimizer."
    return Sighting(
        SilentKind.OPTIMIZER_STATE_DIFFERS,
        ranks,
        step,
        reason,
        tensor=key.name,
        site=view.steps[key.optimizer, number][one.ranks[0]].site,
        evidence=one.evidence.sentence.replace("{ranks}", everyone),
        suggestion=suggestion,
    )


def _is_spread(view: View, steps: Steps, ranks: Sequence[int], optimizer: int) -> bool:
    """Return whether the state is sharded as in ZeRO: each parameter's state is on one rank, and several ranks have
    some.
    """
    owners = set()
    for key, facts in view.parameters.items():
        if key.optimizer != optimizer or any(rank not in facts for rank in ranks):
            continue
        having = [rank for rank in ranks if steps[rank].state.get(view.numbers[rank][key])]
        if len(having) > 1:
            return False
        owners.update(having)
    return len(owners) > 1


def buffers_differ(view: View, sets: Sets) -> Iterator[Sighting]:
    """Report buffers, and parameters without a gradient, that DistributedDataParallel made equal at the start and that
    differ from some step on.
    """
    apart: dict[tuple[str, tuple[int, ...]], tuple[int, dict[int, Vector]]] = {}
    began_equal: set[tuple[str, tuple[int, ...]]] = set()
    for _, number in view.order:
        for key, vectors in _buffers(view, number).items():
            if not differ(vectors, OF_BUFFER * norm(vectors.values())):
                began_equal.add(key)
                apart.pop(key, None)  # they have met again
            elif key in began_equal:
                apart.setdefault(key, (number, vectors))
    last = view.order[-1][1] if view.order else 0
    for (name, ranks), (number, vectors) in apart.items():
        if number < last:  # twice in turn
            yield Sighting(
                SilentKind.BUFFERS_DIFFER,
                ranks,
                number,
                "The values of {tensor}, which no gradient reaches, were equal on {ranks}, the replicas of "
                "DistributedDataParallel, and from this step on each rank has its own.",
                tensor=name,
                distance=_spread(vectors) / (norm(vectors.values()) or 1.0),
            )


def _buffers(view: View, number: int) -> dict[tuple[str, tuple[int, ...]], dict[int, Vector]]:
    """Return the buffers of step *number* by name and ranks, as the first forward pass of the step read them.

    With gradient accumulation, DDP does not synchronize buffers in the later forward passes.
    """
    buffers: dict[tuple[str, tuple[int, ...]], dict[int, Vector]] = {}
    for (_, of_step), steps in view.steps.items():
        for rank, step in steps.items() if of_step == number else ():
            for fact in step.window.buffers:
                buffers.setdefault((fact.name, fact.ranks), {}).setdefault(rank, fact.vector)
    return {key: vectors for key, vectors in buffers.items() if set(key[1]) == vectors.keys()}


def unsharded_write_lost(view: View, sets: Sets) -> Iterator[Sighting]:
    """Report a parameter that the program wrote to while fully_shard had gathered it; the write is lost."""
    reason = "{tensor} was written to while fully_shard had gathered it. That memory is freed: the shards, which are "
    reason += "trained and saved, do not have the change."
    for rank, number, window in view.events():
        for name in window.lost_writes:
            yield Sighting(SilentKind.UNSHARDED_WRITE_LOST, (rank,), number + 1, reason, tensor=name)
