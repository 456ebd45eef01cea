"""Scale, inputs, calls and shared forward passes by hand-made facts, each with the look-alike that is no fault."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from distsim.debug.diagnosis.silent.facts import (
    CallCount,
    ClipFact,
    DropoutFact,
    EpochFact,
    InputFact,
    LossFact,
    ParameterFact,
    RankFacts,
    StepFact,
    TrainingPhase,
)
from distsim.debug.diagnosis.silent.judge import judge
from tests.silent.facts import run_of, vector

STEPS = 4
EQUAL = [1.0] * 2 * STEPS


def kinds(change: Callable[[int, ParameterFact, list[StepFact]], None], gradient: float = 2.0) -> list[str]:
    """The kinds of findings of two ranks that stay equal, under DDP, after *change* has edited what each recorded."""

    def both(rank: int, parameter: ParameterFact, steps: list[StepFact]) -> None:
        parameter.ddp = (0, 1)
        change(rank, parameter, steps)

    facts = run_of({0: EQUAL, 1: EQUAL}, {rank: [gradient] * STEPS for rank in (0, 1)}, both)
    return [finding.kind.value for finding in judge(facts)]


def _with_loss(micro: int, weight: float, targets: tuple[int, int] = (8, 8), reduction: str = "mean", other: int = 0):
    """Local gradients of 1 and 3 times *weight* in each micro-batch, and the losses that they come from."""

    def change(rank: int, parameter: ParameterFact, steps: list[StepFact]) -> None:
        for step in steps:
            step.local[0] = [vector((1 + 2 * rank) * weight)] * micro
            losses = [LossFact(reduction, targets[rank], weight, counts_tokens=True) for _ in range(micro)]
            step.window.losses = losses + [LossFact("none", 0)] * other

    return change


@pytest.mark.parametrize(
    ("micro", "weight", "gradient", "expected"),
    [
        (1, 1.0, 2.0, []),
        (1, 0.5, 1.0, ["gradient_scale"]),
        (1, 1.0, 4.0, ["gradient_scale"]),
        (4, 0.25, 2.0, []),
        (4, 1.0, 8.0, ["gradient_scale"]),
        (1, 0.7, 1.4, []),
    ],
    ids=["mean", "divided twice", "sum for mean", "accumulated", "accumulated without a mean", "an own factor"],
)
def test_the_scale_is_reported_where_a_number_of_ranks_or_batches_explains_it(
    micro: int, weight: float, gradient: float, expected: list[str]
) -> None:
    """The weight of all losses times what the sum of local gradients was multiplied by is 1, or is explained."""
    assert kinds(_with_loss(micro, weight), gradient) == expected


def test_an_unknown_loss_or_clipping_leaves_the_scale_open() -> None:
    """An auxiliary loss, and gradients that were clipped, make any number of it."""
    assert kinds(_with_loss(1, 0.5, other=1), 1.0) == []

    def clipped(rank: int, parameter: ParameterFact, steps: list[StepFact]) -> None:
        _with_loss(1, 0.5)(rank, parameter, steps)
        for step in steps:
            step.window.clips = [ClipFact(1.0, 5.0, is_plain=True)]

    assert kinds(clipped, 1.0) == []


def test_means_over_unlike_counts_weigh_targets_differently() -> None:
    """A mean over 4 targets on one rank and over 12 on the other; sums weigh all alike."""
    assert kinds(_with_loss(1, 1.0, (4, 12))) == ["tokens_weigh_differently"]
    assert kinds(_with_loss(1, 1.0, (4, 12), "sum")) == []
    assert kinds(_with_loss(1, 1.0, (8, 8))) == []


def test_one_parameter_that_is_scaled_differently_is_named() -> None:
    """Two parameters are averaged and a third is summed."""

    def change(rank: int, parameter: ParameterFact, steps: list[StepFact]) -> None:
        for step in steps:
            step.local[0] = [vector(1.0 + 2 * rank)]

    facts = run_of({0: EQUAL, 1: EQUAL}, {rank: [2.0] * STEPS for rank in (0, 1)}, change)
    for record in facts.values():
        for number, (name, gradient) in enumerate((("a", 2.0), ("b", 4.0)), start=1):
            record.parameters.append(ParameterFact(name, (16,)))
            for step in record.steps:
                step.parameters += (number,)
                step.hyperparameters[number] = step.hyperparameters[0]
                step.before[number] = step.after[number] = vector(1.0)
                step.local[number], step.gradients[number] = step.local[0], vector(gradient)
    (finding,) = judge(facts)
    assert (finding.kind.value, finding.tensors) == ("mixed_scale", ("b",))


def _inputs(*values: tuple[float, float], constant: bool = False):
    def change(rank: int, parameter: ParameterFact, steps: list[StepFact]) -> None:
        for step, pair in zip(steps, values, strict=True):
            fact = InputFact("Net", training=True, shapes=((16,),), vectors=(vector(pair[rank]),), constant=constant)
            step.window.inputs = [fact]

    return change


def test_equal_batches_in_every_step_are_a_finding() -> None:
    """One unlike batch, a constant, or one batch for ever (a benchmark's) says that nobody forgot a sampler."""
    assert kinds(_inputs((1, 1), (2, 2), (3, 3), (4, 4))) == ["same_batch"]
    assert kinds(_inputs((1, 1), (2, 2), (3, 3), (4, 5))) == []
    assert kinds(_inputs((1, 1), (2, 2), (3, 3), (4, 4), constant=True)) == []
    assert kinds(_inputs((1, 1), (1, 1), (1, 1), (1, 1))) == []


def _in_forward(op: str = "all_gather") -> CallCount:
    return CallCount(op, (0, 1), None, TrainingPhase.FORWARD, by_torch=False, count=1, largest=64)


def test_ranks_that_exchange_activations_may_read_one_batch() -> None:
    """Sequence parallelism all-reduces gradients over ranks that share their batch."""

    def change(rank: int, parameter: ParameterFact, steps: list[StepFact]) -> None:
        _inputs((1, 1), (2, 2), (3, 3), (4, 4))(rank, parameter, steps)
        parameter.ddp = ()
        for step in steps:
            reduction = CallCount("all_reduce", (0, 1), "SUM", TrainingPhase.REDUCTION, by_torch=False, gradients={0})
            step.window.calls = [_in_forward(), reduction]

    assert kinds(change) == []


def test_one_rank_in_evaluation_mode_is_a_finding() -> None:
    """The same call of the same model, with `training` on one rank alone."""

    def change(rank: int, parameter: ParameterFact, steps: list[StepFact]) -> None:
        steps[0].window.inputs = [InputFact("Net", rank == 0, ((16,),), (vector(rank),), constant=False)]

    assert kinds(change) == ["mode_differs"]


def test_an_order_that_is_used_three_times_is_a_finding() -> None:
    """Twice may be a look at a batch before training, as may any number of passes before a step (MACE's statistics)."""

    def change(times: int, passes: int = 1) -> Callable[[int, ParameterFact, list[StepFact]], None]:
        def edit(rank: int, parameter: ParameterFact, steps: list[StepFact]) -> None:
            for step in steps[:times]:
                step.window.epochs = [EpochFact(0, 0)] * passes

        return edit

    assert kinds(change(3)) == ["epochs_alike"]
    assert kinds(change(2)) == kinds(change(1, passes=4)) == []


def test_the_maximum_of_gradients_is_no_reduction() -> None:
    """MAX on a `.grad` is an error; MAX on anything else (a norm, a flag) is the program's affair."""

    def change(gradients: set[int]) -> Callable[[int, ParameterFact, list[StepFact]], None]:
        def edit(rank: int, parameter: ParameterFact, steps: list[StepFact]) -> None:
            call = CallCount("all_reduce", (0, 1), "MAX", TrainingPhase.REDUCTION, by_torch=False, gradients=gradients)
            steps[0].window.calls = [call]

        return edit

    assert kinds(change({0})) == ["gradient_reduce_op"]
    assert kinds(change(set())) == []


def test_two_steps_without_a_gradient_train_nothing() -> None:
    """One may be a warm-up of the optimizer."""

    def change(steps_without: int) -> Callable[[int, ParameterFact, list[StepFact]], None]:
        def edit(rank: int, parameter: ParameterFact, steps: list[StepFact]) -> None:
            for step in steps[:steps_without]:
                step.without_gradient = 1

        return edit

    assert kinds(change(2)) == ["step_without_gradients"]
    assert kinds(change(1)) == []


@pytest.mark.parametrize(
    ("inputs", "states", "expected"),
    [
        ((1.0, 1.0), (5, 6), ["dropout_differs"]),
        ((1.0, 1.0), (5, 5), []),
        ((1.0, 2.0), (5, 6), []),
        ((1.0, 2.0), (5, 5), ["equal_dropout"]),
    ],
    ids=["copies, other masks", "copies, one mask", "shards, other masks", "shards, one mask"],
)
def test_copies_have_one_mask_and_shards_have_others(
    inputs: tuple[float, float], states: tuple[int, int], expected: list[str]
) -> None:
    """Among ranks that share a forward pass; data-parallel ranks do not."""

    def change(rank: int, parameter: ParameterFact, steps: list[StepFact]) -> None:
        parameter.ddp = ()
        steps[0].window.calls = [_in_forward()]
        steps[0].window.dropouts = [DropoutFact(states[rank], vector(inputs[rank]), (16,))]

    assert kinds(change) == expected


def test_norms_of_parts_clip_each_part_differently() -> None:
    """Ranks that share a forward clip by one norm; below the limit nothing is clipped."""

    def change(norms: tuple[float, float]) -> Callable[[int, ParameterFact, list[StepFact]], None]:
        def edit(rank: int, parameter: ParameterFact, steps: list[StepFact]) -> None:
            parameter.ddp = ()
            steps[0].window.calls = [_in_forward()]
            steps[0].window.clips = [ClipFact(1.0, norms[rank], is_plain=True)]

        return edit

    assert kinds(change((2.0, 3.0))) == ["clipped_by_local_norm"]
    assert kinds(change((2.0, 2.0))) == []
    assert kinds(change((0.2, 0.3))) == []


def _shared(constant: bool = False, op: str = "all_gather") -> dict[int, RankFacts]:
    """A parameter that began equal and drifts apart, on ranks that exchange activations."""

    def change(rank: int, parameter: ParameterFact, steps: list[StepFact]) -> None:
        parameter.constant = constant
        steps[0].window.calls = [_in_forward(), _in_forward(op)]

    return run_of({0: [1, 2], 1: [1, 3]}, change=change)


def test_what_began_equal_on_ranks_that_share_a_forward_should_stay_so() -> None:
    """A norm under sequence parallelism is a warning; experts behind an all_to_all may drift."""
    (finding,) = judge(_shared())
    assert (finding.kind.value, finding.level.value) == ("replicas_diverge", "warning")
    assert judge(_shared(op="all_to_all_single")) == []


def test_zeros_count_only_where_their_whole_module_began_equal() -> None:
    """The zero bias of a column-parallel weight is a shard."""
    assert [finding.kind.value for finding in judge(_shared(constant=True))] == ["replicas_diverge"]
    facts = _shared(constant=True)
    for rank, record in facts.items():
        record.parameters.append(ParameterFact("weight", (16,)))
        step = record.steps[0]
        step.parameters, step.hyperparameters[1] = (0, 1), step.hyperparameters[0]
        step.before[1] = step.after[1] = vector(rank)
    assert judge(facts) == []


@pytest.mark.parametrize(("name", "expected"), [("other", ["tied_not_synchronized"]), ("shared", [])])
def test_a_weight_of_two_stages_is_tied_and_a_stage_from_the_same_seed_is_not(name: str, expected: list[str]) -> None:
    """Where one parameter of three is equal on two stages it is tied; where all are, they began from one seed."""
    facts = run_of({0: [1, 2], 1: [1, 3]})
    for rank, record in facts.items():
        step = record.steps[0]
        step.window.calls = [CallCount("send", (0, 1), None, TrainingPhase.BETWEEN, by_torch=False, count=1)]
        for number in (1, 2):
            record.parameters.append(ParameterFact(f"{name}{number}", (16,)))
            step.parameters += (number,)
            step.hyperparameters[number] = step.hyperparameters[0]
            value = 10.0 * number + (0 if name == "shared" else rank + 1)
            step.before[number], step.after[number] = vector(value), vector(value + 1)
    assert [finding.kind.value for finding in judge(facts)] == expected


def test_outputs_that_share_memory_are_an_error() -> None:
    """Each holds what came last, whatever the loss is made of."""

    def change(rank: int, parameter: ParameterFact, steps: list[StepFact]) -> None:
        steps[0].window.aliased = [("all_gather", (0, 1), None)]

    assert kinds(change) == ["aliased_outputs"]
