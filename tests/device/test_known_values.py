"""What comes of few values that are known on a GPU is what the CPU makes of them: numbers, types, errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, hessian, jacfwd, jacrev, jvp, vmap

import distsim
from distsim.errors import RankFailure
from distsim.sim.device import hooks

Z = [1 + 2j, 3 - 1j, -2 + 0.5j]


def conjugate(device: str) -> list[Tensor]:
    z = torch.tensor(Z, device=device)
    filled = torch.zeros(3, dtype=z.dtype, device=device)
    filled.copy_(z.conj())
    through = torch.tensor(Z, device=device)
    through.conj().mul_(2j)
    written = torch.tensor(Z, device=device)
    written.conj().fill_(1 + 5j)
    one = torch.tensor(Z, device=device)
    one.conj()[1] = 7 - 3j
    return [
        z.conj(), z.conj() * 1, z.conj()[0], z @ z.conj(), torch.vdot(z, z), z.conj().clone(), z.conj().contiguous(),
        z.conj().resolve_conj(), filled, through, written, one, z.view(3, 1).mH, z.conj().to(torch.complex128),
        torch.cat([z, z.conj()]), torch.stack([z.conj(), z]), z.conj().abs(), z.conj().sum(), z.outer(z.conj()),
        torch.polar(z.abs(), z.angle()).conj(), torch.where(z.real > 0, z.conj(), z), z.conj().to("cpu"),
    ]  # fmt: skip


def negative(device: str) -> list[Tensor]:
    z = torch.tensor(Z, device=device)
    through = torch.tensor(Z, device=device)
    through.conj().imag.add_(1)
    return [
        z.conj().imag, z.conj().imag + 1, z.conj().imag.clone(), torch._neg_view(z.real), z.conj().real, z.imag,
        through, torch.view_as_real(z), z.conj().imag.cumsum(0), z.conj().imag.sum(), torch.view_as_complex(
            torch.view_as_real(z)), z.conj().imag.resolve_neg(), z.conj().imag.to("cpu"),
    ]  # fmt: skip


def default_type(device: str) -> list[Tensor]:
    """Before and after: what torch found for the one must not answer the other."""
    whole = torch.arange(1, 5, device=device)

    def all_of() -> list[Tensor]:
        return [
            whole / 2, whole.sin(), whole.float().mean(), torch.ones(3, device=device), whole * 1.5, whole.mul(2.5),
            torch.zeros(2, device=device), torch.full((2,), 1.5, device=device), whole.sqrt(), whole.softmax(0, float),
            torch.linspace(0, 1, 4, device=device), torch.tensor([1.5, 2], device=device), torch.true_divide(whole, 3),
            torch.eye(2, device=device), torch.arange(0.0, 1.0, 0.25, device=device), torch.where(whole > 2, 1.0, 0.0),
        ]  # fmt: skip

    found = all_of()
    for dtype in (torch.float64, torch.bfloat16, torch.float32):
        torch.set_default_dtype(dtype)
        found += all_of()
    return found


def derivatives(device: str) -> list[Tensor]:
    x = torch.tensor([0.5, -1.0, 2.0], device=device)

    def f(x: Tensor) -> Tensor:
        return (x**3).sum() + x.sin().prod()

    model = torch.nn.Linear(3, 1)
    weights = {
        "weight": torch.tensor([[1.0, 2.0, 3.0]], device=device),
        "bias": torch.tensor([1.0], device=device),
    }
    each = vmap(jacrev(lambda w, x: functional_call(model, w, (x,)).sum()), (None, 0))(weights, torch.stack([x, 2 * x]))
    return [
        hessian(f)(x), jacfwd(jacfwd(f))(x), jacrev(jacfwd(f))(x), jacrev(jacrev(f))(x),
        vmap(hessian(f))(torch.stack([x, 2 * x])),
        *jvp(f, (x,), (x,)), vmap(vmap(lambda a: a * 2))(torch.stack([x, x])), each["weight"], each["bias"],
        jvp(lambda a: vmap(lambda t: a * t)(torch.eye(3, device=device)), (x,), (x,))[1],
    ]  # fmt: skip


def other_looks(device: str) -> list[Tensor]:
    """In place, and of a tensor that is given for the result."""
    x = torch.arange(12.0, device=device).view(1, 3, 1, 4)
    y, z = x.clone(), torch.empty(0, device=device)
    y.squeeze_((0, 2)).t_().unsqueeze_(0).transpose_(0, 1).swapaxes_(0, 1).squeeze_()
    found = [y, z.set_(x).clone(), z.set_().clone(), torch.empty(0, device=device).resize_as_(x).zero_()]
    for function in (torch.add, torch.mul):
        out = torch.empty(0, device=device)
        function(x, x, out=out)
        found.append(torch.zeros_like(out))
    matrix, rows = x.view(3, 4), torch.empty(0, device=device)
    torch.matmul(matrix, matrix.T, out=rows)
    return [*found, torch.zeros_like(rows)]


def looks_alone(device: str) -> list[Tensor]:
    """A constant that looks like what nobody knows is known."""
    unknown = torch.empty(3, device=device)
    unknown.resize_(70_000)
    few = unknown[:3].clone()
    return [
        torch.zeros_like(few), torch.ones_like(few), torch.full_like(few, 2.5), unknown.new_zeros(2), few.new_ones(2),
        unknown.new_full((2,), 7.0), torch.zeros_like(few, dtype=torch.int64),
        few.new_zeros(2) + torch.ones_like(few[:2]),
    ]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch asks it for decompositions
@pytest.mark.parametrize("made", [conjugate, negative, default_type, derivatives, other_looks, looks_alone])
def test_as_on_the_cpu(made: Callable[[str], list[Tensor]]) -> None:
    """Each of them gives the same numbers, types and shapes on both."""

    def both() -> list[tuple[Any, Any]]:
        default = torch.get_default_dtype()
        try:
            return [
                (made_of(tensors, "cpu"), made_of(tensors, "cuda"))
                for tensors in zip(made("cpu"), made("cuda"), strict=True)
            ]
        finally:
            torch.set_default_dtype(default)

    def made_of(pair: tuple[Tensor, Tensor], which: str) -> tuple[Any, list[float]]:
        tensor = pair[which == "cuda"].detach()
        return (tensor.dtype, tensor.shape), tensor.cpu().resolve_conj().resolve_neg().to(
            torch.complex128
        ).flatten().tolist()

    (pairs,) = distsim.simulate(both, "dgx-h100:1", nproc_per_node=1).results
    for i, (cpu, cuda) in enumerate(pairs):
        assert cuda[0] == cpu[0], (i, cpu, cuda)
        assert cuda[1] == pytest.approx(cpu[1], rel=1e-5, abs=1e-6), i


def test_a_tensor_of_numbers_may_be_the_first_use() -> None:
    """torch.tensor keeps dispatch modes out while it makes one: the look whether this build of torch has what it takes
    was told that it has not."""
    hooks.tested.cache_clear()
    ran = distsim.simulate(lambda: torch.tensor([1.0, 2.0], device="cuda").tolist(), "dgx-h100:1", nproc_per_node=1)
    assert ran.results == [[1.0, 2.0]]


def old_types() -> list[Any]:
    few = torch.cuda.FloatTensor([1, 2])
    storage = torch.UntypedStorage(16, device="cuda")
    return [
        few.tolist(), few.is_cuda, few.type(), torch.cuda.LongTensor(3, 2).shape,
        isinstance(few, torch.cuda.FloatTensor), isinstance(few.half(), torch.cuda.FloatTensor),
        torch.ones(2).type(torch.cuda.HalfTensor).type(), few.type("torch.cuda.IntTensor").tolist(),
        few.type("torch.FloatTensor").is_cuda, storage.device.type, storage.nbytes(),
        torch.UntypedStorage([1, 2]).tolist(),
    ]  # fmt: skip


def test_types_and_storages_of_old() -> None:
    """Memory on a GPU that is asked for without `device=`, and a storage by its size, are as on the cluster."""
    (found,) = distsim.simulate(old_types, "dgx-h100:1", nproc_per_node=1).results
    assert found == [
        [1.0, 2.0], True, "torch.cuda.FloatTensor", torch.Size([3, 2]), True, False, "torch.cuda.HalfTensor", [1, 2],
        False, "cuda", 16, [1, 2],
    ]  # fmt: skip
    with pytest.raises(RankFailure, match=r"say torch\.set_default_device"):
        distsim.simulate(
            lambda: torch.set_default_tensor_type("torch.cuda.FloatTensor"), "dgx-h100:1", nproc_per_node=1
        )


def suppress(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Keep the first of equal boxes, by falling score: nms for boxes that are equal or far apart."""
    kept: list[int] = []
    for index in scores.argsort(descending=True).tolist():
        if not any(torch.equal(boxes[index], boxes[other]) for other in kept):
            kept.append(index)
    return torch.tensor(kept)


@pytest.fixture
def nms() -> Iterator[None]:
    """Define torchvision's operator as torchvision does, if it is not installed; it is undone with the library."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    if not hasattr(torch.ops.torchvision, "nms"):
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.impl("nms", suppress, "CPU")
    yield
    library._destroy()


@pytest.mark.usefixtures("nms")
def test_nms_keeps_all_boxes_that_nobody_knows() -> None:
    """A detector goes on with the most boxes that there can be; torchvision's meta kernel refuses to guess."""

    def body() -> Any:
        boxes, scores = torch.rand(300, 4, device="cuda"), torch.rand(300, device="cuda")
        kept = torch.ops.torchvision.nms(boxes, scores, 0.5)
        return kept.dtype, kept.device.type, boxes[kept[:100]].shape

    (found,) = distsim.simulate(body, "dgx-h100:1", nproc_per_node=1).results
    assert found == (torch.int64, "cuda", torch.Size([100, 4]))


@pytest.mark.usefixtures("nms")
@pytest.mark.parametrize("data", ["shapes", "real"])
def test_nms_suppresses_boxes_that_are_known(data: Any) -> None:
    """A box that equals one of a higher score is left out, as torchvision does on the host."""

    def body() -> Any:
        boxes = torch.tensor([[0.0, 0.0, 10.0, 10.0], [20.0, 20.0, 30.0, 30.0], [0.0, 0.0, 10.0, 10.0]], device="cuda")
        kept = torch.ops.torchvision.nms(boxes, torch.tensor([0.2, 0.5, 0.9], device="cuda"), 0.5)
        return kept.tolist(), kept.dtype, kept.device.type

    (found,) = distsim.simulate(body, "dgx-h100:1", nproc_per_node=1, data=data).results
    assert found == ([2, 1], torch.int64, "cuda")
