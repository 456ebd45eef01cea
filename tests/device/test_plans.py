"""What an operator makes of arguments that look alike is found once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distsim.sim import simulate
from distsim.sim.device import dispatch


def optimizer_steps(foreach: bool) -> None:
    """Three steps of Adam, whose bias corrections are other numbers each time."""
    weight = torch.ones(8192, device="cuda", requires_grad=True)
    optimizer = torch.optim.Adam([weight], lr=0.1, foreach=foreach)
    for _ in range(6):
        (weight * 2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("foreach", [True, False])
def test_a_step_with_other_numbers_is_no_other_call(foreach: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Learning rates and bias corrections change, shapes do not: nothing is learned twice."""
    learned: list[str] = []
    learn = dispatch.learn

    def counted(func: Any, *args: Any) -> Any:
        learned.append(str(func))
        return learn(func, *args)

    monkeypatch.setattr(dispatch, "learn", counted)
    simulate(optimizer_steps, on="dgx-h100:1", nproc_per_node=1, args=(foreach,))
    several = {name for name in learned if learned.count(name) > 2}
    assert not several, learned


def test_a_number_that_makes_the_shape_still_counts() -> None:
    """arange takes floats, and they say how many elements there are."""

    def lengths() -> list[int]:
        return [torch.arange(0.0, end, device="cuda").numel() for end in (2.0, 3.5, 5.0)]

    assert simulate(lengths, on="dgx-h100:1", nproc_per_node=1).results == [[2, 4, 5]]
