"""What is recorded of a rank's run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from distsim.debug.diagnosis.silent.collect.sketch import array_of
from distsim.planning.equal import record
from distsim.planning.equal.record import TensorRecorder, read_run, recording, without_dropout, write_run


def _recorder(**given: Any) -> TensorRecorder:
    settings: dict[str, Any] = {"start": {}, "perturbed": False, "renamed": {}, "world_size": 1} | given
    return TensorRecorder(0, 2, array_of, **settings)


def _train(
    recorder: TensorRecorder, model: torch.nn.Module, steps: int = 3, done: Callable[[], None] = lambda: None
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with recording(lambda: recorder, done):
        for step in range(steps):
            model(torch.full((2, 3), 1.0 + step)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


class _Wrapped(torch.nn.Module):
    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> Any:
        return self.module(x)


def test_a_step_in_its_order(tmp_path: Path) -> None:
    """Start, input, outputs, their gradients, gradients, parameters; the same under a wrapper; steps behind the last
    that is compared are not kept."""
    linear = torch.nn.Linear(3, 2)
    recorder = _recorder()
    _train(recorder, _Wrapped(torch.nn.Sequential(linear)))
    kinds = [(key.step, key.kind, key.name) for key in recorder.kept if key.step == 0 and key.part == key.call == 0]
    assert kinds == [
        (0, "start", "0.weight"),
        (0, "start", "0.bias"),
        (0, "input", ""),
        (0, "output", "0"),
        (0, "output", ""),
        (0, "output_gradient", "0"),
        (0, "output_gradient", ""),
        (0, "gradient", "0.weight"),
        (0, "gradient", "0.bias"),
        (0, "parameter", "0.weight"),
        (0, "parameter", "0.bias"),
    ]
    assert {key.step for key in recorder.kept} == {0, 1}
    write_run({0: recorder}, tmp_path / "run.npz")
    run = read_run(tmp_path / "run.npz")
    assert list(run.ranks[0]) == list(recorder.kept)
    gradient = run.ranks[0][record.TensorKey(1, "gradient", 0, "0.weight", 0, 0)]
    assert gradient.load().tolist() == [[4.0] * 3] * 2
    assert gradient.site.startswith("equal/test_record.py:") or "test_record.py:" in gradient.site
    assert run.classes == {"": "Sequential", "0": "Linear"}


def test_values_to_start_with_and_names_of_the_other_layout() -> None:
    """The model begins with what it is given, by the name of the other layout."""
    linear = torch.nn.Linear(3, 2, bias=False)
    given = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    recorder = _recorder(start={"layers.4.weight": given}, renamed={"0:0": "layers.4", "1:0": "layers.8"})
    _train(recorder, torch.nn.Sequential(linear), steps=1)
    assert np.array_equal(recorder.kept[record.TensorKey(0, "start", 0, "layers.4.weight", 0, 0)][1], given)


def test_a_rounding_moves_every_parameter_a_little() -> None:
    """About 1.2e-7 of its size."""
    linear = torch.nn.Linear(64, 64, bias=False)
    before = linear.weight.detach().clone()
    recorder = _recorder(perturbed=True)
    with recording(lambda: recorder, lambda: None):
        linear(torch.ones(1, 64))
    change = ((linear.weight.detach() - before).double() / before.double()).abs()
    assert 0.0 < float(change.mean()) < 3e-7


def test_dropout_lets_everything_through() -> None:
    """Modules, functions and attention, and only within."""
    x = torch.ones(1000)
    with without_dropout():
        assert torch.equal(torch.nn.Dropout(0.5)(x), x)
        assert torch.equal(F.dropout(x, 0.9), x)
        q = torch.randn(1, 1, 8, 4)
        held = F.scaled_dot_product_attention(q, q, q, dropout_p=0.9)
        assert torch.equal(held, F.scaled_dot_product_attention(q, q, q))
    assert not torch.equal(F.dropout(x, 0.9), x)


def test_more_than_one_can_keep_is_a_refusal(monkeypatch: Any) -> None:
    """In one line; the program goes on."""
    monkeypatch.setattr(record, "MOST_BYTES", 100)
    recorder = _recorder()
    _train(recorder, torch.nn.Sequential(torch.nn.Linear(3, 2)))
    assert "compare fewer steps (--steps 1)" in recorder.refusal


def test_parts_that_a_dtensor_adds_up_where_they_are_used_are_not_kept() -> None:
    """A placement of a DTensor says that nothing is missing."""

    class DTensor:
        def __init__(self, partial: bool) -> None:
            self.placements = (SimpleNamespace(is_partial=lambda: partial),)

    assert record.is_partial(DTensor(True))
    assert not record.is_partial(DTensor(False))
    assert not record.is_partial(torch.ones(2))


def test_a_second_backward_pass_adds_up() -> None:
    """The gradient of an output that two losses have is their sum."""
    linear = torch.nn.Linear(3, 2)
    recorder = _recorder()
    optimizer = torch.optim.SGD(linear.parameters(), 0.1)
    with recording(lambda: recorder, lambda: None):
        output = linear(torch.ones(1, 3))
        output.sum().backward(retain_graph=True)
        (2 * output).sum().backward()
        optimizer.step()
    assert recorder.kept[record.TensorKey(0, "output_gradient", 0, "", 0, 0)][1].tolist() == [[3.0, 3.0]]
