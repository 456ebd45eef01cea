"""What a rank's collector records, rule by rule: each a table of small cases, without a run."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from distsim.debug.diagnosis.silent.collect import collector as rules
from distsim.debug.diagnosis.silent.collect import hooks, sketch
from distsim.debug.diagnosis.silent.collect.collector import (
    EVERY,
    FEW,
    FIRST_STEPS,
    MOST_FACTS,
    SMALL,
    TURNS,
    Collector,
)
from distsim.debug.diagnosis.silent.collect.sketch import WIDTH, Addresses, Parameters, ShardedModules, array_of
from distsim.debug.diagnosis.silent.facts import ParameterFact, StepFact, TrainingPhase
from distsim.debug.records.signature import REDUCE_OPS

F64 = torch.float64


def tracked_of(collector: Collector, count: int, numel: int = 1) -> list[Any]:
    """Records of *count* parameters of *numel* elements each."""
    collector.parameters.facts[:] = [ParameterFact(str(i), (numel,)) for i in range(count)]
    return [(None, SimpleNamespace(index=i), ()) for i in range(count)]


# --- which parameters a step sketches -------------------------------------------------------------------

LAST_OF_FIRST = FIRST_STEPS
SAMPLED = [
    # step, parameters, elements of each -> how many are sketched
    (1, FEW + 1, 1, FEW + 1, "the first step has all"),
    (LAST_OF_FIRST, FEW + 1, 1, FEW + 1, "and so has the third"),
    (LAST_OF_FIRST + 1, FEW + 1, 1, 16, "then one in 16 of 257, in its turn"),
    (TURNS, FEW + 1, 1, 17, "257 are 16 times 16 and one, which is first in the turn"),
    (TURNS + 1, FEW + 1, 1, 16, "the next turn"),
    (EVERY, FEW + 1, 1, FEW + 1, "every hundredth has all"),
    (EVERY + 1, FEW + 1, 1, 16, "and the one after it not"),
    (7, FEW, 1, FEW, "256 small parameters are few"),
    (7, 2, SMALL // 2, 2, "2^18 elements are few"),
    (7, 2, SMALL // 2 + 1, 0, "two more are many: their turn is another"),
    (17, 2, SMALL // 2 + 1, 1, "the second one's turn"),
]


@pytest.mark.parametrize(("step", "count", "numel", "sampled", "reason"), SAMPLED)
def test_parameters_that_a_step_sketches(step: int, count: int, numel: int, sampled: int, reason: str) -> None:
    """All in the first three and in every 100th; of a large optimizer one in 16 in the others."""
    collector = Collector(0)
    numbers = collector._sampled(step, tracked_of(collector, count, numel))
    assert len(numbers) == sampled, reason
    assert len({number % TURNS for number in numbers}) <= 1 or sampled == count


def test_sixteen_steps_sketch_every_parameter_once() -> None:
    """In turns."""
    collector = Collector(0)
    followed = tracked_of(collector, FEW + 1)
    turns = [collector._sampled(step, followed) for step in range(FIRST_STEPS + 1, FIRST_STEPS + 1 + TURNS)]
    assert sorted(number for numbers in turns for number in numbers) == list(range(FEW + 1))


# --- what a step records --------------------------------------------------------------------------------


def model_of(*, bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2, bias=bias)


def step_of(collector: Collector, optimizer: Any, has_closure: bool = False) -> StepFact:
    """What one step of the optimizer is recorded as."""
    collector.hear(collector.before_step, optimizer, has_closure, sys._getframe())
    optimizer.step()
    collector.hear(collector.after_step, optimizer)
    assert collector.failure is None
    return collector.facts.steps[-1]


def test_a_step_has_its_parameters_before_and_after() -> None:
    """With gradients, state and settings; the next one has the next number."""
    collector, model = Collector(3), model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    collector.add_model(model)
    for number in (1, 2):
        before = model.weight.detach().clone()
        optimizer.zero_grad()
        for _ in range(number):
            model(torch.ones(1, 3)).sum().backward()
        step = step_of(collector, optimizer)
        assert (step.optimizer, step.number, step.parameters, step.without_gradient) == (0, number, (0, 1), 0)
        assert (step.owns_state, step.has_closure, collector.num_steps) == (True, False, number)
        np.testing.assert_allclose(step.before[0], sketch.sketch(before))
        np.testing.assert_allclose(step.after[0], sketch.sketch(model.weight))
        np.testing.assert_allclose(step.gradients[0], sketch.sketch(model.weight.grad), rtol=1e-6)
        assert [len(local) for local in step.local.values()] == [number, number]
        np.testing.assert_allclose(sum(step.local[0]), step.gradients[0], rtol=1e-5)
        assert list(step.state[1]) == ([] if number == 1 else ["momentum_buffer"])
        assert dict(step.hyperparameters[0])["lr"] == 0.5
        assert step.site is not None
        assert __file__.endswith(step.site.file)
    assert collector.facts.rank == 3
    assert [fact.name for fact in collector.facts.parameters] == ["weight", "bias"]


def test_a_step_without_gradients_or_with_a_closure() -> None:
    """Parameters without a gradient are counted; what a closure computes is not yet there."""
    collector, model = Collector(0), model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    step = step_of(collector, optimizer)
    assert (step.without_gradient, step.gradients, step.state) == (2, {}, {})
    assert [fact.name for fact in collector.facts.parameters] == ["param_groups[0][0]", "param_groups[0][1]"]
    model(torch.ones(1, 3)).sum().backward()
    step = step_of(collector, optimizer, has_closure=True)
    assert (step.without_gradient, step.gradients, step.has_closure, sorted(step.before)) == (0, {}, True, [0, 1])


def test_a_step_inside_a_step_is_not_one() -> None:
    """As ZeRO's own optimizer makes it; an end without a beginning is nothing."""
    collector, model = Collector(0), model_of()
    outer, inner = (torch.optim.SGD(model.parameters(), lr=0.5) for _ in range(2))
    collector.hear(collector.before_step, outer, False, sys._getframe())
    collector.hear(collector.before_step, inner, False, sys._getframe())
    collector.hear(collector.after_step, inner)
    assert collector.facts.steps == []
    collector.hear(collector.after_step, outer)
    collector.hear(collector.after_step, outer)
    assert [(step.optimizer, step.number) for step in collector.facts.steps] == [(0, 1)]
    assert collector.failure is None


def test_optimizers_have_numbers_of_their_own() -> None:
    """In the order of their first steps; the largest number of steps is the rank's."""
    collector = Collector(0)
    one, other = (torch.optim.SGD(model_of().parameters(), lr=0.5) for _ in range(2))
    assert collector.num_steps == 0
    for optimizer in (one, other, other):
        step_of(collector, optimizer)
    assert [(step.optimizer, step.number) for step in collector.facts.steps] == [(0, 1), (1, 1), (1, 2)]
    assert collector.num_steps == 2


def test_a_large_optimizer_is_looked_at_closely_in_its_first_steps() -> None:
    """What is sketched after a step is what was sketched before it, and the turn's own before the next."""
    collector = Collector(0)
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(FEW + 1)]
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    for number in range(1, FIRST_STEPS + 3):
        step = step_of(collector, optimizer)
        assert len(step.after) == (FEW + 1 if number <= FIRST_STEPS else 16)
        assert collector.looks_closely is (number < FIRST_STEPS)
    assert len(step.before) == 32, "the turn's own, and those of the turn before"
    turns = [i for i, parameter in enumerate(parameters) if collector.parameters.get(parameter).sampled]  # type: ignore[union-attr]
    assert turns == [i for i in range(FEW + 1) if i % TURNS == (FIRST_STEPS + 3) % TURNS]


def test_parameters_that_the_program_changes_itself_are_a_step() -> None:
    """Recorded at the next forward pass of the model, where no optimizer has them; a value that stays is none."""
    collector, model = Collector(0), model_of(bias=False)
    for change in (0.0, 1.0):
        collector.enter_module(model, (torch.ones(1, 3),), sys._getframe())
        output = model(torch.ones(1, 3)).sum()
        collector.leave_module(model, (torch.ones(1, 3),))
        output.backward()
        with torch.no_grad():
            model.weight += change
    assert collector.facts.steps == []
    collector.enter_module(model, (torch.ones(1, 3),), sys._getframe())
    (step,) = collector.facts.steps
    assert (step.number, step.parameters, step.hyperparameters) == (1, (0,), {0: ()})
    assert len(step.local[0]) == 2
    assert not np.array_equal(step.before[0], step.after[0])
    tracked = collector.parameters.get(model.weight)
    assert tracked is not None
    assert (tracked.before, tracked.local) == (None, [])


# --- phases, failures, limits ---------------------------------------------------------------------------


def test_the_phase_of_a_training_step() -> None:
    """By the modules that run, and by gradients since the last step; autograd's own thread is in backward."""
    collector, model = Collector(0), model_of(bias=False)
    collector.add_model(model)
    phases = [collector.pass_]
    collector.enter_module(model, (torch.ones(1, 3),), sys._getframe())
    collector.enter_module(model, (), sys._getframe())
    collector.leave_module(model, ())
    phases.append(collector.pass_)
    output = model(torch.ones(1, 3)).sum()
    collector.leave_module(model, ())
    phases.append(collector.pass_)
    output.register_hook(lambda gradient: phases.append(collector.pass_))
    output.backward()
    phases.append(collector.pass_)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    step_of(collector, optimizer)
    phases.append(collector.pass_)
    collector.leave_module(model, ())  # of a pass that the step ended
    assert [phase.value for phase in phases] == ["between", "forward", "between", "backward", "reduction", "between"]
    assert collector.pass_ is TrainingPhase.BETWEEN


def test_an_error_ends_the_recording_once() -> None:
    """And not the program; what distsim does itself is not heard at all, however deep."""
    failures: list[int] = []
    collector = Collector(0, on_failure=lambda: failures.append(1))
    heard: list[int] = []
    with collector.set_aside():
        with collector.set_aside():
            collector.hear(heard.append, 1)
        collector.hear(heard.append, 2)
        assert collector.is_busy
    collector.hear(heard.append, 3)
    assert heard == [3]
    for _ in range(2):
        collector.hear(lambda: 1 // 0)
    assert failures == [1]
    assert isinstance(collector.failure, ZeroDivisionError)
    collector.hear(heard.append, 4)
    assert heard == [3]
    Collector(0).hear(lambda: 1 // 0)  # nobody wants to know


def test_numbers_of_things_and_room_for_facts() -> None:
    """Numbers from 0 in the order of first use; 64 facts of a kind between two steps."""
    collector = Collector(0)
    one, other = model_of(), model_of()
    assert [collector.number_of(thing) for thing in (one, other, one, other)] == [0, 1, 0, 1]
    assert [collector.keeps([0] * count) for count in (0, MOST_FACTS - 1, MOST_FACTS)] == [True, True, False]
    assert collector.sketch(torch.tensor([1.0, float("inf")])) is None
    assert collector.sketch(torch.ones(2)) is not None
    assert collector.sketch(torch.empty(2, device="meta")) is None


@pytest.mark.parametrize(
    ("args", "mode", "shapes", "constant"),
    [
        ((torch.ones(2, 3),), True, ((2, 3),), True),
        ((torch.arange(6.0).view(2, 3),), True, ((2, 3),), False),
        (([torch.ones(2), {"a": torch.arange(2.0)}],), True, ((2,), (2,)), False),
        ((torch.ones(2),), False, None, None),
        ((), True, None, None),
        ((torch.empty(2, device="meta"),), True, None, None),
        ((torch.ones(2), torch.empty(2, device="meta")), True, None, None),
        ((torch.tensor([1.0, float("nan")]),), True, None, None),
        (tuple(torch.ones(n) for n in range(1, 10)), True, tuple((n,) for n in range(1, 9)), True),
    ],
)
def test_inputs_of_a_model(args: tuple[Any, ...], mode: bool, shapes: Any, constant: bool | None) -> None:
    """Of the outermost module, where a gradient can follow and all values are known; eight tensors at most."""
    collector, model = Collector(0), nn.Sequential(model_of())
    with torch.set_grad_enabled(mode):
        collector.enter_module(model, args, sys._getframe())
        collector.enter_module(model[0], (torch.ones(7),), sys._getframe())
    facts = collector.window.inputs
    assert [fact.shapes for fact in facts] == ([] if shapes is None else [shapes])
    if facts:
        assert (facts[0].model, facts[0].training, facts[0].constant) == ("Sequential", True, constant)
        assert len(facts[0].vectors) == len(shapes)


def test_a_module_without_parameters_is_no_model() -> None:
    """Its inputs say nothing of replicas."""
    collector = Collector(0)
    collector.enter_module(nn.ReLU(), (torch.ones(2),), sys._getframe())
    assert collector.window.inputs == []


# --- calls ----------------------------------------------------------------------------------------------


def call(
    op: str, inputs: tuple[Any, ...] = (), outputs: tuple[Any, ...] = (), peer: int = -1, reduce_op: int | None = None
) -> Any:
    """As much of a recorded call as the collector reads."""
    return SimpleNamespace(key=(op, None, None, None, reduce_op), inputs=inputs, outputs=outputs, peer=peer)


RANKS = (0, 1, 2)
MEMBERS = [
    ("all_reduce", -1, RANKS, "the group"),
    ("send", 2, (1, 2), "the two ends"),
    ("recv", 0, (0, 1), "in the order of ranks"),
    ("recv", -1, (1,), "from any source: this rank alone"),
]


@pytest.mark.parametrize(("op", "peer", "members", "reason"), MEMBERS)
def test_ranks_of_a_call(op: str, peer: int, members: tuple[int, ...], reason: str) -> None:
    """Of a collective its group, of a message its ends."""
    collector = Collector(1)
    collector.on_call(call(op, peer=peer), RANKS, 1, None)
    (total,) = collector.window.calls
    assert total.ranks == members, reason


def test_equal_calls_are_counted_together() -> None:
    """By operation, ranks, reduce op, phase and caller; with the largest tensor."""
    collector = Collector(0)
    for size in (3, 7, 5):
        collector.on_call(call("all_reduce", (torch.ones(size),), (torch.ones(size),), reduce_op=0), RANKS, 0, None)
    collector.on_call(call("all_reduce", (), (torch.ones(9),), reduce_op=1), RANKS, 0, None)
    collector.on_call(call("all_reduce", reduce_op=len(REDUCE_OPS)), RANKS, 0, None)
    assert [(one.count, one.largest, one.reduce_op) for one in collector.window.calls] == [
        (3, 7, REDUCE_OPS[0]),
        (1, 9, REDUCE_OPS[1]),
        (1, 0, "?"),
    ]
    assert collector.failure is None


def test_gradients_and_parameters_in_a_call() -> None:
    """Recognized by their memory between a backward pass and a step, and not while a model runs."""
    collector, model = Collector(0), model_of()
    collector.add_model(model)
    model(torch.ones(1, 3)).sum().backward()
    collector.on_call(call("all_reduce", (model.weight.grad, model.bias.detach(), torch.ones(6))), RANKS, 0, None)
    collector.enter_module(model, (torch.ones(1, 3),), sys._getframe())
    collector.on_call(call("all_reduce", (model.bias.grad,)), RANKS, 0, None)
    reduction, forward = collector.window.calls
    assert (reduction.pass_, reduction.gradients, reduction.values) == (TrainingPhase.REDUCTION, {0}, {1})
    assert (forward.pass_, forward.gradients, forward.values) == (TrainingPhase.FORWARD, set(), set())


def test_a_call_without_inputs_is_recognized_by_its_outputs() -> None:
    """As a receive is; a call with both by its inputs."""
    collector, model = Collector(0), model_of()
    collector.add_model(model)
    collector.on_call(call("recv", (), (model.weight,), peer=1), RANKS, 0, None)
    collector.on_call(call("scatter", (model.bias,), (model.weight,)), RANKS, 0, None)
    assert [one.values for one in collector.window.calls] == [{0}, {1}]


class Function(torch.autograd.Function):
    """Makes its call in its forward pass."""

    @staticmethod
    def forward(ctx: Any, hear: Any) -> Any:
        return hear(sys._getframe())


@pytest.mark.parametrize(("in_function", "phase"), [(True, TrainingPhase.FORWARD), (False, TrainingPhase.BETWEEN)])
def test_a_call_in_an_autograd_function_is_in_forward(in_function: bool, phase: TrainingPhase) -> None:
    """Also outside of any module; another function of that name is not one."""
    collector = Collector(0)

    def forward(ctx: Any) -> None:
        hear(sys._getframe())

    def hear(frame: Any) -> None:
        collector.on_call(call("all_reduce"), RANKS, 0, frame)

    Function.apply(hear) if in_function else forward(None)  # type: ignore[no-untyped-call]
    (total,) = collector.window.calls
    assert total.pass_ is phase
    assert total.by_torch is False
    assert total.site is not None
    assert __file__.endswith(total.site.file)


BASE = torch.zeros(8)
ALIASED = [
    ("all_gather", (BASE[:4], BASE[4:]), False, "beside each other"),
    ("all_gather", (BASE[:5], BASE[4:]), True, "one element in common"),
    ("gather", (BASE, BASE), True, "the same tensor twice"),
    ("all_to_all", (BASE[4:], BASE[:4], BASE[7:]), True, "the first and the last"),
    ("all_gather", (BASE,), False, "one alone"),
    ("all_gather", (BASE[:0], BASE[:0]), False, "nothing"),
    ("all_gather", (BASE[::2], BASE[1::2]), False, "not contiguous: not known"),
    ("all_gather", (torch.empty(2, device="meta"),) * 2, False, "without memory"),
    ("broadcast", (BASE, BASE), False, "does not write one for each rank"),
]


@pytest.mark.parametrize(("op", "outputs", "aliased", "reason"), ALIASED)
def test_outputs_that_share_memory(op: str, outputs: tuple[Any, ...], aliased: bool, reason: str) -> None:
    """Of operations that write one tensor for each rank."""
    collector = Collector(0)
    collector.on_call(call(op, (), outputs), RANKS, 0, None)
    assert bool(collector.window.aliased) is aliased, reason


@pytest.mark.parametrize(
    ("group", "numbers"),
    [
        ({"params": [], "lr": 0.1}, (("lr", 0.1),)),
        ({"lr": torch.tensor(0.5)}, (("lr", 0.5),)),
        ({"lr": torch.ones(2)}, ()),
        ({"lr": torch.empty(1, device="meta")}, ()),
        ({"betas": (0.9, 0.5)}, (("betas[0]", 0.9), ("betas[1]", 0.5))),
        ({"betas": (0.9, "x")}, ()),
        ({"nesterov": True, "name": "w", "foreach": None}, (("nesterov", 1.0),)),
    ],
)
def test_numbers_among_settings(group: dict[str, Any], numbers: tuple[tuple[str, float], ...]) -> None:
    """Numbers, tensors of one number that is known, and rows of numbers."""
    assert rules._hyperparameters(group) == numbers


@pytest.mark.parametrize(
    ("value", "count"),
    [(BASE, 1), ([BASE, (BASE, {"a": BASE})], 3), ([[[BASE]]], 1), ([[[[BASE]]]], 0), ("text", 0), (None, 0)],
)
def test_tensors_in_nested_arguments(value: Any, count: int) -> None:
    """Three levels deep."""
    assert len(list(rules._tensors(value))) == count


@pytest.mark.parametrize(
    ("state", "entries"),
    [
        ({"step": 3, "exp_avg": BASE}, {"step": 3.0, "exp_avg": 0.0}),
        ({"flag": True, "name": "x", "none": None}, {}),
        ({"meta": torch.empty(2, device="meta")}, {}),
        ([BASE], {}),
        (None, {}),
    ],
)
def test_entries_of_an_optimizers_state(state: Any, entries: dict[str, float]) -> None:
    """Tensors by their sketch, numbers as they are; whatever else a program keeps there is left out."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer = SimpleNamespace(state={} if state is None else {parameter: state})
    vectors = Collector(0)._state_of(optimizer, parameter)
    assert {name: float(vector[0]) for name, vector in vectors.items()} == entries
    assert all(vector.shape == (WIDTH,) and not vector[1:].any() for vector in vectors.values())
    assert Collector(0)._state_of(SimpleNamespace(state=[]), parameter) == {}
    assert Collector(0)._state_of(object(), parameter) == {}


# --- losses, clipping, dropout, data --------------------------------------------------------------------

LOGITS = torch.arange(8.0).view(4, 2).requires_grad_()
TARGET = torch.tensor([0, 1, -100, 1])
LOSSES = [
    # function, arguments -> reduction, targets, whether they are tokens
    ("cross_entropy", (LOGITS, TARGET), {}, ("mean", 3, True), "one is ignored"),
    ("cross_entropy", (LOGITS, TARGET.abs() % 3), {"ignore_index": 1}, ("mean", 1, True), "three are"),
    ("cross_entropy", (LOGITS, TARGET), {"reduction": "sum"}, ("sum", 3, True), "a sum"),
    ("cross_entropy", (LOGITS, TARGET), {"reduction": "none"}, ("none", 3, True), "no scalar"),
    ("cross_entropy", (LOGITS, TARGET, torch.ones(2)), {}, ("none", 0, False), "weights of classes"),
    ("cross_entropy", (LOGITS, torch.ones(4, 2) / 2), {}, ("mean", 4, False), "probabilities of classes"),
    ("nll_loss", (LOGITS, TARGET), {}, ("mean", 3, True), "as cross entropy"),
    ("mse_loss", (LOGITS, torch.ones(4, 2)), {}, ("mean", 8, False), "each number"),
    ("mse_loss", (LOGITS, torch.ones(4, 2)), {"reduction": "sum"}, ("sum", 8, False), "a sum"),
    ("mse_loss", (LOGITS, torch.ones(4, 2)), {"weight": torch.ones(4, 2)}, ("none", 0, False), "weights"),
    ("l1_loss", (LOGITS, torch.ones(4, 2)), {}, ("none", 0, False), "not counted"),
    ("mse_loss", (LOGITS.detach(), torch.ones(4, 2)), {}, None, "nothing to learn from"),
]


def patched(collector: Collector, name: str) -> Any:
    """torch's function with the hook that reports to *collector*."""
    every = hooks.function_patches(lambda: collector)
    return next(wrapper for _, attribute, wrapper in every if attribute == name)


@pytest.mark.parametrize(("name", "args", "kwargs", "fact", "reason"), LOSSES)
def test_targets_of_a_loss(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], fact: Any, reason: str) -> None:
    """Reduction, number of targets, and whether some may be ignored."""
    collector = Collector(0)
    patched(collector, name)(*args, **kwargs)
    assert collector.failure is None
    facts = [(one.reduction, one.targets, one.counts_tokens) for one in collector.window.losses]
    assert facts == ([] if fact is None else [fact]), reason


BACKWARDS = [
    (lambda loss: loss, 1.0, 1, "the loss itself"),
    (lambda loss: loss / 4, 0.25, 1, "a part of it"),
    (lambda loss: (loss * 2).squeeze().to(F64).view(1).mean(), 2.0, 1, "a multiple, shaped and converted"),
    (lambda loss: loss + LOGITS.sum(), 1.0, 2, "a sum with another: one more, unknown"),
    (lambda loss: loss.exp(), None, 2, "a function of it: one more, unknown"),
]


@pytest.mark.parametrize(("of", "weight", "count", "reason"), BACKWARDS)
def test_the_weight_of_a_loss(of: Any, weight: float | None, count: int, reason: str) -> None:
    """The gradient that arrives at it; a backward pass from elsewhere is an unknown loss."""
    collector = Collector(0)
    loss = patched(collector, "mse_loss")(LOGITS, torch.ones(4, 2))
    total = of(loss)
    patched(collector, "backward")(total)
    assert collector.failure is None
    assert len(collector.window.losses) == count, reason
    if weight is not None:
        assert collector.window.losses[0].weight == weight
    assert collector.roots == {}


def test_a_loss_that_is_used_twice_has_both_weights() -> None:
    """As micro-batches of one graph have."""
    collector = Collector(0)
    loss = patched(collector, "mse_loss")(LOGITS, torch.ones(4, 2))
    for part in (loss / 4, loss / 2):
        part.backward(retain_graph=True)
    assert collector.window.losses[0].weight == 0.75


@pytest.mark.parametrize(
    ("p", "training", "looks_closely", "device", "recorded"),
    [
        (0.5, True, True, "cpu", True),
        (0.5, False, True, "cpu", False),
        (0.0, True, True, "cpu", False),
        (1.0, True, True, "cpu", False),
        (0.5, True, False, "cpu", False),
        (0.5, True, True, "meta", False),
    ],
)
def test_a_dropout_is_recorded(p: float, training: bool, looks_closely: bool, device: str, recorded: bool) -> None:
    """Where it draws and the input is known: the same state of the generator has the same number."""
    collector = Collector(0)
    collector.looks_closely = looks_closely
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        patched(collector, "dropout")(torch.ones(3, 2, device=device), p, training)
    facts = collector.window.dropouts
    assert len(facts) == (3 if recorded else 0)
    if recorded:
        assert facts[0].state == facts[1].state != facts[2].state
        assert facts[0].shape == (3, 2)
        assert facts[0].site is not None


@pytest.mark.parametrize(
    ("total", "norm", "is_plain"),
    [
        (torch.tensor(2.5), 2.5, True),
        (torch.tensor([2.5]), 2.5, True),
        (torch.ones(2), None, True),
        (torch.empty((), device="meta"), None, True),
        (nn.Parameter(torch.tensor(2.5)), 2.5, False),
    ],
)
def test_a_norm_by_which_gradients_are_clipped(total: Any, norm: float | None, is_plain: bool) -> None:
    """One number that is known, and whether it is a plain tensor."""
    collector = Collector(0)
    for _ in range(MOST_FACTS + 1):
        hooks._clipped(collector, total, [], 1)
    assert len(collector.window.clips) == MOST_FACTS
    fact = collector.window.clips[0]
    assert (fact.limit, fact.norm, fact.is_plain) == (1.0, norm, is_plain)


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_of_a_distributed_sampler(shuffle: bool) -> None:
    """Only where it shuffles: its epoch is then its order."""
    collector = Collector(0)
    sampler: Any = DistributedSampler(range(4), num_replicas=2, rank=0, shuffle=shuffle)  # type: ignore[arg-type]
    for epoch in (0, 3):
        sampler.set_epoch(epoch)
        hooks._iterates(collector, DataLoader(range(4), sampler=sampler))  # type: ignore[arg-type]
    hooks._iterates(collector, DataLoader(range(4)))  # type: ignore[arg-type]
    assert [(fact.sampler, fact.epoch) for fact in collector.window.epochs] == ([(0, 0), (0, 3)] if shuffle else [])


# --- sketches and parameters ----------------------------------------------------------------------------


def test_weights_of_a_sketch_are_the_same_in_every_process() -> None:
    """Also once more of them were needed; of mean 0 and mean square 1."""
    first = sketch._signs_of(4).copy()
    many = sketch._signs_of(100_000)
    np.testing.assert_array_equal(first, many[:4])
    np.testing.assert_allclose(first, [0.7495, -0.9234, 0.5973, -0.9825], atol=1e-4)
    assert abs(float(many.mean())) < 0.01
    assert float((many**2).mean()) == pytest.approx(1.0, rel=0.01)
    assert 0.48 <= float(np.abs(many).min()) < float(np.abs(many).max()) <= 1.442


@pytest.mark.parametrize("size", [1, 15, 16, 17, 32, 35])
def test_a_sketch_by_hand(size: int) -> None:
    """Number i counts for sum i % 16, with the weight of row i // 16."""
    values = np.arange(1, size + 1, dtype=np.float32)
    signs = sketch._signs_of(3)
    by_hand = np.zeros(WIDTH)
    for index, value in enumerate(values):
        by_hand[index % WIDTH] += signs[index // WIDTH] * value
    np.testing.assert_allclose(sketch.sketch_array(values), by_hand, rtol=1e-5)


def test_values_that_are_read_in_place() -> None:
    """A parameter and a tensor by its strides; not what torch would have to compute, and no class of somebody's own."""
    tensor = torch.arange(12.0).view(3, 4)
    for view in (tensor, tensor.t(), tensor[:, 1:], nn.Parameter(tensor), tensor[1, 2]):
        values = array_of(view)
        assert values is not None
        assert values.tolist() == view.tolist()
    assert array_of(torch._neg_view(tensor)) is None
    assert array_of(tensor.as_subclass(type("Other", (torch.Tensor,), {}))) is None
    assert array_of(torch.ones(2, dtype=torch.bool)).tolist() == [True, True]  # type: ignore[union-attr]
    assert [sketch.is_constant(torch.full((3,), 2.0)), sketch.is_constant(torch.tensor([2.0, 2.0, 1.0]))] == [
        True,
        False,
    ]
    assert not sketch.is_constant(torch.empty(0))
    assert sketch.sketch(torch.ones(2), read=lambda tensor: np.zeros(0)) is None


def parameters() -> Parameters:
    return Parameters(array_of, lambda tracked, gradient: None)


def test_parameters_are_followed_once_under_their_names() -> None:
    """One that is frozen only once an optimizer has it, under its name in the model; an unknown one as asked."""
    followed, model = parameters(), nn.Sequential(model_of(), nn.Linear(2, 2))
    model[1].bias.requires_grad_(False)
    for _ in range(2):
        followed.add_model(model)
    assert [(fact.name, fact.module, fact.shape) for fact in followed.facts] == [
        ("0.weight", "0", (2, 3)),
        ("0.bias", "0", (2,)),
        ("1.weight", "1", (2, 2)),
    ]
    assert followed.get(model[1].bias) is None
    assert followed.of_optimizer(model[1].bias, "x").index == 3
    assert followed.of_optimizer(nn.Parameter(torch.ones(1)), "x").index == 4
    assert followed.of_optimizer(model[0].weight, "x").index == 0
    assert [(fact.name, fact.module, fact.constant) for fact in followed.facts[3:]] == [
        ("1.bias", "1", False),
        ("x", "", True),
    ]
    assert [tracked.index for _, tracked in followed.living()] == [0, 1, 2, 3]


def test_names_of_parameters_and_buffers() -> None:
    """A shared part once; buffers that a checkpoint has, of no norm."""
    shared = model_of()
    model = nn.Module()
    model.one, model.other, model.norm = shared, shared, nn.BatchNorm1d(2)
    model.register_buffer("kept", torch.ones(1))
    model.register_buffer("left_out", torch.ones(1), persistent=False)
    model.one.register_buffer("inner", torch.ones(1))
    assert [name for name, _, _ in sketch.parameters_of(model)] == [
        "one.weight",
        "one.bias",
        "norm.weight",
        "norm.bias",
    ]
    assert [name for name, _ in sketch.buffers_of(model)] == ["kept", "one.inner"]


REPLICATE, SHARD = (SimpleNamespace(is_replicate=lambda answer=answer: answer) for answer in (True, False))
MESH = [
    # shape of the mesh, coordinate, placements -> ranks with the same part
    ((4,), [1], (REPLICATE,), (10, 11, 12, 13)),
    ((4,), [1], (SHARD,), (11,)),
    ((2, 3), [0, 2], (REPLICATE, SHARD), (12, 15)),
    ((2, 3), [1, 2], (SHARD, REPLICATE), (13, 14, 15)),
    ((2, 3), [1, 1], (SHARD, SHARD), (14,)),
    ((2, 3), [1, 1], (REPLICATE, REPLICATE), (10, 11, 12, 13, 14, 15)),
    ((2, 3), None, (SHARD, SHARD), ()),
]


@pytest.mark.parametrize(("shape", "coordinate", "placements", "ranks"), MESH)
def test_ranks_that_hold_the_same_part(shape: Any, coordinate: Any, placements: Any, ranks: tuple[int, ...]) -> None:
    """By what the mesh replicates; none for a rank outside of it."""
    mesh = SimpleNamespace(
        mesh=torch.arange(10, 10 + int(np.prod(shape))).view(shape), get_coordinate=lambda: coordinate
    )
    assert sketch.mesh_ranks(mesh, placements) == ranks


def test_tensors_are_recognized_by_their_memory() -> None:
    """By address and number of elements, as it is now."""
    followed, model = parameters(), model_of()
    followed.add_model(model)
    addresses = Addresses(followed)
    assert addresses.gradient_of(torch.ones(6)) is None
    model(torch.ones(1, 3)).sum().backward()
    weight, gradient = model.weight, model.weight.grad
    assert addresses.gradient_of(gradient) is None, "the index is older"
    addresses.forget()
    assert addresses.gradient_of(gradient) is addresses.value_of(weight.detach().view(6)) is followed.get(weight)
    assert addresses.gradient_of(weight) is addresses.value_of(gradient) is None
    assert addresses.value_of(weight[0]) is None, "a part of it"
    assert addresses.value_of(torch.eye(2).to_sparse()) is None
    assert addresses.value_of(torch.empty(6, device="meta")) is None
    weight.grad = None
    assert addresses.gradient_of(gradient) is None


class DTensor:
    """A parameter that fully_shard has sharded over ranks 2 and 1."""

    is_leaf, requires_grad = True, True
    placements = (SHARD,)

    def __init__(self) -> None:
        self.device_mesh = SimpleNamespace(mesh=torch.tensor([2, 1]), get_coordinate=lambda: [0])


def test_writes_to_gathered_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the version of the gathered tensor, from the second forward pass on."""
    monkeypatch.setattr(sketch, "local_part", lambda tensor: torch.ones(1) if isinstance(tensor, DTensor) else tensor)
    shard, gathered = DTensor(), nn.Parameter(torch.ones(2))
    followed = parameters()
    followed.add(shard, "w", "")
    sharded = ShardedModules(followed)
    module = nn.Module()
    held: dict[str, Any] = {"w": shard}
    monkeypatch.setattr(sketch, "parameters_of", lambda model: [(name, one, "") for name, one in held.items()])
    sharded.enter(module)
    assert list(sharded.written(module)) == [], "not gathered"
    held["w"] = gathered
    sharded.enter(module)
    assert list(sharded.written(module)) == [], "nothing to compare with"
    assert followed.facts[0].fsdp == (1, 2)
    assert list(sharded.written(module)) == []
    with torch.no_grad():
        gathered.add_(1)
    assert list(sharded.written(module)) == ["w"]
    assert list(sharded.written(module)) == []
    held["w"] = nn.Parameter(torch.ones(2))
    with torch.no_grad():
        held["w"].add_(1).add_(1).add_(1)
    assert list(sharded.written(module)) == [], "another tensor"
    assert list(sharded.written(nn.Module())) == []
    assert followed.facts[0].mesh == (2,)
