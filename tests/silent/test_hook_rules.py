"""What the hooks record of losses, dropout, clipping and data: each rule by a table of small cases."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from distsim.debug.diagnosis.silent.collect import hooks
from distsim.debug.diagnosis.silent.collect.collector import MOST_FACTS, Collector

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
    (lambda loss: (loss * 2).squeeze().to(torch.float64).view(1).mean(), 2.0, 1, "a multiple, shaped and converted"),
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
    """Its epoch, which is its order where it shuffles, and the part of the data that the rank reads."""
    collector = Collector(0)
    sampler: Any = DistributedSampler(range(4), num_replicas=2, rank=0, shuffle=shuffle)  # type: ignore[arg-type]
    for epoch in (0, 3):
        sampler.set_epoch(epoch)
        hooks._iterates(collector, DataLoader(range(4), sampler=sampler))  # type: ignore[arg-type]
    hooks._iterates(collector, DataLoader(range(4)))  # type: ignore[arg-type]
    assert [(fact.sampler, fact.epoch, fact.shuffles) for fact in collector.window.epochs] == [
        (0, 0, shuffle),
        (0, 3, shuffle),
    ]
    fact = collector.window.epochs[0]
    assert (fact.replicas, fact.part, fact.size, fact.seed) == (2, 0, 4, 0)
