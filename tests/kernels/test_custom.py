"""`kernel_cost`: what the user says of operators of his own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from distsim.errors import UsageError
from distsim.kernels import Gpu, kernel_cost
from distsim.kernels.cost import nbytes
from distsim.kernels.gpu import COSTS
from tests.kernels.shapes import meta


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What one test says of an operator is not heard by the next."""
    kept = dict(COSTS)
    yield
    COSTS.clear()
    COSTS.update(kept)


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
    for name in ("op", "a::b::c", 3):
        with pytest.raises(UsageError, match="expected an operator"):
            kernel_cost(name)
    kernel_cost("my::op", flops=0, bytes=0)
    for amounts in ({"flops": -1}, {"bytes": -0.5}):
        with pytest.raises(UsageError, match="of 0 or more, got -"):
            kernel_cost("my::op", **amounts)


def test_aten_can_be_said_otherwise() -> None:
    """The user's word goes before the rule's."""
    kernel_cost("aten::relu", bytes=7)
    cost = Gpu.named("h100").cost(torch.ops.aten.relu.default, (meta(8),), {}, meta(8))
    assert cost.nbytes == 7


LAUNCHES = [
    # flops, bytes -> what it takes beyond the floor
    (None, None, 800, 0, True, "without a cost what it moves"),
    (0, 0, 0, 0, True, "nothing: the floor alone"),
    (10**12, 0, 0, 10**12, False, "flops at the rate of products"),
    (10**9, 10**9, 10**9, 10**9, True, "the longer one"),
]


@pytest.mark.parametrize(("flops", "moved", "nbytes", "counted", "memory_bound", "reason"), LAUNCHES)
def test_the_cost_of_a_launch(
    flops: int | None, moved: int | None, nbytes: int, counted: int, memory_bound: bool, reason: str
) -> None:
    """The longer of its flops and its bytes, beside the kernel's floor."""
    gpu, given = Gpu.named("h100"), flops is not None
    if given:
        kernel_cost("cuda::mine", flops=flops, bytes=moved)
    cost, is_given = gpu.launch_cost("cuda::mine", (meta(8),), {"other": [meta(8)]}, 800)
    spec = gpu.spec
    bytes_s = nbytes / (spec.chip.memory_bandwidth * spec.memory.elementwise)
    math_s = counted / (spec.chip.peak("bf16") * spec.gemm.sustained("bf16"))
    assert cost.seconds == pytest.approx(spec.memory.floor + max(bytes_s, math_s)), reason
    assert (cost.memory_bound, cost.kernels, cost.nbytes, cost.flops) == (memory_bound, 1, nbytes, counted)
    assert is_given is given


@pytest.mark.parametrize(
    ("size", "stride", "number"),
    [((2, 3), (3, 1), 6), ((2, 3), (0, 1), 3), ((2, 3), (0, 0), 1), ((0, 3), (0, 1), 0), ((0,), (1,), 0), ((), (), 1)],
)
def test_bytes_that_a_tensor_has_in_memory(size: Any, stride: Any, number: int) -> None:
    """Once for all that it repeats; nothing has no bytes, however it is laid out."""
    tensor = torch.empty_strided(size, stride, dtype=torch.bfloat16, device="meta")
    assert nbytes([tensor, {"again": (tensor,)}, 7]) == 2 * 2 * number


@pytest.mark.parametrize(
    ("memory", "bandwidth", "expected"),
    [
        (None, None, None),
        (1.05, None, None),
        (0.95, None, None),
        (1.11, None, 1.11),
        (0.5, 1e12, 0.5),
        (1.05, 1e12, None),
    ],
)
def test_memory_of_another_card(memory: float | None, bandwidth: float | None, expected: float | None) -> None:
    """A tenth more or less is the same card, which is sold by a round number."""
    plain = Gpu.named("h100")
    gpu = Gpu.named("h100", memory=memory and memory * plain.memory_bytes, memory_bandwidth=bandwidth)
    assert gpu.memory_bytes == int((expected or 1) * plain.memory_bytes)
    assert gpu.memory_bandwidth == (bandwidth or plain.memory_bandwidth)
    assert (gpu.spec == plain.spec) is (expected is None and bandwidth is None)
