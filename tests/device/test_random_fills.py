"""Random numbers that several ranks draw alike are drawn once, and no rank can tell."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from distsim.sim import simulate
from distsim.sim.device.operators import special


def weights(same: bool) -> list[list[float]]:
    """A model's, changed in place by rank 0 first, and numbers that are drawn after it."""
    dist.init_process_group("gloo")
    torch.manual_seed(0 if same else dist.get_rank())
    model = torch.nn.Linear(512, 512)
    with torch.no_grad():
        if dist.get_rank() == 0:
            model.weight.zero_()
    dist.barrier()
    torch.nn.init.normal_(model.weight[:, :256], std=2.0)
    other = torch.nn.init.normal_(torch.empty(512, 512))
    return [model.weight[0, 300:303].tolist(), model.bias[:3].tolist(), other[0, :3].tolist(), torch.rand(3).tolist()]


def real(seed: int) -> list[list[float]]:
    """The same of one process."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = torch.nn.Linear(512, 512)
        torch.nn.init.normal_(model.weight.detach()[:, :256], std=2.0)
        other = torch.nn.init.normal_(torch.empty(512, 512))
        kept = [model.weight[0, 300:303].tolist(), model.bias[:3].tolist(), other[0, :3].tolist()]
        return [*kept, torch.rand(3).tolist()]


@pytest.mark.parametrize("same", [True, False])
def test_each_rank_has_what_it_would_draw(same: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one seed and with several; what one rank does to its weights is its own, and its generator goes on."""
    draws: list[Any] = []
    fill = special.RandomFills.fill

    def counted(self: Any, draw: Any, *rest: Any) -> None:
        fill(self, lambda *args, **kwargs: draws.append(draw(*args, **kwargs)), *rest)

    monkeypatch.setattr(special.RandomFills, "fill", counted)
    got = simulate(weights, on="ethernet-cpu:1", nproc_per_node=4, args=(same,)).results
    expected = [real(0 if same else rank) for rank in range(4)]
    expected[0][0] = [0.0, 0.0, 0.0]
    assert got == expected
    assert len(draws) == 2 * (1 if same else 4)
