"""Rules on what ranks divide among them: samples, parts of a DTensor, and the ranks of a group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from distsim.debug.diagnosis.silent.collect.collector import Collector
from distsim.debug.diagnosis.silent.facts import (
    EpochFact,
    GroupFact,
    InputFact,
    LocalFact,
    RankFacts,
    SilentFinding,
    Window,
)
from distsim.debug.diagnosis.silent.judge import judge
from tests.silent.facts import run_of, vector


def findings(world: int, samples: Sequence[set[int]] = (), epochs: Sequence[EpochFact] = ()) -> list[SilentFinding]:
    """Of ranks under DistributedDataParallel that read these samples, sixteen a step, by samplers of these settings."""

    def change(rank: int, parameter: Any, steps: list[Any]) -> None:
        parameter.ddp = tuple(range(world))
        for number, step in enumerate(steps):
            if samples:
                read = tuple(sorted(samples[rank]))[16 * number : 16 * (number + 1)]
                step.window.inputs = [InputFact("Net", True, ((16, 4),), (vector(rank + number),), False, None, read)]
            if epochs and not number:
                step.window.epochs = [epochs[rank]]

    return judge(run_of({rank: [1.0] * 8 for rank in range(world)}, change=change))


def part(of: int, begin: int) -> set[int]:
    return set(range(begin, begin + of))


@pytest.mark.parametrize(
    ("samples", "ranks"),
    [
        pytest.param([part(64, 0), part(64, 64), part(64, 128)], None, id="apart"),
        pytest.param([part(64, 0), part(64, 64), part(64, 127)], None, id="one sample is repeated at the end"),
        pytest.param([part(64, 0), part(64, 64), part(64, 64)], (1, 2), id="one part twice"),
        pytest.param(
            [part(64, 0), part(64, 64), part(64, 128), part(16, 0) | part(16, 64) | part(32, 128)], (3,), id="of all"
        ),
        pytest.param([part(64, 0), part(64, 32), part(64, 64)], (1,), id="of its neighbours"),
        pytest.param([part(64, 0), part(64, 5), part(64, 10)], None, id="all of all"),
        pytest.param([part(64, 0), part(64, 0)], None, id="two ranks may draw from one set"),
        pytest.param([part(64, 0), part(64, 64), part(64, 118)], None, id="too few"),
    ],
)
def test_samples_of_another_rank(samples: Sequence[set[int]], ranks: tuple[int, ...] | None) -> None:
    """Where other ranks share none, somebody has divided the data."""
    kinds = [(one.kind.value, one.ranks) for one in findings(len(samples), samples)]
    assert kinds == ([] if ranks is None else [("samples_overlap", ranks)])


def sampler(part: int, replicas: int = 2, **more: Any) -> EpochFact:
    return EpochFact(0, more.pop("epoch", 0), None, more.pop("shuffles", True), replicas, part, 64, **more)


@pytest.mark.parametrize(
    ("epochs", "kinds"),
    [
        pytest.param([sampler(0), sampler(1)], [], id="as it should be"),
        pytest.param([sampler(0, 4), sampler(1, 4)], [("samples_unseen", (0, 1))], id="parts for ranks that are not"),
        pytest.param([sampler(1), sampler(1)], [("samples_overlap", (0, 1))], id="one part twice"),
        pytest.param([sampler(0), sampler(1, epoch=3)], [("splits_differ", (0, 1))], id="another epoch"),
        pytest.param(
            [sampler(0, 3), sampler(1, 3), sampler(2, 3, seed=5)], [("splits_differ", (2,))], id="one has another seed"
        ),
        pytest.param(
            [sampler(0, shuffles=False), sampler(1, shuffles=False, epoch=3)], [], id="an epoch that changes nothing"
        ),
        pytest.param(
            [sampler(0, 3), sampler(1, 3), sampler(2, 4)], [("splits_differ", (2,))], id="one of another world size"
        ),
    ],
)
def test_samplers_of_data_parallel_ranks(epochs: Sequence[EpochFact], kinds: list[tuple[str, tuple[int, ...]]]) -> None:
    """Same settings, each a part of its own, and all parts."""
    assert [(one.kind.value, one.ranks) for one in findings(len(epochs), (), epochs)] == kinds


def rest_of(change: Callable[[int, Window], None], world: int) -> list[SilentFinding]:
    """The findings of ranks that have made no step."""
    facts = {rank: RankFacts(rank) for rank in range(world)}
    for rank, one in facts.items():
        change(rank, one.rest)
        assert not one.is_empty
    return judge(facts)


@pytest.mark.parametrize(
    ("shapes", "whole", "words"),
    [
        ([(3, 8), (3, 8), (3, 8)], None, ""),
        ([(4, 8), (3, 8), (2, 8)], None, "[3, 3, 3]"),
        ([(4, 8), (4, 8), (1, 8)], (9, 8), "[3, 3, 3]"),
        ([(3, 8), (3, 8), (1, 8)], None, "[9, 9, 3]"),
        ([(3, 8), (3, 8), (1, 8)], (7, 8), ""),
        ([(2, 8), (2, 8), (0, 8)], (4, 8), ""),
        ([(3, 8), (3, 4), (3, 8)], None, ""),
    ],
)
def test_parts_of_a_dtensor(shapes: Sequence[tuple[int, ...]], whole: tuple[int, ...] | None, words: str) -> None:
    """As torch.chunk gives them, and with the shape of the whole where they are uneven."""

    def change(rank: int, window: Window) -> None:
        window.parts = [LocalFact((0, 1, 2), 0, shapes[rank], whole)]

    found = rest_of(change, 3)
    assert [(one.kind.value, one.ranks) for one in found] == ([("parts_unlike_chunks", (0, 1, 2))] if words else [])
    assert all(words in one.explanation for one in found)


def test_ranks_that_torch_sorts() -> None:
    """The order that was passed, the one that counts, and the operation that shows it; once for all ranks."""

    def change(rank: int, window: Window) -> None:
        window.groups = [GroupFact((2, 0, 1), None, "all_gather")]

    (found,) = rest_of(change, 3)
    assert (found.kind.value, found.level.value, found.ranks) == ("group_ranks_sorted", "notice", (0, 1, 2))
    assert "[2, 0, 1]" in found.explanation
    assert "all_gather has its parts in the order [0, 1, 2]" in found.explanation


def test_samples_are_told_apart_by_their_values() -> None:
    """Not those that are padding, nor of inputs that are too small or too large to tell."""

    def read(batch: torch.Tensor) -> int:
        collector = Collector(0)
        model = torch.nn.Linear(batch.shape[-1], 1)
        collector.add_model(model)
        collector.enter_module(model, (batch,), __import__("sys")._getframe())
        (fact,) = collector.window.inputs
        assert len(set(fact.samples)) == len(fact.samples)
        return len(fact.samples)

    values = torch.tensor(np.arange(160.0).reshape(10, 16), dtype=torch.float32)
    assert read(values) == 10
    assert read(torch.cat([values, torch.zeros(4, 16)])) == 10
    assert read(values[:, :4]) == 0
    assert read(torch.randn(400, 16)) == 0
