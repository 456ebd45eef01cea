"""`kernel_cost`: what the user says of operators of his own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from distsim.errors import UsageError
from distsim.kernels import Gpu, kernel_cost
from distsim.kernels.gpu import _COSTS
from tests.kernels.shapes import meta


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What one test says of an operator is not heard by the next."""
    kept = dict(_COSTS)
    yield
    _COSTS.clear()
    _COSTS.update(kept)


@pytest.fixture(scope="module")
def product() -> Any:
    @torch.library.custom_op("distsim_priced::product", mutates_args=())
    def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x @ w

    return product


def price(x: Any, w: Any) -> Any:
    func = torch.ops.distsim_priced.product.default
    return Gpu.named("h100").cost(func, (x, w), {}, meta(x.shape[0], w.shape[1]))


def test_flops_and_bytes_may_be_functions_of_the_arguments(product: Any) -> None:
    """The longer of the two is the time."""
    kernel_cost(product, flops=lambda x, w: 2 * x.numel() * w.shape[1], bytes=lambda x, w: x.nbytes)
    cost = price(meta(4096, 4096), meta(4096, 4096))
    assert (cost.flops, cost.nbytes, cost.kind, cost.kernels) == (2 * 4096**3, 2 * 4096**2, "custom", 1)
    assert not cost.memory_bound
    assert 0.5 < cost.flops / cost.seconds / 989e12 < 0.8


def test_without_bytes_every_tensor_goes_through_memory_once(product: Any) -> None:
    """As an elementwise operator's do."""
    kernel_cost(product, flops=0)
    cost = price(meta(1024, 1024), meta(1024, 1024))
    assert cost.nbytes == 3 * 2 * 2**20
    assert cost.memory_bound


@pytest.mark.parametrize("of", ["name", "packet", "overload", "decorator"])
def test_an_operator_may_be_named_in_every_way_torch_has(product: Any, of: str) -> None:
    """By its name, as packet, as overload, under a decorator."""
    named = {
        "name": "distsim_priced::product",
        "packet": torch.ops.distsim_priced.product,
        "overload": torch.ops.distsim_priced.product.default,
    }
    if of == "decorator":
        assert kernel_cost(bytes=123)(product) is product
    else:
        assert kernel_cost(named[of], bytes=123) is named[of]
    assert price(meta(8, 8), meta(8, 8)).nbytes == 123


def test_what_is_no_operator_is_refused_in_one_line() -> None:
    """So is a negative amount."""

    def forward() -> None: ...

    with pytest.raises(UsageError, match=r"expected an operator .* got 'forward' \(function\)"):
        kernel_cost(forward)
    with pytest.raises(UsageError, match="expected flops of 0 or more, got -1"):
        kernel_cost("my::op", flops=-1)


def test_aten_can_be_said_otherwise() -> None:
    """The user's word goes before the rule's."""
    kernel_cost("aten::relu", bytes=7)
    cost = Gpu.named("h100").cost(torch.ops.aten.relu.default, (meta(8),), {}, meta(8))
    assert cost.nbytes == 7
