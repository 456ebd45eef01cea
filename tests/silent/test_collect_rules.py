"""What a rank's collector records, rule by rule: each a table of small cases, without a run."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from distsim.debug.diagnosis.silent.collect import collector as rules
from distsim.debug.diagnosis.silent.collect.collector import (
    EVERY,
    FEW,
    FIRST_STEPS,
    MOST_FACTS,
    SMALL,
    TURNS,
    Collector,
)
from distsim.debug.diagnosis.silent.collect.sketch import WIDTH, hyperparameters_of, sketch
from distsim.debug.diagnosis.silent.facts import ParameterFact, StepFact, TrainingPhase
from distsim.debug.records.signature import REDUCE_OPS


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
        np.testing.assert_allclose(step.before[0], sketch(before))
        np.testing.assert_allclose(step.after[0], sketch(model.weight))
        np.testing.assert_allclose(step.gradients[0], sketch(model.weight.grad), rtol=1e-6)
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
    assert hyperparameters_of(group) == numbers


@pytest.mark.parametrize(
    ("value", "count"),
    [(BASE, 1), ([BASE, (BASE, {"a": BASE})], 3), ([[[BASE]]], 1), ([[[[BASE]]]], 0), ("text", 0), (None, 0)],
)
def test_tensors_in_nested_arguments(value: Any, count: int) -> None:
    """Three levels deep."""
    assert len(list(rules.tensors_in(value))) == count


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


# --- DistributedDataParallel and DTensors ---------------------------------------------------------------


class Ddp(nn.Module):
    """As much of DistributedDataParallel as the collector reads."""

    def __init__(self, module: nn.Module, process_group: Any = "dp", ignored: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.module, self.process_group, self.parameters_to_ignore = module, process_group, ignored


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "get_process_group_ranks", lambda group: [0, 1])


@pytest.mark.usefixtures("two_ranks")
def test_parameters_of_ddp() -> None:
    """Known once its constructor has ended, but for those that it ignores; a hook may approximate gradients."""
    collector = Collector(0)
    whole, failed = Ddp(model_of(), ignored=("bias",)), Ddp(model_of(), process_group=None)
    for ddp in (failed, whole, Ddp(model_of())):  # nobody holds the third
        collector.new_ddp(ddp)
    del ddp
    collector.compress(whole)
    facts = collector.facts.parameters
    assert [(fact.name, fact.ddp, fact.compressed) for fact in facts] == [("weight", (0, 1), True), ("bias", (), False)]
    collector.new_ddp(failed)
    step_of(collector, torch.optim.SGD(whole.parameters(), lr=0.5))
    assert len(collector.facts.parameters) == 2


BUFFERS = [
    # depth of the module, in training, with gradients, closely -> whether its buffers are recorded
    (2, True, True, True, True, "a model inside DDP"),
    (1, True, True, True, False, "a model that is called by itself"),
    (3, True, True, True, False, "a part of a model"),
    (2, False, True, True, False, "in evaluation"),
    (2, True, False, True, False, "without gradients"),
    (2, True, True, False, False, "between the steps that are looked at closely"),
]


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize(("depth", "training", "mode", "closely", "recorded", "reason"), BUFFERS)
def test_buffers_under_ddp(depth: int, training: bool, mode: bool, closely: bool, recorded: bool, reason: str) -> None:
    """Those of floating point that DDP broadcasts and that are not too large."""
    collector, model = Collector(0), model_of()
    for name, buffer in (("kept", torch.ones(2)), ("ignored", torch.ones(2)), ("count", torch.ones(2).int())):
        model.register_buffer(name, buffer)
    model.register_buffer("large", torch.ones(rules.MOST_ELEMENTS + 1))
    model.register_buffer("unknown", torch.ones(2, device="meta"))
    model.train(training)
    ddp = Ddp(model, ignored=("ignored",))
    collector.new_ddp(ddp)
    collector.looks_closely = closely
    with torch.set_grad_enabled(mode):
        for module in (ddp, nn.ReLU(), nn.ReLU())[: depth - 1]:
            collector.enter_module(module, (), sys._getframe())
        if depth == 1:
            collector._add_ddps()
        collector.enter_module(model, (), sys._getframe())
    assert [(fact.name, fact.ranks) for fact in collector.window.buffers] == ([("kept", (0, 1))] if recorded else []), (
        reason
    )


class DTensor:
    """A DTensor on a mesh of two ranks."""

    def __init__(self, kind: str) -> None:
        self.placements = [SimpleNamespace(is_replicate=lambda: kind != "shard", is_partial=lambda: kind == "partial")]
        self.device_mesh = SimpleNamespace(mesh=torch.tensor([0, 1]), get_coordinate=lambda: [0])
        self._local_tensor = torch.ones(3)


@pytest.mark.parametrize(
    ("kind", "closely", "recorded"),
    [("replicate", True, 1), ("replicate", False, 0), ("partial", True, 0), ("shard", True, 0)],
)
def test_inputs_that_are_declared_as_replicated(kind: str, closely: bool, recorded: int) -> None:
    """What several ranks hold alike and is no sum to come."""
    collector, model = Collector(0, sketch_of=lambda tensor: np.ones(WIDTH, dtype=np.float32)), model_of()
    collector.looks_closely = closely
    collector.enter_module(model, (), sys._getframe())
    collector.leave_module(model, (DTensor(kind), torch.ones(2)))
    facts = [(fact.module, fact.ranks, fact.shape) for fact in collector.window.placements]
    assert facts == [("Linear", (0, 1), (3,))] * recorded


class ZeroRedundancyOptimizer(torch.optim.SGD):
    """Named as torch's."""


def test_an_optimizer_that_shards_its_state() -> None:
    """By its class, or one above it."""
    optimizers = (torch.optim.SGD, ZeroRedundancyOptimizer, type("Mine", (ZeroRedundancyOptimizer,), {}))
    assert [step_of(Collector(0), kind(model_of().parameters(), lr=0.5)).owns_state for kind in optimizers] == [1, 0, 0]


def test_three_steps_by_hand_are_enough() -> None:
    """Then their parameters are no longer sketched."""
    collector, model = Collector(0), model_of(bias=False)
    for _ in range(FIRST_STEPS + 2):
        collector.enter_module(model, (torch.ones(1, 3),), sys._getframe())
        output = model(torch.ones(1, 3)).sum()
        collector.leave_module(model, (torch.ones(1, 3),))
        output.backward()
        with torch.no_grad():
            model.weight += 1
    collector.enter_module(model, (torch.ones(1, 3),), sys._getframe())
    assert [step.number for step in collector.facts.steps] == [1, 2, 3]
