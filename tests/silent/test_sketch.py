"""The sketch: linear, a measure of distance, and without a trace in the tensor that it reads."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from distsim.debug.diagnosis.silent.collect.sketch import array_of, is_constant, sketch


def test_the_sketch_of_a_sum_is_the_sum_of_the_sketches() -> None:
    """Gradients of micro-batches and ranks can be added without moving them."""
    a, b = torch.randn(37, 5), torch.randn(37, 5)
    together = sketch(a + b)
    parts = sketch(a), sketch(b)
    assert together is not None
    assert parts[0] is not None
    assert parts[1] is not None
    np.testing.assert_allclose(together, parts[0] + parts[1], atol=1e-4)


@pytest.mark.parametrize("seed", range(8))
def test_the_distance_of_sketches_is_that_of_the_tensors(seed: int) -> None:
    """Within a factor of two, in every draw, also where one element alone has changed."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(4099, generator=generator)
    for change in (torch.randn(4099, generator=generator), torch.zeros(4099).index_fill(0, torch.tensor(seed), 1e-3)):
        one, other = sketch(a), sketch(a + change)
        assert one is not None
        assert other is not None
        true = float(change.norm())
        assert 0.4 * true < float(np.linalg.norm(one - other)) < 2 * true


@pytest.mark.parametrize("size", [1, 15, 16, 32, 48, 1024])
def test_a_constant_that_was_added_leaves_a_trace(size: int) -> None:
    """Weights of -1 and 1 alone would cancel in a bias of 32 numbers."""
    one, other = sketch(torch.zeros(size)), sketch(torch.ones(size))
    assert one is not None
    assert other is not None
    assert float(np.linalg.norm(one - other)) > 1e-2 * size**0.5


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(6, 10).t(),
        torch.randn(40).to(torch.bfloat16),
        torch.randn(40).half(),
        torch.arange(40),
        torch.randn(1, 1).expand(4, 10),
    ],
    ids=["transposed", "bfloat16", "half", "integers", "expanded"],
)
def test_a_tensor_is_read_in_the_order_of_its_elements(tensor: torch.Tensor) -> None:
    """Strides and types change nothing."""
    one, other = sketch(tensor), sketch(tensor.contiguous().float())
    assert one is not None
    assert other is not None
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_tensors_without_plain_values_have_no_sketch() -> None:
    """What nobody knows is not evidence: meta, sparse, complex and empty tensors, and storages that FSDP has freed."""
    freed = torch.randn(64)
    freed.untyped_storage().resize_(0)
    for tensor in (
        torch.empty(4, device="meta"),
        torch.eye(4).to_sparse(),
        torch.zeros(4, dtype=torch.complex64),
        torch.empty(0),
        freed,
    ):
        assert sketch(tensor) is None


def test_a_storage_that_was_read_can_still_be_resized() -> None:
    """`Tensor.numpy` would make FSDP raise "Trying to resize storage that is not resizable"."""
    tensor = torch.randn(64)
    assert sketch(tensor) is not None
    tensor.untyped_storage().resize_(0)


def test_an_array_keeps_its_tensor_alive() -> None:
    """The values of a temporary (the state of a generator) stay as they were when it is gone."""
    values = array_of(torch.full((1 << 20,), 7.0))
    assert values is not None
    torch.full((1 << 20,), 8.0)
    assert (values == 7.0).all()


def test_constants_are_known() -> None:
    """Zeros of a bias and ones of a norm say nothing of replicas."""
    assert is_constant(torch.ones(5))
    assert not is_constant(torch.arange(5))
    assert array_of(torch.empty(3, device="meta")) is None
