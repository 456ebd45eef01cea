"""The checks of silent faults and the sets that they compare, each rule on the fewest facts that it needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from distsim.debug.diagnosis.silent.checks import replicas as checks
from distsim.debug.diagnosis.silent.facts import (
    BufferFact,
    CallCount,
    ParameterFact,
    RankFacts,
    Sighting,
    StepFact,
    TrainingPhase,
    Window,
)
from distsim.debug.diagnosis.silent.view import (
    ParameterKey,
    ReplicaSet,
    SilentEvidence,
    View,
    activation_groups,
    differ,
    distance,
    norm,
    replica_sets,
)
from tests.silent.facts import run_of, vector

KEY = ParameterKey(0, "w", (16,))


def seen(
    view: View, check: Any, evidence: SilentEvidence = SilentEvidence.DDP, ranks: Sequence[int] = ()
) -> list[Sighting]:
    """What a check sees in one set of replicas, all ranks unless *ranks* are given."""
    return list(check(view, {KEY: [ReplicaSet(KEY, tuple(ranks) or tuple(view.facts), evidence)]}))


def steps_of(facts: Mapping[int, RankFacts]) -> Iterable[StepFact]:
    return (step for record in facts.values() for step in record.steps)


# --- tensors by their sketches


@pytest.mark.parametrize(
    ("values", "tolerance", "unlike"),
    [
        ([], 0.0, False),
        ([1.0], 0.0, False),
        ([1.0, 1.0], 0.0, False),
        ([1.0, 1.0 + 2e-6], 0.0, True),
        ([1.0, 1.0 + 5e-7], 0.0, False),
        ([1.0, 1.0, 2.0], 0.0, True),
        ([1.0, 2.0], 1.0, False),
        ([1.0, 2.0], 0.99, True),
        ([0.0, 0.0], 0.0, False),
    ],
)
def test_tensors_differ_beyond_rounding(values: list[float], tolerance: float, unlike: bool) -> None:
    """By more than a millionth of the largest norm, and by more than the tolerance."""
    assert differ({rank: np.array([value, 0.0]) for rank, value in enumerate(values)}, tolerance) is unlike


def test_norms_and_distances() -> None:
    """As in geometry; the norm of several tensors is the largest."""
    assert distance(np.array([1.0, 2.0]), np.array([4.0, 6.0])) == 5.0
    assert norm([np.array([3.0, 4.0]), np.array([1.0, 0.0])]) == 5.0
    assert norm([]) == 0.0


# --- which parameters should be equal


def facts_of(*parameters: ParameterFact, ranks: Sequence[int] = (0, 1), steps: int = 1) -> dict[int, RankFacts]:
    """Ranks with these parameters, all 1.0, and empty windows."""
    facts = {}
    for rank in ranks:
        of_rank = [StepFact(0, number + 1, tuple(range(len(parameters)))) for number in range(steps)]
        for step in of_rank:
            for number in step.parameters:
                step.before[number] = step.after[number] = vector(1.0)
        facts[rank] = RankFacts(rank, list(parameters), of_rank)
    return facts


def called(op: str, pass_: TrainingPhase, ranks: Sequence[int] = (0, 1), **kw: Any) -> CallCount:
    return CallCount(op, tuple(ranks), None, pass_, **{"by_torch": False, **kw})


FORWARD, BACKWARD, BETWEEN, REDUCTION = (
    TrainingPhase.FORWARD,
    TrainingPhase.BACKWARD,
    TrainingPhase.BETWEEN,
    TrainingPhase.REDUCTION,
)
W = ParameterFact("w", (16,))
SETS: list[tuple[str, ParameterFact, list[CallCount], list[SilentEvidence]]] = [
    # the parameter, calls of each rank -> why it should be equal
    ("nothing", W, [], []),
    ("DDP", ParameterFact("w", (16,), ddp=(0, 1)), [], [SilentEvidence.DDP]),
    ("DDP of one", ParameterFact("w", (16,), ddp=(0,)), [], []),
    ("a mesh", ParameterFact("w", (16,), mesh=(0, 1)), [], [SilentEvidence.MESH]),
    ("it may differ", ParameterFact("w", (16,), ddp=(0, 1), varies=True), [], []),
    ("an all_reduce", W, [called("all_reduce", BETWEEN, gradients={0})], [SilentEvidence.REDUCED]),
    ("of several", W, [called("all_reduce_coalesced", BETWEEN, gradients={0})], [SilentEvidence.REDUCED]),
    ("of a tensor", W, [called("all_reduce", BETWEEN)], []),
    ("of an unknown parameter", W, [called("all_reduce", BETWEEN, gradients={7})], []),
    ("a reduce", W, [called("reduce", BETWEEN, gradients={0})], [SilentEvidence.BULK]),
    ("a broadcast", W, [called("broadcast", BETWEEN, gradients={0})], []),
    ("an activation", W, [called("all_reduce", FORWARD)], [SilentEvidence.ACTIVATIONS]),
    ("its gradient", W, [called("all_gather", BACKWARD)], [SilentEvidence.ACTIVATIONS]),
    ("by torch", W, [called("all_reduce", FORWARD, by_torch=True)], []),
    ("with a root", W, [called("broadcast", FORWARD)], []),
    ("of one rank", W, [called("all_reduce", FORWARD, [0])], []),
    ("beside experts", W, [called("all_reduce", FORWARD), called("all_to_all_single", FORWARD)], []),
    ("experts' gradients", W, [called("all_reduce", FORWARD), called("all_to_all", BACKWARD)], []),
    ("other exchanges", W, [called("all_reduce", FORWARD), called("all_to_all", BETWEEN)],
     [SilentEvidence.ACTIVATIONS]),
    ("most gradients", W, [called("all_reduce", REDUCTION, largest=8)], [SilentEvidence.BULK]),
    ("few gradients", W, [called("all_reduce", REDUCTION, largest=7)], []),
    ("several calls", W, [called("all_reduce", REDUCTION, largest=4)] * 2, [SilentEvidence.BULK]),
    ("values", W, [called("all_reduce", REDUCTION, largest=16, values={0})], []),
    ("with a root, too", W, [called("reduce", REDUCTION, largest=16)], []),
    ("DTensors", ParameterFact("w", (16,), mesh=(0,)), [called("all_reduce", FORWARD)], []),
]  # fmt: skip


@pytest.mark.parametrize(("law", "parameter", "calls", "evidence"), SETS, ids=[row[0] for row in SETS])
def test_why_a_parameter_should_be_equal(
    law: str, parameter: ParameterFact, calls: list[CallCount], evidence: list[SilentEvidence]
) -> None:
    """By its wrapper, by the calls of its gradient, or because it was equal on ranks that work together."""
    facts = facts_of(parameter)
    for step in steps_of(facts):
        step.window = Window(calls=calls)
    sets = [one for of_key in replica_sets(View(facts)).values() for one in of_key]
    assert [(one.ranks, one.evidence) for one in sets] == [((0, 1), one) for one in evidence]


@pytest.mark.parametrize(
    ("before", "constant", "sibling", "equal"),
    [(2.0, False, 1.0, False), (1.0, False, 2.0, True), (1.0, True, 1.0, True), (1.0, True, 2.0, False)],
)
def test_a_parameter_that_began_equal(before: float, constant: bool, sibling: float, equal: bool) -> None:
    """A constant one only if all of its module did: it may be the bias of a weight that is sharded."""
    facts = facts_of(
        ParameterFact("a.b", (16,), "a", constant), ParameterFact("a.w", (4,), "a"), ParameterFact("c.w", (2,), "c")
    )
    for number, value in enumerate((before, sibling, 9.0)):
        facts[1].steps[0].before[number] = vector(value)
    for step in steps_of(facts):
        step.window.calls.append(called("all_reduce", FORWARD))
    assert (ParameterKey(0, "a.b", (16,)) in replica_sets(View(facts))) is equal


@pytest.mark.parametrize(
    ("experts", "equal", "reduced", "is_bulk"),
    [(64, 0, {0}, True), (64, 0, set(), False), (64, 16, {0}, True), (64, 17, {0}, False), (16, 16, {0}, True),
     (15, 16, {0}, False), (15, 16, {0, 2}, True)],
)  # fmt: skip
def test_experts_are_not_among_what_most_reduce(experts: int, equal: int, reduced: set[int], is_bulk: bool) -> None:
    """Where tokens are exchanged, what began unlike may be the larger part: then most gradients of what began equal
    have to be reduced, and the experts have to outweigh the rest of it."""
    facts = facts_of(W, ParameterFact("e", (experts,)), ParameterFact("u", (equal,)))
    facts[1].steps[0].before[1] = vector(2.0)
    for step in steps_of(facts):
        call = called("reduce_scatter_tensor", REDUCTION, largest=1000, gradients=reduced)
        step.window.calls = [called("all_to_all", FORWARD), call]
    sets = replica_sets(View(facts))
    assert [one.evidence for one in sets.get(KEY, [])] == [SilentEvidence.BULK] * is_bulk
    assert ParameterKey(0, "e", (experts,)) not in sets


def test_the_strongest_evidence_of_a_set_counts() -> None:
    """A part of a set with the same or better evidence says nothing more; a larger set does."""
    facts = facts_of(ParameterFact("w", (16,), ddp=(0, 1)), ranks=(0, 1, 2, 3))
    for rank in (2, 3):
        facts[rank].parameters = [W]
    for step in steps_of(facts):
        step.window.calls = [
            called("all_reduce", BETWEEN, (0, 1), gradients={0}),
            called("all_reduce", BETWEEN, (2, 1, 0), gradients={0}),
            called("all_reduce", BETWEEN, (2, 0), gradients={0}),
        ]
    sets = replica_sets(View(facts))[KEY]
    assert [(one.ranks, one.evidence) for one in sets] == [
        ((0, 1), SilentEvidence.DDP),
        ((0, 1, 2), SilentEvidence.REDUCED),
    ]


def test_activations_are_not_what_data_parallel_ranks_exchange() -> None:
    """Each group once, in order."""
    facts = facts_of(ParameterFact("w", (16,), ddp=(0, 1)), ranks=(0, 1, 2, 3))
    for step in steps_of(facts):
        step.window.calls = [called("all_reduce", FORWARD, ranks) for ranks in ((3, 2), (0, 1), (1, 2), (2, 3))]
    facts[0].rest.calls.append(called("all_gather", BACKWARD, (0, 3)))
    assert activation_groups(View(facts)) == [(0, 3), (1, 2), (2, 3)]


def test_evidence_is_proof_or_a_guess() -> None:
    """Or neither."""
    proofs = [one.name for one in SilentEvidence if one.is_proof]
    guesses = [one.name for one in SilentEvidence if one.is_guess]
    assert (proofs, guesses) == (["DDP", "MESH", "REDUCED"], ["ACTIVATIONS", "BULK"])
    assert all("{tensor}" in one.sentence and "{ranks}" in one.sentence for one in SilentEvidence)


def test_parameters_with_one_name_are_numbered() -> None:
    """In the order of their optimizer; a step is found by its number and its optimizer."""
    same = [ParameterFact("w", (16,)) for _ in range(3)]
    facts = facts_of(*same, steps=2)
    facts[0].steps.insert(0, StepFact(1, 2, (0,)))
    view = View(facts)
    assert [key.name for key in view.parameters if key.optimizer == 0] == ["w", "w (number 2)", "w (number 3)"]
    assert view.order == [(0, 1), (0, 2), (1, 2)]
    assert [(number, sorted(steps)) for number, steps in view.steps_of(0)] == [(1, [0, 1]), (2, [0, 1])]
    steps = view.steps[0, 1]
    assert view.vectors("before", steps, KEY, [0, 2]) is None
    assert view.vectors("gradients", steps, KEY, [0]) is None
    assert view.local(steps, KEY, [1]) is None
    steps[1].local[0] = [vector(1.0), vector(2.0)]
    summed = view.local(steps, KEY, [1])
    assert summed is not None
    assert summed[1][0] == 3.0
    assert view.local(steps, KEY, [1, 0]) is None
    assert len(list(view.windows(1))) == 3


# --- replicas


START = [
    # values before the first step by rank, replicas -> sentence on ranks that agree
    ([1.0, 1.0], (0, 1), None),
    ([1.0, 2.0], (0, 1), "before the first step."),
    ([1.0, 2.0, 1.0], (0, 1), "before the first step; ranks 0,2 have equal values."),
    ([1.0, 2.0, 2.0, 1.0], (0, 1, 2, 3), "before the first step; ranks 0,3, and ranks 1,2 have equal values."),
]


@pytest.mark.parametrize(("values", "ranks", "text"), START)
def test_replicas_that_differ_at_the_start(values: list[float], ranks: tuple[int, ...], text: str | None) -> None:
    """With the ranks of all holders that agree, and the distance as a share of the norm."""
    found = seen(
        View(run_of({r: [v, 3.0] for r, v in enumerate(values)})), checks.replicas_differ_at_start, ranks=ranks
    )
    assert [one.reason.endswith(text or "") for one in found] == [True] * (text is not None)
    if text is not None:
        assert (found[0].step, found[0].ranks, found[0].distance) == (0, ranks, pytest.approx(0.5))
    zeros = View(run_of({0: [0.0, 1.0], 1: [0.0, 1.0]}))
    assert seen(zeros, checks.replicas_differ_at_start) == []
    guessed = View(run_of({0: [1.0, 1.0], 1: [2.0, 1.0]}))
    assert seen(guessed, checks.replicas_differ_at_start, SilentEvidence.BULK) == []


DIVERGE: list[tuple[str, dict[int, list[float]], SilentEvidence, list[tuple[int, str]]]] = [
    # values before and after each step -> step and level
    ("equal", {0: [1, 2], 1: [1, 2]}, SilentEvidence.DDP, []),
    ("unlike after a step", {0: [1, 2], 1: [1, 3]}, SilentEvidence.DDP, [(1, "error")]),
    ("by little evidence", {0: [1, 2], 1: [1, 3]}, SilentEvidence.EQUALIZED, [(1, "warning")]),
    ("unlike before", {0: [1, 2, 2, 3], 1: [2, 3, 3, 5]}, SilentEvidence.DDP, []),
    ("the first of several", {0: [1, 2, 1, 2], 1: [1, 3, 1, 3]}, SilentEvidence.DDP, [(1, "error")]),
    ("and they met again", {0: [1, 2, 1, 2], 1: [1, 3, 1, 2]}, SilentEvidence.DDP, [(1, "error")]),
    ("as in local SGD", {0: [1, 2, 1, 2], 1: [1, 3, 1, 2]}, SilentEvidence.BULK, []),
    ("and for good", {0: [1, 2, 1, 2], 1: [1, 3, 1, 3]}, SilentEvidence.BULK, [(2, "warning")]),
    ("later", {0: [1, 2, 2, 3], 1: [1, 2, 2, 4]}, SilentEvidence.DDP, [(2, "error")]),
]


@pytest.mark.parametrize(("law", "values", "evidence", "expected"), DIVERGE, ids=[row[0] for row in DIVERGE])
def test_replicas_that_diverge(
    law: str, values: dict[int, list[float]], evidence: SilentEvidence, expected: list[tuple[int, str]]
) -> None:
    """In the step after which they differ, unless they differed before, or met again where nothing proves a fault."""
    found = seen(View(run_of(values)), checks.replicas_diverge, evidence)
    assert [(one.step, one.level.value) for one in found] == expected
    assert all(one.is_guess == (evidence is SilentEvidence.BULK) for one in found)


WHY: list[tuple[dict[int, float], dict[int, float], str]] = [
    # gradients, local gradients -> reason
    ({}, {}, "The program itself updates"),
    ({0: 1.0}, {}, "Some ranks (rank 1) have no gradient"),
    ({0: 1.0, 1: 1.0}, {}, "The gradients of {tensor} are equal"),
    ({0: 1.0, 1: 1.00005}, {}, "The gradients of {tensor} are equal"),
    ({0: 1.0, 1: 2.0}, {}, "The gradients of {tensor} differ"),
    ({0: 1.0, 1: 2.0}, {0: 1.0, 1: 2.0}, "The gradient of {tensor} on each rank is that rank's own"),
    ({0: 1.0, 1: 2.0}, {0: 1.00005, 1: 2.0}, "The gradient of {tensor} on each rank is that rank's own"),
    ({0: 1.0, 1: 2.0}, {0: 1.0, 1: 3.0}, "The gradients of {tensor} differ"),
    ({0: 1.0, 1: 2.0}, {0: 1.0}, "The gradients of {tensor} differ"),
]


@pytest.mark.parametrize(("gradients", "local", "reason"), WHY)
def test_why_replicas_diverged(gradients: dict[int, float], local: dict[int, float], reason: str) -> None:
    """By what the optimizer found: no gradients, some, equal ones, the rank's own."""
    facts = run_of({0: [1, 2], 1: [1, 3]})
    for rank, value in gradients.items():
        facts[rank].steps[0].gradients[0] = vector(value)
    for rank, value in local.items():
        facts[rank].steps[0].local[0] = [vector(value)]
    (found,) = seen(View(facts), checks.replicas_diverge)
    assert found.reason.startswith(reason)
    assert found.distance == pytest.approx(0.5)  # of the largest update


@pytest.mark.parametrize(
    ("values", "moved", "step"),
    [
        ({0: [1, 2, 2, 3], 1: [1, 2, 9, 9]}, (1,), 1),
        ({0: [1, 2, 8, 3], 1: [1, 2, 9, 9]}, (0, 1), 1),
        ({0: [1, 2, 2, 3], 1: [1, 5, 9, 9]}, None, 0),
        ({0: [1, 2, 9, 3], 1: [1, 2, 9, 9]}, None, 0),
        ({0: [1, 2, 2, 3, 3, 4], 1: [1, 2, 2, 3, 4, 4]}, (1,), 2),
        ({0: [1, 2, 2, 3, 3, 4], 1: [1, 2, 9, 3, 9, 4]}, (1,), 1),
    ],
)
def test_a_change_outside_of_steps(values: dict[int, list[float]], moved: tuple[int, ...] | None, step: int) -> None:
    """Equal after a step and unlike before the next: who moved is named, once."""
    found = seen(View(run_of(values)), checks.changed_outside_step)
    assert [(one.ranks, one.step) for one in found] == ([] if moved is None else [(moved, step)])


def test_steps_with_others_between_them_are_not_compared() -> None:
    """What happened in a step that was not recorded is not known."""
    facts = run_of({0: [1, 2, 2, 3], 1: [1, 2, 9, 9]})
    for record in facts.values():
        record.steps[1].number = 3
    assert seen(View(facts), checks.changed_outside_step) == []


RATES: list[tuple[str, list[list[tuple[str, float]]], str | None]] = [
    ("equal", [[("lr", 0.5)], [("lr", 0.5)]], None),
    ("rounded", [[("lr", 1.0)], [("lr", 1.0 + 5e-13)]], None),
    ("unlike", [[("lr", 1.0)], [("lr", 1.0 + 2e-12)]], "`lr` of the optimizer is 1.0 on rank 0, "),
    ("the second", [[("lr", 0.5), ("eps", 1.0)], [("lr", 0.5), ("eps", 2.0)]],
     "`eps` of the optimizer is 1.0 on rank 0, 2.0 on rank 1."),
    ("one has more", [[("lr", 0.5)], [("lr", 0.5), ("eps", 2.0)]], None),
    ("one has fewer", [[("lr", 0.5), ("eps", 2.0)], [("lr", 0.5)]], None),
    ("four are shown", [[("lr", float(n))] for n in range(5)],
     "`lr` of the optimizer is 0.0 on rank 0, 1.0 on rank 1, 2.0 on rank 2, 3.0 on rank 3."),
]  # fmt: skip


@pytest.mark.parametrize(("law", "settings", "text"), RATES, ids=[row[0] for row in RATES])
def test_hyperparameters_that_differ(law: str, settings: list[list[tuple[str, float]]], text: str | None) -> None:
    """Of replicas, and of the ranks that hold a parameter's parts; of the first step with all ranks."""
    facts = run_of({rank: [1.0, 2.0, 2.0, 3.0] for rank in range(len(settings))})
    for rank, record in facts.items():
        record.steps[0].hyperparameters[0] = record.steps[1].hyperparameters[0] = tuple(settings[rank])
    found = seen(View(facts), checks.hyperparameter_differs)
    assert [(one.step, one.reason[: len(text or "")]) for one in found] == ([] if text is None else [(1, text)])
    guessed = seen(View(facts), checks.hyperparameter_differs, SilentEvidence.BULK)
    assert guessed == []
    del facts[0].steps[0]
    assert [one.step for one in seen(View(facts), checks.hyperparameter_differs)] == [2] * (text is not None)
    for record in facts.values():
        record.parameters[0] = ParameterFact("w", (16,), fsdp=tuple(facts))
    assert [one.step for one in checks.hyperparameter_differs(View(facts), {})] == [2] * (text is not None)
    facts[0].parameters[0] = ParameterFact("w", (16,), fsdp=tuple(facts), varies=True)
    assert list(checks.hyperparameter_differs(View(facts), {})) == []


def test_a_step_without_the_parameter_compares_nothing() -> None:
    """A rank's optimizer of that number may be one of other parameters."""
    facts = run_of({rank: [1.0, 2.0] for rank in range(2)})
    facts[1].steps[0].hyperparameters = {}
    assert seen(View(facts), checks.hyperparameter_differs) == []


STATES: list[tuple[str, list[dict[str, float] | None], int, str | None]] = [
    ("equal", [{"m": 1.0}, {"m": 1.0}], 1, None),
    ("unlike", [{"m": 1.0}, {"m": 2.0}], 1, "differs between"),
    ("unlike later", [{"m": 1.0}, {"m": 2.0}], 2, "differs between"),
    ("nearly equal", [{"m": 1.0}, {"m": 1.00009}], 1, None),
    ("on one only", [{"m": 1.0}, {}], 1, "only on rank 0"),
    ("on one only, later", [{"m": 1.0}, {}], 2, None),
    ("the other entry", [{"a": 1.0, "m": 1.0}, {"m": 2.0}], 2, "`m`"),
    ("not known", [{"m": 1.0}, None], 1, None),
]


@pytest.mark.parametrize(("law", "states", "number", "text"), STATES, ids=[row[0] for row in STATES])
def test_states_of_optimizers_that_differ(
    law: str, states: list[dict[str, float] | None], number: int, text: str | None
) -> None:
    """In value, or, before the first step, in being there at all."""
    facts = run_of({rank: [1.0, 2.0, 2.0, 3.0] for rank in range(len(states))})
    for rank, state in enumerate(states):
        step = facts[rank].steps[number - 1]
        step.state = {} if state is None else {0: {name: vector(value) for name, value in state.items()}}
    reasons = [one.reason for one in seen(View(facts), checks.optimizer_state_differs)]
    assert [(text or "") in reason for reason in reasons] == [True] * (text is not None)


FLIPS: list[tuple[str, dict[str, float], int, str]] = [
    ("of the state", {}, 1, "changed on rank 2 after step 1 and before step 2, outside of the optimizer."),
    (
        "of the gradient",
        {"gradient": 5.0},
        1,
        "The gradient of {tensor} on rank 2 differs from that on the other ranks",
    ),
    ("unlike before, too", {"before": 3.0}, 1, "differs on rank 2 from that on the other ranks."),
    ("of an unlike parameter", {"after": 2.1}, 2, "is equal before step 1, and differs on rank 2 before step 2."),
]


@pytest.mark.parametrize(("law", "change", "step", "text"), FLIPS, ids=[row[0] for row in FLIPS])
def test_the_rank_whose_state_differs(law: str, change: dict[str, float], step: int, text: str) -> None:
    """The rank that most replicas outvote is named, with the step after which it changed, and why."""
    facts = run_of({rank: [1.0, 2.0, 2.0, 3.0] for rank in range(4)})
    for rank, record in facts.items():
        odd = change if rank == 2 else {}
        first, second = record.steps
        first.state[0], second.state[0] = (
            {"m": vector(odd.get("before", 1.0))},
            {"m": vector(7.0 if rank == 2 else 4.0)},
        )
        first.gradients[0], first.after[0] = vector(odd.get("gradient", 1.0)), vector(odd.get("after", 2.0))
    (one,) = seen(View(facts), checks.optimizer_state_differs)
    assert (one.ranks, one.step) == ((2,), step)
    assert text in one.reason
    assert ("a bit may have flipped" in one.suggestion) is (law != "unlike before, too")


@pytest.mark.parametrize(
    ("owners", "spread"), [([(0,), (1,)], True), ([(0,), (0,)], False), ([(0, 1), (1,)], False), ([(), ()], False)]
)
def test_states_that_are_sharded(owners: list[tuple[int, ...]], spread: bool) -> None:
    """Each parameter's is on one rank, and not all on the same one."""
    facts = facts_of(W, ParameterFact("v", (16,)))
    for rank, record in facts.items():
        for number, ranks in enumerate(owners):
            record.steps[0].state[number] = {"m": vector(1.0)} if rank in ranks else {}
        record.parameters.append(ParameterFact("u", (2,)))
    facts[1].steps.append(StepFact(1, 1, (2,)))
    view = View(facts)
    assert checks._is_spread(view, view.steps[0, 1], (0, 1), 0) is spread


def test_a_rank_that_does_not_own_its_state_is_not_compared() -> None:
    """Nor one without that step."""
    facts = run_of({0: [1, 2, 2, 3], 1: [1, 2, 2, 3]})
    for rank, record in facts.items():
        for step in record.steps:
            step.state[0], step.owns_state = {"m": vector(1.0 + rank)}, rank == 0
    assert seen(View(facts), checks.optimizer_state_differs) == []
    for step in facts[1].steps:
        step.owns_state = True
    assert [one.step for one in seen(View(facts), checks.optimizer_state_differs)] == [1]
    del facts[0].steps[0]
    assert [one.step for one in seen(View(facts), checks.optimizer_state_differs)] == [2]


@pytest.mark.parametrize(
    ("values", "step"),
    [
        ([(1, 1), (1, 1), (1, 1)], None),
        ([(1, 1), (1, 2), (1, 2)], 2),
        ([(1, 1), (1, 1), (1, 2)], None),  # once may be chance
        ([(1, 2), (1, 2), (1, 2)], None),  # they never were equal
        ([(1, 1), (1, 2), (1, 1), (1, 1)], None),  # they have met again
        ([(1, 1), (1, 2), (1, 1), (1, 2), (1, 2)], 4),
        ([(1, 1), (1, 1.00009), (1, 1.00009)], None),
    ],
)
def test_buffers_that_differ(values: list[tuple[float, float]], step: int | None) -> None:
    """From a step on, twice in turn, where they had been equal; by their first value of each step."""
    facts = facts_of(W, steps=len(values))
    for rank, record in facts.items():
        for of_step, pair in zip(record.steps, values, strict=True):
            of_step.window.buffers = [
                BufferFact("mean", (0, 1), vector(pair[rank])),
                BufferFact("mean", (0, 1), vector(7)),
            ]
            of_step.window.buffers.append(BufferFact("other", (0, 1, 2), vector(rank)))
    found = list(checks.buffers_differ(View(facts), {}))
    assert [(one.step, one.tensor, one.distance) for one in found] == ([] if step is None else [(step, "mean", 0.5)])
    assert list(checks.buffers_differ(View({}), {})) == []


def test_a_write_that_was_lost_is_told_with_its_step() -> None:
    """Also after the last one."""
    facts = facts_of(W, steps=2)
    facts[1].steps[1].window.lost_writes.append("w")
    facts[0].rest.lost_writes.append("v")
    found = list(checks.unsharded_write_lost(View(facts), {}))
    assert [(one.ranks, one.tensor, one.step) for one in found] == [((0,), "v", 3), ((1,), "w", 2)]
