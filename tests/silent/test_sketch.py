"""The sketch: linear, a measure of distance, and without a trace in the tensor that it reads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from distsim.debug.diagnosis.silent.collect import sketch as sketches
from distsim.debug.diagnosis.silent.collect.sketch import (
    WIDTH,
    Addresses,
    Parameters,
    ShardedModules,
    array_of,
    is_constant,
    sketch,
)


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


def test_weights_of_a_sketch_are_the_same_in_every_process() -> None:
    """Also once more of them were needed; of mean 0 and mean square 1."""
    first = sketches._signs_of(4).copy()
    many = sketches._signs_of(100_000)
    np.testing.assert_array_equal(first, many[:4])
    np.testing.assert_allclose(first, [0.7495, -0.9234, 0.5973, -0.9825], atol=1e-4)
    assert abs(float(many.mean())) < 0.01
    assert float((many**2).mean()) == pytest.approx(1.0, rel=0.01)
    assert 0.48 <= float(np.abs(many).min()) < float(np.abs(many).max()) <= 1.442


@pytest.mark.parametrize("size", [1, 15, 16, 17, 32, 35])
def test_a_sketch_by_hand(size: int) -> None:
    """Number i counts for sum i % 16, with the weight of row i // 16."""
    values = np.arange(1, size + 1, dtype=np.float32)
    signs = sketches._signs_of(3)
    by_hand = np.zeros(WIDTH)
    for index, value in enumerate(values):
        by_hand[index % WIDTH] += signs[index // WIDTH] * value
    np.testing.assert_allclose(sketches.sketch_array(values), by_hand, rtol=1e-5)


def test_values_that_are_read_in_place() -> None:
    """A parameter and a tensor by its strides; not what torch would have to compute, and no class of somebody's own."""
    tensor = torch.arange(12.0).view(3, 4)
    for view in (tensor, tensor.t(), tensor[:, 1:], nn.Parameter(tensor), tensor[1, 2]):
        values = array_of(view)
        assert values is not None
        assert values.tolist() == view.tolist()
    assert array_of(torch._neg_view(tensor)) is None
    assert array_of(tensor.as_subclass(type("Other", (torch.Tensor,), {}))) is None
    assert array_of(torch.ones(2, dtype=torch.bool)).tolist() == [True, True]  # type: ignore[union-attr]
    assert [is_constant(torch.full((3,), 2.0)), is_constant(torch.tensor([2.0, 2.0, 1.0]))] == [
        True,
        False,
    ]
    assert not is_constant(torch.empty(0))
    assert sketch(torch.ones(2), read=lambda tensor: np.zeros(0)) is None


def parameters() -> Parameters:
    return Parameters(array_of, lambda tracked, gradient: None)


def test_parameters_are_followed_once_under_their_names() -> None:
    """One that is frozen only once an optimizer has it, under its name in the model; an unknown one as asked."""
    followed, model = parameters(), nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    model[1].bias.requires_grad_(False)
    for _ in range(2):
        followed.add_model(model)
    assert [(fact.name, fact.module, fact.shape) for fact in followed.facts] == [
        ("0.weight", "0", (2, 3)),
        ("0.bias", "0", (2,)),
        ("1.weight", "1", (2, 2)),
    ]
    assert followed.get(model[1].bias) is None
    assert followed.of_optimizer(model[1].bias, "x").index == 3
    assert followed.of_optimizer(nn.Parameter(torch.ones(1)), "x").index == 4
    assert followed.of_optimizer(model[0].weight, "x").index == 0
    assert [(fact.name, fact.module, fact.constant) for fact in followed.facts[3:]] == [
        ("1.bias", "1", False),
        ("x", "", True),
    ]
    assert [tracked.index for _, tracked in followed.living()] == [0, 1, 2, 3]


def test_names_of_parameters_and_buffers() -> None:
    """A shared part once; buffers that a checkpoint has and then parameters without a gradient."""
    shared = nn.Linear(3, 2)
    model = nn.Module()
    model.one, model.other, model.norm = shared, shared, nn.BatchNorm1d(2)
    model.register_buffer("kept", torch.ones(1))
    model.register_buffer("left_out", torch.ones(1), persistent=False)
    model.one.register_buffer("inner", torch.ones(1))
    assert [name for name, _, _ in sketches.parameters_of(model)] == [
        "one.weight",
        "one.bias",
        "norm.weight",
        "norm.bias",
    ]
    model.fixed = nn.Parameter(torch.ones(2), requires_grad=False)
    model.norm.mean = nn.Parameter(torch.ones(2), requires_grad=False)
    assert [name for name, _ in sketches.unreduced_of(model)] == ["kept", "one.inner", "fixed"]


REPLICATE, SHARD = (SimpleNamespace(is_replicate=lambda answer=answer: answer) for answer in (True, False))
MESH = [
    # shape of the mesh, coordinate, placements -> ranks with the same part
    ((4,), [1], (REPLICATE,), (10, 11, 12, 13)),
    ((4,), [1], (SHARD,), (11,)),
    ((2, 3), [0, 2], (REPLICATE, SHARD), (12, 15)),
    ((2, 3), [1, 2], (SHARD, REPLICATE), (13, 14, 15)),
    ((2, 3), [1, 1], (SHARD, SHARD), (14,)),
    ((2, 3), [1, 1], (REPLICATE, REPLICATE), (10, 11, 12, 13, 14, 15)),
    ((2, 3), None, (SHARD, SHARD), ()),
]


@pytest.mark.parametrize(("shape", "coordinate", "placements", "ranks"), MESH)
def test_ranks_that_hold_the_same_part(shape: Any, coordinate: Any, placements: Any, ranks: tuple[int, ...]) -> None:
    """By what the mesh replicates; none for a rank outside of it."""
    mesh = SimpleNamespace(
        mesh=torch.arange(10, 10 + int(np.prod(shape))).view(shape), get_coordinate=lambda: coordinate
    )
    assert sketches.mesh_ranks(mesh, placements) == ranks


def test_tensors_are_recognized_by_their_memory() -> None:
    """By address and number of elements, as it is now."""
    followed, model = parameters(), nn.Linear(3, 2)
    followed.add_model(model)
    addresses = Addresses(followed)
    assert addresses.gradient_of(torch.ones(6)) is None
    model(torch.ones(1, 3)).sum().backward()
    weight, gradient = model.weight, model.weight.grad
    assert addresses.gradient_of(gradient) is None, "the index is older"
    addresses.forget()
    assert addresses.gradient_of(gradient) is addresses.value_of(weight.detach().view(6)) is followed.get(weight)
    assert addresses.gradient_of(weight) is addresses.value_of(gradient) is None
    assert addresses.value_of(weight[0]) is None, "a part of it"
    assert addresses.value_of(torch.eye(2).to_sparse()) is None
    assert addresses.value_of(torch.empty(6, device="meta")) is None
    weight.grad = None
    assert addresses.gradient_of(gradient) is None


class DTensor:
    """A parameter that fully_shard has sharded over ranks 2 and 1."""

    is_leaf, requires_grad = True, True
    placements = (SHARD,)

    def __init__(self) -> None:
        self.device_mesh = SimpleNamespace(mesh=torch.tensor([2, 1]), get_coordinate=lambda: [0])


def test_writes_to_gathered_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the version of the gathered tensor, from the second forward pass on."""
    monkeypatch.setattr(sketches, "local_part", lambda tensor: torch.ones(1) if isinstance(tensor, DTensor) else tensor)
    shard, gathered = DTensor(), nn.Parameter(torch.ones(2))
    followed = parameters()
    followed.add(shard, "w", "")
    sharded = ShardedModules(followed)
    module = nn.Module()
    held: dict[str, Any] = {"w": shard}
    monkeypatch.setattr(sketches, "parameters_of", lambda model: [(name, one, "") for name, one in held.items()])
    sharded.enter(module)
    assert list(sharded.written(module)) == [], "not gathered"
    held["w"] = gathered
    sharded.enter(module)
    assert list(sharded.written(module)) == [], "nothing to compare with"
    assert followed.facts[0].fsdp == (1, 2)
    assert list(sharded.written(module)) == []
    with torch.no_grad():
        gathered.add_(1)
    assert list(sharded.written(module)) == ["w"]
    assert list(sharded.written(module)) == []
    held["w"] = nn.Parameter(torch.ones(2))
    with torch.no_grad():
        held["w"].add_(1).add_(1).add_(1)
    assert list(sharded.written(module)) == [], "another tensor"
    assert list(sharded.written(nn.Module())) == []
    assert followed.facts[0].mesh == (2,)
