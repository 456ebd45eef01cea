"""The search without a simulator, on programs of abstract steps."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

import pytest

from distsim.scenario.explore.tree import NotRepeatable, OrderTree
from distsim.sim.kernel.chooser import Orders
from distsim.sim.kernel.clocks import START, Clock
from distsim.sim.kernel.steps import Access, NextOperation, class_of
from tests.explore.searches import with_reduction, without_reduction

Program = Mapping[str, Sequence[tuple[str, str]]]
"""For each actor its steps: `r` reads an object, `w` writes it, `wait` reads it once it has been written."""


def run(program: Program, orders: Orders) -> None:
    """Run *program* in an order."""
    trace = orders.trace
    position = dict.fromkeys(program, 0)
    clock: dict[str, Clock] = dict.fromkeys(program, START)
    born: dict[str, int] = {}

    def offer(actor: str) -> NextOperation:
        kind, there = program[actor][position[actor]]
        access = Access.WRITE if kind == "w" else Access.READ
        enablers = frozenset({born[there]}) if kind == "wait" and there in born else frozenset()
        order = (int(actor.partition(".")[0]),)
        return NextOperation(
            actor, actor, {there: access}, order, f"{kind} {there}", clock=clock[actor], enablers=enablers
        )

    while True:
        left = [actor for actor in program if position[actor] < len(program[actor])]
        steps = {actor: program[actor][position[actor]] for actor in left}
        possible = [actor for actor, (kind, there) in steps.items() if kind != "wait" or there in born]
        step = trace.take([offer(actor) for actor in possible]) if possible else None
        if step is None:
            break
        actor = step.offer.actor
        kind, there = steps[actor]
        if kind == "w":
            born.setdefault(there, step.index)
        clock[actor] = step.clock
        position[actor] += 1
    if not trace.is_cut:
        trace.pending = [offer(actor) for actor in left]


def random_program(seed: int) -> Program:
    """Return up to four actors with up to three steps on up to three objects."""
    draw = random.Random(seed)
    objects = "xyz"[: draw.randint(1, 3)]
    return {
        f"{actor}.0": [(draw.choice(["r", "w", "w", "wait"]), draw.choice(objects)) for _ in range(draw.randint(1, 3))]
        for actor in range(draw.randint(2, 3))
    }


@pytest.mark.parametrize("writers", range(1, 6))
def test_writers_of_one_object_have_as_many_orders_as_permutations(writers: int) -> None:
    """n writes: n! classes, one run each."""
    program = {f"{actor}.0": [("w", "x")] for actor in range(writers)}
    searched = with_reduction(lambda orders: run(program, orders))
    assert len(searched.classes) == math.factorial(writers)
    assert searched.blocked == 0


@pytest.mark.parametrize(
    ("program", "classes"),
    [
        pytest.param({"0.0": [("w", "x")] * 25, "1.0": [("w", "y")] * 25}, 1, id="own objects"),
        pytest.param({f"{actor}.0": [("r", "x")] for actor in range(6)}, 1, id="reads"),
        pytest.param({"0.0": [("w", "x")], "1.0": [("r", "x")], "2.0": [("r", "x")]}, 4, id="one write, two reads"),
        pytest.param({"0.0": [("w", "x")], "1.0": [("wait", "x")]}, 1, id="a wait"),
        pytest.param({"0.0": [("w", "x"), ("w", "x")], "1.0": [("wait", "x")]}, 2, id="a wait between two writes"),
    ],
)
def test_counted_by_hand(program: Program, classes: int) -> None:
    """Only the order of conflicting steps counts."""
    assert len(with_reduction(lambda orders: run(program, orders)).classes) == classes


@pytest.mark.parametrize("hundred", range(4))
def test_the_same_classes_as_without_reduction(hundred: int) -> None:
    """On random programs: every class once, and few runs that come to none."""
    runs = blocked = 0
    for seed in range(100 * hundred, 100 * hundred + 100):
        program = random_program(seed)
        every = without_reduction(lambda orders, program=program: run(program, orders), 2_000)
        if every is None:
            continue
        searched = with_reduction(lambda orders, program=program: run(program, orders))
        assert set(searched.classes) == every, program
        assert len(searched.classes) == len(every), program
        runs += len(searched.classes)
        blocked += searched.blocked
    assert runs > 1_000
    assert blocked < 0.1 * runs


def test_branches_that_are_under_way_together_have_the_same_classes() -> None:
    """Up to five runs at a time, which end in any order: no class twice, and none is lost."""
    draw = random.Random(0)
    compared = 0
    for seed in range(150):
        program = random_program(seed)
        every = without_reduction(lambda orders, program=program: run(program, orders), 2_000)
        if every is None:
            continue
        compared += 1
        tree, classes = OrderTree(), []
        under_way: list[Orders] = []
        while not tree.is_exhausted:
            while len(under_way) < 5 and (branch := tree.begin_run()) is not None:
                under_way.append(Orders(branch))
            ended = under_way.pop(draw.randrange(len(under_way)))
            run(program, ended)
            tree.end_run(ended.trace)
            if not ended.trace.is_cut:
                classes.append(class_of(ended.trace))
        assert set(classes) == every, program
        assert len(classes) == len(every), program
    assert compared > 50


def test_a_program_that_does_something_else_is_noticed() -> None:
    """The first difference from the earlier run is named."""
    tree = OrderTree()
    programs: list[Program] = [
        {"0.0": [("w", "x")], "1.0": [("w", "x")], "2.0": [("w", "z")]},
        {"0.0": [("w", "x")], "1.0": [("w", "x")], "2.0": [("r", "x")]},
    ]
    branches = [tree.begin_run()]
    assert branches[0] is not None
    first = Orders(branches[0])
    run(programs[0], first)
    tree.end_run(first.trace)
    branches.append(tree.begin_run())
    assert branches[1] is not None
    second = Orders(branches[1])
    run(programs[1], second)
    with pytest.raises(NotRepeatable) as caught:
        tree.end_run(second.trace)
    assert caught.value.step == 0
    assert [offer.label for offer in caught.value.now] == ["w x", "w x", "r x"]
