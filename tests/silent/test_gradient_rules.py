"""How gradients were reduced, and what shared a step: each rule on the fewest facts that tell it from its like."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from distsim.debug.diagnosis.silent.checks import gradients as checks
from distsim.debug.diagnosis.silent.checks import inputs, model_parallel
from distsim.debug.diagnosis.silent.facts import (
    CallCount,
    ClipFact,
    DropoutFact,
    EpochFact,
    InputFact,
    LossFact,
    ParameterFact,
    PlacementFact,
    RankFacts,
    Sighting,
    StepFact,
    SumFact,
    TrainingPhase,
    Vector,
)
from distsim.debug.diagnosis.silent.view import ParameterKey, ReplicaSet, SilentEvidence, View

KEY = ParameterKey(0, "w", (16,))
FORWARD = TrainingPhase.FORWARD


def v(*values: float) -> Vector:
    """A sketch that begins with *values*."""
    return np.array([*values, *[0.0] * (16 - len(values))])


def run(steps: int = 2, ranks: Sequence[int] = (0, 1), names: Sequence[str] = ("w",)) -> dict[int, RankFacts]:
    parameters = [ParameterFact(name, (16,)) for name in names]
    return {
        rank: RankFacts(rank, list(parameters), [StepFact(0, n + 1, tuple(range(len(names)))) for n in range(steps)])
        for rank in ranks
    }


def sets_of(view: View, evidence: SilentEvidence = SilentEvidence.DDP) -> dict[ParameterKey, list[ReplicaSet]]:
    return {key: [ReplicaSet(key, tuple(view.facts), evidence)] for key in view.parameters}


def seen(facts: Mapping[int, RankFacts], check: Callable[..., Any], **kw: Any) -> list[Sighting]:
    view = View(facts)
    return list(check(view, sets_of(view, **kw)))


def put(facts: Mapping[int, RankFacts], *, local: Any, final: Any, parameter: int = 0) -> dict[int, RankFacts]:
    """Local gradients of each step, rank and micro-batch, and the gradient that the optimizer finds."""
    for number in range(len(facts[0].steps)):
        for rank, record in facts.items():
            step = record.steps[number]
            step.local[parameter] = [v(*one) for one in local(number, rank)]
            step.gradients[parameter] = v(*final(number))
    return dict(facts)


# --- factors


@pytest.mark.parametrize(
    ("goal", "parts", "weights"),
    [
        (v(2.0), [v(1.0)], [2.0]),
        (v(2.0, 3.0), [v(1.0), v(0.0, 1.0)], [2.0, 3.0]),
        (v(2.0, 0.0, 0.5), [v(1.0), v(0.0, 1.0)], None),
        (v(1.0, 0.009), [v(1.0)], [1.0]),
        (v(1.0, 0.02), [v(1.0)], None),
        (v(2.0), [v(1.0), v(2.0)], None),
        (v(0.0), [v(1.0)], None),
        (v(1.0), [v(0.0)], None),
    ],
)
def test_factors_of_a_sum(goal: Vector, parts: list[Vector], weights: list[float] | None) -> None:
    """Where the parts add up to it within a hundredth, and in one way."""
    found = checks._weights(goal, parts)
    assert (None if found is None else found.tolist()) == (None if weights is None else pytest.approx(weights))


@pytest.mark.parametrize(
    ("scale", "ranks", "micro", "text"),
    [(1.0, 2, 4, ""), (2.0, 2, 4, "2 (the ranks)"), (0.5, 2, 4, "1/2 (the ranks)"),
     (4.0, 2, 4, "4 (the micro-batches)"),
     (8.0, 2, 4, "8 (ranks and micro-batches)"), (0.125, 2, 4, "1/8 (ranks and micro-batches)"), (2.05, 2, 4, ""),
     (2.03, 2, 4, "2 (the ranks)"), (0.505, 2, 4, "1/2 (the ranks)"), (0.515, 2, 4, ""), (1.0, 1, 1, ""),
     (3.0, 2, 4, "")],
)  # fmt: skip
def test_numbers_that_explain_a_scale(scale: float, ranks: int, micro: int, text: str) -> None:
    """Within a fiftieth; one rank explains nothing."""
    assert checks._explained(scale, ranks, micro) == text


@pytest.mark.parametrize(
    ("losses", "micro", "known"),
    [
        ([("mean", 1.0)], 1, 1),
        ([("mean", 1.0)], 2, None),
        ([("mean", 1.0), ("sum", 1.0)], 2, 2),
        ([("mean", 1.0), ("mean", None)], 1, 1),
        ([("none", None)], 1, None),
        ([("none", 1.0), ("mean", 1.0)], 2, None),
    ],
)
def test_losses_of_a_step(losses: list[tuple[str, float | None]], micro: int, known: int | None) -> None:
    """One a micro-batch, each with a weight; one that backward did not reach does not count."""
    facts = run(1)
    for record in facts.values():
        record.steps[0].window.losses = [LossFact(reduction, 4, weight) for reduction, weight in losses]
    found = checks._losses({rank: record.steps[0] for rank, record in facts.items()}, (0, 1), micro)
    assert (None if found is None else len(found)) == (None if known is None else 2 * known)


SCALES: list[tuple[str, float, dict[str, Any], str | None]] = [
    # factor of the sum of all local gradients -> what the gradient is of that of the mean loss
    ("the mean", 0.5, {}, None),
    ("the sum", 1.0, {}, "2 (the ranks)"),
    ("divided twice", 0.25, {}, "1/2 (the ranks)"),
    ("of a sum over targets", 0.125, {"reduction": "sum", "weight": 1.0, "targets": 4}, None),
    ("of weighted losses", 1.0, {"weight": 0.5}, None),
    ("but clipped", 1.0, {"clips": True}, None),
    ("once only", 1.0, {"steps": 1}, None),
    ("a rank without the step", 1.0, {"missing": True}, None),
    ("an unknown loss", 1.0, {"weight": None}, None),
    ("in several micro-batches", 1.0, {"micro": 2, "weight": 0.5}, "2 (the ranks)"),
    ("of a mean of means", 1.0, {"micro": 2, "weight": 1.0}, "4 (ranks and micro-batches)"),
]


@pytest.mark.parametrize(("law", "factor", "facts_", "text"), SCALES, ids=[row[0] for row in SCALES])
def test_the_scale_of_gradients(law: str, factor: float, facts_: dict[str, Any], text: str | None) -> None:
    """Two steps must show the same number."""
    micro = facts_.get("micro", 1)
    facts = put(
        run(facts_.get("steps", 2)),
        local=lambda n, rank: [(1.0 + rank, n + 1.0)] * micro,
        final=lambda n: (3.0 * micro * factor, 2 * (n + 1.0) * micro * factor),
    )
    for record in facts.values():
        for step in record.steps:
            loss = LossFact(facts_.get("reduction", "mean"), facts_.get("targets", 4), facts_.get("weight", 1.0))
            step.window.losses = [loss] * micro
            step.window.clips = [ClipFact(1.0, 1.0, True)] * bool(facts_.get("clips"))
    if facts_.get("missing"):
        del facts[1].steps[0]
    found = seen(facts, checks.gradient_scale)
    assert [one.reason.partition(" is ")[2].partition(" times")[0] for one in found] == [text] * (text is not None)
    assert all((one.step, one.ranks) == (1, (0, 1)) for one in found)
    assert seen(facts, checks.gradient_scale, evidence=SilentEvidence.BULK) == []


def test_one_parameter_that_is_reduced_differently() -> None:
    """By half as much again as the middle one, in two steps in turn."""
    for factor, named in ((1.4, []), (1.6, ["c"]), (0.7, []), (0.6, ["c"])):
        facts = run(2, names="abc")
        for number, one in enumerate((1.0, 1.0, factor)):
            put(
                facts,
                local=lambda n, rank: [(1.0 + rank, n)],
                final=lambda n, f=one: (3 * f, 2 * n * f),
                parameter=number,
            )
        found = seen(facts, checks._mixed_parameters)
        assert [(one.tensor, one.step) for one in found] == [(name, 2) for name in named]
        assert all(f"{factor:.3g} times as large" in one.reason for one in found)
        del facts[1].steps[0]
        assert seen(facts, checks._mixed_parameters) == []


PARTS: list[tuple[str, Any, tuple[float, ...], str]] = [
    # local gradients by rank and micro-batch, the gradient found -> sentence
    ("all alike", [[(1, 0, 0)], [(0, 1, 0)]], (1, 1, 0), ""),
    ("a rank is missing", [[(1, 0, 0)], [(0, 1, 0)]], (1, 0, 0), "The gradients of rank 1 are missing"),
    ("the other", [[(1, 0, 0)], [(0, 1, 0)]], (0, 1, 0), "The gradients of rank 0 are missing"),
    ("ranks by unlike factors", [[(1, 0, 0)], [(0, 1, 0)]], (1, 2, 0), ""),
    ("something else", [[(1, 0, 0)], [(0, 1, 0)]], (1, 1, 1), ""),
    ("micro-batches alike", [[(1, 0), (0, 1)], [(1, 0), (0, 1)]], (2, 2), ""),
    ("the first counts twice", [[(1, 0), (0, 1)], [(1, 0), (0, 1)]], (8, 4),
     "Some micro-batches of a step count 2 times as much as others"),
    ("by little", [[(1, 0), (0, 1)], [(1, 0), (0, 1)]], (2.8, 2), ""),
    ("only the last", [[(1, 0), (0, 1)], [(1, 0), (0, 1)]], (0, 2), ""),
    ("unlike counts", [[(1, 0), (0, 1)], [(1, 0)]], (4, 2), ""),
    ("too many", [[(1, 0)] * 9, [(0, 1)] * 9], (9, 0), ""),
]  # fmt: skip


@pytest.mark.parametrize(("law", "local", "final", "text"), PARTS, ids=[row[0] for row in PARTS])
def test_parts_of_a_gradient(law: str, local: Any, final: tuple[float, ...], text: str) -> None:
    """Which ranks or micro-batches count more than others."""
    facts = put(run(1), local=lambda n, rank: local[rank], final=lambda n: final)
    view = View(facts)
    assert checks._unlike_parts(view, view.steps[0, 1], (0, 1), [KEY]) == text


def test_parts_are_unlike_in_two_steps_in_turn() -> None:
    """Of those with all ranks."""
    facts = put(run(2), local=lambda n, rank: [(1.0 - rank, rank)], final=lambda n: (1.0, 0.0))
    assert [(one.step, one.ranks) for one in seen(facts, checks.mixed_scale)] == [(2, (0, 1))]
    del facts[0].steps[1]
    assert seen(facts, checks.mixed_scale) == []
    facts = put(run(3), local=lambda n, rank: [(1.0 - rank, rank)], final=lambda n: (1.0, 0.0))
    del facts[0].steps[1]
    assert [one.step for one in seen(facts, checks.mixed_scale)] == [3]


@pytest.mark.parametrize(
    ("kept", "count"), [(0.0, 0), (0.5, 1), (1.0, 2), (0.25, 0), (1.5, 0), (0.49, 1), (-0.5, 0), (0.47, 0)]
)
def test_gradients_of_the_step_before(kept: float, count: int) -> None:
    """That so many ranks have kept: a whole number of them, of all parameters."""
    total, last = [v(1.0), v(1.0)], v(0.0, 1.0)
    of_key: Any = {KEY: ({0: [total[0]], 1: [total[1]]}, v(2.0, kept))}
    assert checks._stale_ranks(of_key, {KEY: last}, 2) == count
    assert checks._stale_ranks(of_key, {}, 2) == 0
    other = KEY._replace(name="v")
    both = {**of_key, other: ({0: [v(1.0)]}, v(1.0, 1.0))}
    assert checks._stale_ranks(both, {KEY: last, other: last}, 2) == (2 if kept == 1.0 else 0)
    assert checks._stale_ranks({}, {}, 2) == 0


@pytest.mark.parametrize("steps", [2, 3])
def test_a_gradient_that_was_not_cleared_is_told_after_two_steps(steps: int) -> None:
    """Behind the first, of which nothing came before."""
    base = [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)]
    finals = [np.array(base[0]) * 2]
    for n in range(1, 3):
        finals.append(np.array(base[n]) * 2 + finals[-1])
    facts = put(run(steps), local=lambda n, rank: [base[n]], final=lambda n: finals[n])
    found = seen(facts, checks.stale_gradient)
    assert [(one.step, one.reason.partition("as if ")[2]) for one in found] == [
        (3, "2 of 2 ranks did not clear it.")
    ] * (steps == 3)


CLIPS: list[tuple[str, Any, tuple[float, float], float | None]] = [
    # (limit, norm) of the ranks, gradient found -> ratio of the weights
    ("unlike norms", [(1.0, 2.0), (1.0, 4.0)], (0.5, 0.25), 2.0),
    ("nearly alike", [(1.0, 2.0), (1.0, 2.9)], (0.5, 1 / 2.9), None),
    ("below the limit", [(9.0, 2.0), (9.0, 4.0)], (1.0, 1.0), None),
    ("one below it", [(1.0, 0.5), (1.0, 4.0)], (1.0, 0.25), 4.0),
    ("after the reduction", [(1.0, 2.0), (1.0, 4.0)], (1.0, 1.0), None),
    ("no norm", [(1.0, None), (1.0, None)], (1.0, 1.0), None),
]


@pytest.mark.parametrize(("law", "clips", "final", "ratio"), CLIPS, ids=[row[0] for row in CLIPS])
def test_clipping_before_the_reduction(law: str, clips: Any, final: tuple[float, float], ratio: float | None) -> None:
    """The gradient is the sum of what each rank has clipped by its own norm."""
    facts = put(run(1), local=lambda n, rank: [(1.0 - rank, rank)], final=lambda n: final)
    for rank, record in facts.items():
        record.steps[0].window.clips = [ClipFact(*clips[rank], True)]
    found = seen(facts, checks.clipped_before_reduction)
    assert [f"factor of {ratio:.3g}" in one.reason for one in found if ratio] == [True] * (ratio is not None)
    assert bool(found) is (ratio is not None)
    for record in facts.values():
        record.steps[0].window.clips *= 2  # which of them counts is not known
    assert seen(facts, checks.clipped_before_reduction) == []


TARGETS: list[tuple[str, list[tuple[str, int, float]], str | None]] = [
    ("alike", [("mean", 4, 1.0), ("mean", 4, 1.0)], None),
    ("unlike counts", [("mean", 4, 1.0), ("mean", 2, 1.0)], "up to 2 times"),
    ("nearly alike", [("mean", 100, 1.0), ("mean", 96, 1.0)], None),
    ("sums", [("sum", 4, 1.0), ("sum", 2, 1.0)], None),
    ("sums over their own counts", [("sum", 4, 1.0), ("sum", 2, 2.0)], "up to 2 times"),
    ("weights that were meant", [("sum", 4, 1.0), ("sum", 4, 3.0)], None),
    ("no targets", [("mean", 4, 1.0), ("mean", 0, 1.0)], None),
    ("no weight", [("mean", 4, 1.0), ("mean", 4, 0.0)], None),
    ("negative weights", [("mean", 4, -1.0), ("mean", 2, -1.0)], "up to 2 times"),
]


@pytest.mark.parametrize(("law", "losses", "text"), TARGETS, ids=[row[0] for row in TARGETS])
def test_targets_that_weigh_differently(law: str, losses: list[tuple[str, int, float]], text: str | None) -> None:
    """By more than a twentieth, in two steps in turn, where targets may be ignored."""
    facts = put(run(2), local=lambda n, rank: [(1.0,)], final=lambda n: (2.0,))
    for rank, record in facts.items():
        for step in record.steps:
            reduction, targets, weight = losses[rank]
            step.window.losses = [LossFact(reduction, targets, weight, counts_tokens=True)]
    found = seen(facts, checks.tokens_weigh_differently)
    assert [(one.step, (text or "") in one.reason) for one in found] == [(2, True)] * (text is not None)
    facts[1].steps[0].window.losses[0].counts_tokens = False
    assert seen(facts, checks.tokens_weigh_differently) == []


def test_faults_of_calls_are_told_with_their_step() -> None:
    """Outputs that share memory, and gradients that are not summed; also after the last step."""
    facts = run(2)
    facts[1].steps[1].window.aliased.append(("all_gather", (0, 1), None))
    facts[0].rest.aliased.append(("gather", (0, 1), None))
    assert [(one.ranks, one.step) for one in seen(facts, checks.aliased_outputs)] == [((0,), 3), ((1,), 2)]
    for op in ("MAX", "MIN", "PRODUCT", "SUM", "AVG", None):
        facts[0].steps[0].window.calls = [CallCount("all_reduce", (1, 0), op, FORWARD, False, gradients={0})]
        found = seen(facts, checks.gradient_reduce_op)
        named = [((0, 1), "w", 1)] if op in ("MAX", "MIN", "PRODUCT") else []
        assert [(one.ranks, one.tensor, one.step) for one in found] == named


@pytest.mark.parametrize(
    ("without", "closure", "step"),
    [([1, 1], False, 2), ([1, 0], False, None), ([0, 1, 1], False, 3), ([1, 0, 1], False, None), ([1, 1], True, None)],
)
def test_steps_without_any_gradient(without: list[int], closure: bool, step: int | None) -> None:
    """Two in turn, on all ranks, of an optimizer that has parameters."""
    facts = run(len(without))
    for record in facts.values():
        for one, count in zip(record.steps, without, strict=True):
            one.without_gradient, one.has_closure = count, closure
    found = seen(facts, checks.step_without_gradients)
    assert [(one.step, one.ranks) for one in found] == [(step, (0, 1))] * (step is not None)
    facts[1].steps[-1].without_gradient = 0
    assert seen(facts, checks.step_without_gradients) == []


# --- what ranks read


def batch(value: float, training: bool = True, constant: bool = False, model: str = "Net", size: int = 4) -> InputFact:
    return InputFact(model, training, ((size,),), (v(value),), constant)


BATCHES: list[tuple[str, Callable[[int, int], list[InputFact]], int, int | None]] = [
    # inputs by step and rank, number of steps -> in how many they were equal
    ("equal", lambda n, rank: [batch(n)], 4, 4),
    ("few steps", lambda n, rank: [batch(n)], 3, None),
    ("one of them unlike", lambda n, rank: [batch(n + rank * (n == 2))], 5, None),
    ("always the same", lambda n, rank: [batch(1)], 5, None),
    ("in evaluation", lambda n, rank: [batch(n, training=False)], 5, None),
    ("constant", lambda n, rank: [batch(n, constant=True)], 5, None),
    ("more on one rank", lambda n, rank: [batch(n)] * (1 + rank), 5, None),
    ("of another size", lambda n, rank: [batch(n, size=4 + rank)], 5, None),
    ("the second unlike", lambda n, rank: [batch(n), batch(n + rank)], 5, None),
    ("some not comparable", lambda n, rank: [batch(n)] * (n != 0 or rank), 5, 4),
]


@pytest.mark.parametrize(("law", "of", "steps", "equal"), BATCHES, ids=[row[0] for row in BATCHES])
def test_ranks_that_read_the_same(
    law: str, of: Callable[[int, int], list[InputFact]], steps: int, equal: int | None
) -> None:
    """In all steps that can be compared, four at least, and not a constant."""
    facts = run(steps)
    for rank, record in facts.items():
        for n, step in enumerate(record.steps):
            step.window.inputs = of(n, rank)
    found = seen(facts, inputs.same_batch)
    assert [f"all of {equal} steps" in one.reason for one in found] == [True] * (equal is not None)
    assert seen(facts, inputs.same_batch, evidence=SilentEvidence.BULK) == []


@pytest.mark.parametrize(
    ("first", "second", "differs"),
    [
        ([batch(1)], [batch(2, training=False)], True),
        ([batch(1)], [batch(2)], False),
        ([batch(1)], [batch(1, training=False, model="Other")], False),
        ([batch(1)], [batch(1, training=False)] * 2, False),
        ([batch(1), batch(1)], [batch(1), batch(1, training=False)], True),
    ],
)
def test_modes_that_differ(first: list[InputFact], second: list[InputFact], differs: bool) -> None:
    """Of one model, in the same call."""
    facts = run(1)
    facts[0].steps[0].window.inputs, facts[1].steps[0].window.inputs = first, second
    found = seen(facts, inputs.mode_differs)
    assert [(one.tensor, "on ranks [0]" in one.reason) for one in found] == [("Net", True)] * differs
    assert seen(facts, inputs.mode_differs, evidence=SilentEvidence.BULK) == []


@pytest.mark.parametrize(
    ("epochs", "step"),
    [([0, 0, 0], 3), ([0, 0], None), ([0, 1, 2], None), ([0, 1, 0, 0], 4), ([0, 0, 0, 0], 3)],
)
def test_epochs_in_one_order(epochs: list[int], step: int | None) -> None:
    """Three of one sampler."""
    facts = run(len(epochs))
    for one, epoch in zip(facts[0].steps, epochs, strict=True):
        one.window.epochs = [EpochFact(7, epoch), EpochFact(8, one.number)]
    found = seen(facts, inputs.epochs_alike)
    assert [(one.ranks, one.step) for one in found] == [((0,), step)] * (step is not None)


@pytest.mark.parametrize(
    ("values", "shapes", "count", "differs"),
    [((1, 1), (4, 4), 1, False), ((1, 2), (4, 4), 1, True), ((1, 1), (4, 5), 1, True), ((1, 2), (4, 4), 2, False)],
)
def test_inputs_that_are_declared_equal(
    values: tuple[float, float], shapes: tuple[int, int], count: int, differs: bool
) -> None:
    """In value and shape, where all ranks have as many of them."""
    facts = run(1)
    for rank, record in facts.items():
        placement = PlacementFact("layer", (0, 1), v(values[rank]), (shapes[rank],))
        record.steps[0].window.placements = [placement] * (count if rank else 1)
    assert [one.step for one in seen(facts, inputs.replicate_is_not)] == [1] * differs


# --- ranks that share a forward pass


def sharing(facts: Mapping[int, RankFacts]) -> Mapping[int, RankFacts]:
    for record in facts.values():
        record.steps[0].window.calls = [CallCount("all_reduce", tuple(facts), "SUM", FORWARD, False)]
    return facts


@pytest.mark.parametrize(
    ("states", "values", "shapes", "fault"),
    [
        ((1, 1), (1, 1), (4, 4), ""),
        ((1, 2), (1, 1), (4, 4), "differs"),
        ((1, 1), (1, 2), (4, 4), "equal"),
        ((1, 2), (1, 2), (4, 4), ""),
        ((1, 2), (1, 1), (4, 5), ""),
    ],
)
def test_masks_of_dropout(
    states: tuple[int, int], values: tuple[float, float], shapes: tuple[int, int], fault: str
) -> None:
    """Copies need one mask, and parts need several."""
    facts = sharing(run(1))
    for rank, record in facts.items():
        record.steps[0].window.dropouts = [DropoutFact(states[rank], v(values[rank]), (shapes[rank],))]
    found = [len(seen(facts, check, evidence=SilentEvidence.BULK)) for check in
             (model_parallel.dropout_differs, model_parallel.equal_dropout)]  # fmt: skip
    assert found == [fault == "differs", fault == "equal"]
    assert seen(facts, model_parallel.dropout_differs) == []  # all gradients are reduced over these ranks
    facts[1].steps[0].window.dropouts *= 2
    assert seen(facts, model_parallel.dropout_differs, evidence=SilentEvidence.BULK) == []


def test_a_group_that_reduces_all_its_gradients_is_data_parallel() -> None:
    """Every parameter that it holds, over all of its ranks at least."""
    facts = run(1, ranks=(0, 1, 2), names=("w", "u"))
    view = View(facts)
    u = KEY._replace(name="u")

    def sets(of_w: tuple[int, ...], of_u: tuple[int, ...], evidence: SilentEvidence = SilentEvidence.DDP) -> Any:
        return {KEY: [ReplicaSet(KEY, of_w, evidence)], u: [ReplicaSet(u, of_u, evidence)]}

    assert model_parallel._reduces_all(view, sets((0, 1), (0, 1, 2)), (0, 1))
    assert not model_parallel._reduces_all(view, sets((0, 1), (0, 2)), (0, 1))
    assert not model_parallel._reduces_all(view, sets((0, 1), (0, 1), SilentEvidence.BULK), (0, 1))
    assert not model_parallel._reduces_all(view, {KEY: sets((0, 1), (0, 1))[KEY]}, (0, 1))


@pytest.mark.parametrize(
    ("norms", "limit", "is_plain", "differs"),
    [((1.0, 2.0), 0.5, True, True), ((1.0, 2.0), 2.0, True, False), ((1.0, 2.0), 1.9, True, True),
     ((1.0, 2.0), 0.5, False, False), ((2.0, 2.001), 0.5, True, False), ((2.0, 2.003), 0.5, True, True)],
)  # fmt: skip
def test_norms_of_one_model(norms: tuple[float, float], limit: float, is_plain: bool, differs: bool) -> None:
    """By which ranks of one forward pass clip: alike within a thousandth, or below the limit."""
    facts = sharing(run(1))
    for rank, record in facts.items():
        record.steps[0].window.clips = [ClipFact(limit, 9.0, True), ClipFact(limit, norms[rank], is_plain)]
    found = seen(facts, model_parallel.clipped_by_local_norm, evidence=SilentEvidence.BULK)
    assert [(one.step, one.ranks) for one in found] == [(1, (0, 1))] * differs
    del facts[1].steps[0].window.clips[:]
    assert seen(facts, model_parallel.clipped_by_local_norm, evidence=SilentEvidence.BULK) == []


TIES: list[tuple[str, dict[str, Any], bool]] = [
    ("tied and apart", {}, True),
    ("kept together", {"after": (3.0, 3.0)}, False),
    ("apart by rounding", {"after": (3.0, 3.009)}, False),
    ("apart by more", {"after": (3.0, 3.03)}, True),
    ("unlike from the start", {"before": (1.0, 2.0)}, False),
    ("of another shape", {"shape": (8,)}, False),
    ("a constant", {"constant": True}, False),
    ("from one seed", {"others": 1.0}, False),
    ("no stages", {"op": "broadcast"}, False),
]


@pytest.mark.parametrize(("law", "facts_", "told"), TIES, ids=[row[0] for row in TIES])
def test_weights_that_two_stages_share(law: str, facts_: dict[str, Any], told: bool) -> None:
    """Equal before the first step, and a hundredth of the update apart after it."""
    before, after = facts_.get("before", (1.0, 1.0)), facts_.get("after", (3.0, 4.0))
    facts = run(1, names=("w", "u", "x"))
    for rank, record in facts.items():
        shape = facts_.get("shape", (16,)) if rank else (16,)
        record.parameters[0] = ParameterFact("w" if rank else "head", shape, constant=facts_.get("constant", False))
        step = record.steps[0]
        step.before[0], step.after[0] = v(before[rank]), v(after[rank])
        for number in (1, 2):
            step.before[number] = step.after[number] = v(facts_.get("others", 10.0 + rank) + 100 * number)
        step.window.calls = [CallCount(facts_.get("op", "send"), (0, 1), None, FORWARD, False)]
    found = seen(facts, model_parallel.tied_not_synchronized)
    assert [(one.ranks, one.tensor, one.step) for one in found] == [((0, 1), "head and w", 1)] * told


@pytest.mark.parametrize(("second", "found"), [((2.0, 2.0), True), ((2.0, 3.0), False), ((0.0, 0.0), True)])
def test_shards_are_alike_if_they_are_in_every_step(second: tuple[float, float], found: bool) -> None:
    """Weights that begin as ones everywhere soon differ; zeros say nothing."""
    facts = run(2)
    for rank, record in facts.items():
        for step, value in zip(record.steps, (1.0, second[rank]), strict=True):
            step.window.calls = [CallCount("all_reduce", (0, 1), "SUM", FORWARD, False)]
            step.window.sums = [SumFact((0, 1), v(value), (64,))]
    assert bool(seen(facts, model_parallel.shards_alike, evidence=SilentEvidence.BULK)) is found
