"""Replicas by hand-made facts: which ranks hold one value, and what breaks it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from distsim.debug.diagnosis.silent.facts import CallCount, ParameterFact, RankFacts, StepFact, TrainingPhase
from distsim.debug.diagnosis.silent.judge import judge
from distsim.debug.diagnosis.silent.view import SilentEvidence, View, clusters, replica_sets
from tests.silent.facts import run_of, vector


def ddp(rank: int, parameter: ParameterFact, steps: list[StepFact]) -> None:
    """DistributedDataParallel has the parameter on ranks 0 and 1."""
    parameter.ddp = (0, 1)


def reduced(op: str = "SUM") -> Callable[[int, ParameterFact, list[StepFact]], None]:
    """The parameter's own gradient is all-reduced over ranks 0 and 1."""

    def change(rank: int, parameter: ParameterFact, steps: list[StepFact]) -> None:
        for step in steps:
            call = CallCount("all_reduce", (0, 1), op, TrainingPhase.BETWEEN, by_torch=False, gradients={0})
            step.window.calls.append(call)

    return change


def kinds(facts: dict[int, RankFacts], *allowed: str) -> list[str]:
    return [finding.kind.value for finding in judge(facts, allowed)]


def test_replicas_that_stay_equal_are_no_finding() -> None:
    """Equal values before and after each step say nothing, and neither does the rounding of additions."""
    assert kinds(run_of({0: [1, 2, 2, 3], 1: [1, 2, 2, 3]}, change=ddp)) == []
    assert kinds(run_of({0: [1, 2, 2, 3], 1: [1, 2 + 1e-7, 2 + 1e-7, 3]}, change=ddp)) == []


def test_replicas_that_differ_after_a_step_diverge_once() -> None:
    """The first step that makes them differ is the finding; what follows from it is not reported again."""
    facts = run_of({0: [1, 2, 2, 3, 3, 4], 1: [1, 2, 2, 3.5, 3.5, 5]}, change=ddp)
    (finding,) = judge(facts)
    assert (finding.kind.value, finding.step, finding.tensors, finding.ranks) == ("replicas_diverge", 2, ("w",), (0, 1))
    assert finding.level.value == "error"


def test_a_divergence_below_a_hundredth_of_the_update_is_rounding() -> None:
    """Adam makes much of little: what is small beside the update is not accused."""
    assert kinds(run_of({0: [1, 2], 1: [1, 2.004]}, change=ddp)) == []
    assert kinds(run_of({0: [1, 2], 1: [1, 2.02]}, change=ddp)) == ["replicas_diverge"]


def test_unlike_starts_are_the_cause_of_what_diverges_later() -> None:
    """Where gradients are averaged, unlike values before the first step are one finding, of step 0."""
    (finding,) = judge(run_of({0: [1, 2, 2, 3], 1: [5, 6, 6, 7]}, change=reduced()))
    assert (finding.kind.value, finding.step) == ("replicas_differ_at_start", 0)


def test_parameters_that_nobody_says_are_replicas_may_differ() -> None:
    """Experts and stages begin unlike, and no gradient of theirs is reduced."""
    assert kinds(run_of({0: [1, 2, 2, 3], 1: [5, 6, 6, 7]})) == []


def test_a_change_between_steps_names_the_rank_that_moved() -> None:
    """Equal after step 1, unlike before step 2: the culprit is the rank whose value changed."""
    (finding,) = judge(run_of({0: [1, 2, 2, 3], 1: [1, 2, 9, 10]}, change=ddp))
    assert (finding.kind.value, finding.ranks, finding.step) == ("changed_outside_step", (1,), 1)


def test_a_change_in_steps_that_are_not_compared() -> None:
    """The rank that leaves the others between two compared steps is named, and local SGD is left alone."""

    def on_four(rank: int, parameter: ParameterFact, steps: list[StepFact]) -> None:
        parameter.ddp = (0, 1, 2, 3)
        steps[1].before, steps[1].after = {}, {}

    values = {rank: [1.0, 2.0, 2.0, 3.0, 3.0, 4.0] for rank in range(4)}
    assert kinds(run_of(values, change=on_four)) == []
    (finding,) = judge(run_of(values | {2: [1.0, 2.0, 2.0, 3.0, 3.5, 4.5]}, change=on_four))
    assert (finding.kind.value, finding.ranks, finding.step) == ("replicas_diverge", (2,), 2)
    assert "is equal after step 1 and differs on rank 2 before step 3" in finding.explanation
    assert kinds(run_of(values | {2: [1.0, 2.0, 2.0, 3.0, 3.001, 4.001]}, change=on_four)) == []
    each_its_own = {rank: [1.0, 2.0, 2.0, 3.0, 3.0 + rank, 4.0 + rank] for rank in range(4)}
    assert kinds(run_of(each_its_own, change=on_four)) == []


def test_a_change_that_all_replicas_make_is_their_own_affair() -> None:
    """A clamp on every rank keeps replicas equal."""
    assert kinds(run_of({0: [1, 2, 9, 10], 1: [1, 2, 9, 10]}, change=ddp)) == []


def test_unlike_learning_rates_are_the_cause_of_unlike_updates() -> None:
    """The finding is the learning rate, with its values, and not the divergence."""

    def change(rank: int, parameter: ParameterFact, steps: list[StepFact]) -> None:
        parameter.ddp = (0, 1)
        steps[0].hyperparameters[0] = (("lr", 0.1 if rank else 0.2),)

    (finding,) = judge(run_of({0: [1, 2], 1: [1, 3]}, change=change))
    assert finding.kind.value == "hyperparameter_differs"
    assert "0.2 on rank 0, 0.1 on rank 1" in finding.explanation


def _restored(*ranks: int) -> Callable[[int, ParameterFact, list[StepFact]], None]:
    def change(rank: int, parameter: ParameterFact, steps: list[StepFact]) -> None:
        parameter.ddp = (0, 1)
        steps[0].state[0] = {"exp_avg": vector(1.0)} if rank in ranks else {}

    return change


def test_state_that_was_restored_on_one_rank_is_a_finding() -> None:
    """Adam's moments before the first step belong on all replicas, or on none."""
    assert kinds(run_of({0: [1, 2], 1: [1, 3]}, change=_restored(0))) == ["optimizer_state_differs"]
    assert kinds(run_of({0: [1, 2], 1: [1, 2]}, change=_restored(0, 1))) == []


def test_a_rank_that_resumed_from_an_older_checkpoint_is_named_with_all_that_differs() -> None:
    """Its learning rate is another one, and so is its state, which no step with that rate has made."""

    def change(rank: int, parameter: ParameterFact, steps: list[StepFact]) -> None:
        parameter.ddp = (0, 1, 2)
        steps[0].state[0] = {"step": vector(40.0 if rank == 2 else 80.0)}
        steps[0].hyperparameters = {0: (("lr", 0.2 if rank == 2 else 0.1),)}

    found = judge(run_of({rank: [1.0, 2.0] for rank in range(3)}, change=change))
    assert [(one.kind.value, one.ranks) for one in found] == [
        ("hyperparameter_differs", (2,)),
        ("optimizer_state_differs", (2,)),
    ]
    assert found[0].explanation == "`lr` of the optimizer is 0.2 on rank 2, 0.1 on ranks 0,1."
    assert found[0].suggestion == "Set `lr` from values that all of ranks 0-2 have."


def test_zero_divides_the_state_and_is_not_accused() -> None:
    """Where each parameter's state lives on one rank, and several ranks have some, nothing was forgotten."""
    facts = run_of({0: [1, 2], 1: [1, 2]}, change=_restored(0))
    for rank, record in facts.items():
        record.parameters.append(ParameterFact("v", (16,), ddp=(0, 1)))
        step = record.steps[0]
        step.parameters, step.hyperparameters[1] = (0, 1), (("lr", 0.1),)
        step.before[1] = step.after[1] = vector(1.0)
        step.state[1] = {"exp_avg": vector(1.0)} if rank == 1 else {}
    assert kinds(facts) == []


@pytest.mark.parametrize(("local", "evidence"), [((3.0, 5.0), [SilentEvidence.EQUALIZED]), ((4.0, 4.0), [])])
def test_gradients_that_something_made_equal_show_replicas(
    local: tuple[float, float], evidence: list[SilentEvidence]
) -> None:
    """Local gradients that differ and final ones that agree were reduced, by any route; equal ones prove nothing."""

    def change(rank: int, parameter: ParameterFact, steps: list[StepFact]) -> None:
        steps[0].local[0] = [vector(local[rank])]

    view = View(run_of({0: [1, 2], 1: [1, 2]}, {0: [4.0], 1: [4.0]}, change))
    assert [one.evidence for sets in replica_sets(view).values() for one in sets] == evidence


def test_what_the_user_allows_is_not_reported() -> None:
    """A pattern names a kind and a tensor, with wildcards for both."""
    facts = run_of({0: [1, 2], 1: [1, 3]}, change=ddp, name="layer.experts.w")
    assert kinds(facts, "replicas_diverge:*.experts.*") == []
    assert kinds(facts, "*:*.w") == []
    assert kinds(facts, "same_batch:*") == ["replicas_diverge"]


@pytest.mark.parametrize(("step", "is_evidence"), [(1, True), (3, True), (4, False)])
def test_gradients_are_compared_in_the_first_three_steps_that_have_them(step: int, is_evidence: bool) -> None:
    """The steps that sketch all tensors show which gradients are made equal; later steps cost and add nothing."""

    def change(rank: int, parameter: ParameterFact, steps: list[StepFact]) -> None:
        for one in steps:
            one.local[0] = [vector(1.0 + rank)]

    gradients = {rank: [1.0 + rank] * 5 for rank in (0, 1)}
    for of_rank in gradients.values():
        of_rank[step - 1] = 1.5
    facts = run_of({0: [1.0] * 10, 1: [1.0] * 10}, gradients, change)
    sets = [one for of_key in replica_sets(View(facts)).values() for one in of_key]
    assert [one.evidence for one in sets] == [SilentEvidence.EQUALIZED] * is_evidence


def test_ranks_that_agree_are_grouped_by_the_first_of_them() -> None:
    """The largest group comes first, and equal sizes are in the order of their ranks."""
    vectors = {3: vector(2.0), 0: vector(1.0), 1: vector(2.0), 2: vector(1.0 + 1e-8), 4: vector(5.0), 5: vector(2.0)}
    assert clusters(vectors) == [(1, 3, 5), (0, 2), (4,)]
    assert clusters({}) == []
    assert clusters({0: vector(0.0), 1: vector(0.0)}) == [(0, 1)]
