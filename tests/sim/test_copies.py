"""Results are written as a backend writes memory: whatever torch keeps of the tensor stays as it was."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from distsim.sim.c10d.operations import copy_into


def leaf() -> Tensor:
    return torch.zeros(2, 3, requires_grad=True)


def parameter() -> Tensor:
    return Parameter(torch.zeros(2, 3))


def computed() -> Tensor:
    return torch.zeros(2, 3, requires_grad=True) * 1.0


def part_of_leaf() -> Tensor:
    return torch.zeros(4, 3, requires_grad=True)[:2]


def inferred() -> Tensor:
    with torch.inference_mode():
        return torch.zeros(2, 3)


def plain() -> Tensor:
    return torch.zeros(2, 3)


def source_with_gradient() -> Tensor:
    return torch.arange(6.0, requires_grad=True) * 1.0


def source_inferred() -> Tensor:
    with torch.inference_mode():
        return torch.arange(6.0)


def source_plain() -> Tensor:
    return torch.arange(6.0)


@pytest.mark.parametrize("target_of", [plain, leaf, parameter, computed, part_of_leaf, inferred])
@pytest.mark.parametrize("source_of", [source_plain, source_with_gradient, source_inferred])
@pytest.mark.parametrize("mode", ["grad", "no_grad", "inference"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_copy(target_of: Callable[[], Tensor], source_of: Callable[[], Tensor], mode: str, deterministic: bool) -> None:
    """Whatever either side asks of autograd, in every mode: the values arrive, nothing is recorded or counted."""
    target, source = target_of(), source_of()
    kept = target.requires_grad, target.grad_fn, target.is_leaf, type(target)
    version = None if target.is_inference() else target._version
    torch.use_deterministic_algorithms(deterministic)
    try:
        with {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}[mode]():
            copy_into(target, source)
    finally:
        torch.use_deterministic_algorithms(False)
    with torch.no_grad():
        assert torch.equal(target, torch.arange(6.0).reshape(2, 3))
    assert (target.requires_grad, target.grad_fn, target.is_leaf, type(target)) == kept
    assert target.is_inference() or target._version == version


def test_saved_for_backward() -> None:
    """A tensor that backward needs may receive: as with a real backend, torch counts no write."""
    x = torch.ones(3, requires_grad=True)
    hidden = x * 2.0
    loss = (hidden * hidden).sum()
    copy_into(hidden, torch.full((3,), 5.0))
    loss.backward()
    assert x.grad is not None
    assert x.grad.tolist() == [20.0] * 3  # 2 * what lies there now * 2


def test_strides_and_types() -> None:
    """Elements go by position into any strides, and are converted."""
    target = torch.zeros(3, 2, dtype=torch.float64).T
    copy_into(target, torch.arange(6))
    assert target.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def test_under_a_dispatch_mode() -> None:
    """A mode that is on sees a copy and views, and none of them asks for a gradient."""
    seen: list[bool] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            seen.append(result.requires_grad)
            return result

    target = leaf()
    with Mode():
        copy_into(target, torch.arange(6.0, requires_grad=True))
    assert seen
    assert not any(seen)
    assert target.detach().reshape(-1).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
