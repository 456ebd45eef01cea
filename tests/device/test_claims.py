"""What memory was taken for, as a report on too little of it has it: by hand-made programs on one GPU."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist

import distsim
from distsim.report import report_document
from distsim.sim.device.allocator import claims

MIB = 1 << 20
Adam, SGD = torch.optim.Adam, torch.optim.SGD

KEPT: list[tuple[Any, dict[str, Any], int | None]] = [
    (Adam, {}, 3),
    (Adam, {"foreach": False}, 2),
    (Adam, {"fused": True}, 2),
    (Adam, {"foreach": False, "amsgrad": True}, 3),
    (Adam, {"weight_decay": 0.1}, 4),
    (Adam, {"weight_decay": 0.1, "foreach": False}, 2),
    (torch.optim.AdamW, {"weight_decay": 0.1}, 3),
    (SGD, {}, 0),
    (SGD, {"momentum": 0.9}, 1),
    (SGD, {"weight_decay": 0.1}, 1),
    (SGD, {"weight_decay": 0.1, "momentum": 0.9}, 2),
    (SGD, {"weight_decay": 0.1, "momentum": 0.9, "foreach": False}, 1),
    (torch.optim.Adagrad, {}, None),
]
"""Optimizer -> numbers that it keeps, or takes for a moment, for each number of a parameter."""


@pytest.mark.parametrize(("optimizer", "settings", "numbers"), KEPT)
def test_what_an_optimizer_keeps(optimizer: Any, settings: dict[str, Any], numbers: int | None) -> None:
    """Moments, and the lists of all parameters' roots and decayed gradients where it updates them at once."""
    made_by = optimizer([torch.nn.Parameter(torch.zeros(1))], lr=0.1, **settings)
    assert claims.kept_per_number(made_by, made_by.param_groups[0]) == numbers


def parameter(device: str = "cuda", **settings: Any) -> torch.nn.Parameter:
    """Of one MiB."""
    return torch.nn.Parameter(torch.zeros(MIB // 4, device=device), **settings)


def untrained() -> Any:
    one, other = parameter(), parameter()
    return one, other, Adam([one]), SGD([other], momentum=0.9)


def frozen() -> Any:
    return parameter(requires_grad=False)


def elsewhere() -> Any:
    one, other = parameter("cpu"), parameter("cuda:1")
    return one, other, Adam([one, other])


def unknown_optimizer() -> Any:
    one = parameter()
    return one, SGD([one], momentum=0.9, weight_decay=0.1, foreach=False), torch.optim.Adadelta([one])


def gradients() -> Any:
    one = parameter()
    one.grad = torch.zeros_like(one)
    return one, Adam([one])


def stepped() -> Any:
    one = parameter()
    one.grad = torch.zeros_like(one)
    optimizer = Adam([one], foreach=False)
    optimizer.step()
    one.grad = None
    return one, optimizer, parameter("cuda:1")


def reduced() -> Any:
    """A collective's buffer is communication, unless it is a parameter."""
    dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    one, buffer = parameter(), torch.zeros(2 * MIB, dtype=torch.uint8, device="cuda")
    optimizer = SGD([one])
    optimizer.step()
    dist.all_reduce(one.data)
    dist.all_reduce(buffer)
    return one, buffer, optimizer


SHORT: list[tuple[Any, dict[str, int], int, int | None]] = [
    (untrained, {"parameters": 2}, 2, 3 + 1),
    (frozen, {"parameters": 1}, 0, None),
    (elsewhere, {}, 0, None),
    (unknown_optimizer, {"parameters": 1}, 1, 1),
    (gradients, {"parameters": 1, "gradients": 1}, 0, 3),
    (stepped, {"parameters": 1, "optimizer": 2}, 1, 0),
    (reduced, {"parameters": 1, "communication": 2}, 1, 0),
]
"""Program -> MiB held by kind; MiB of gradients and of optimizers' state to come."""


def short(body: Any) -> dict[str, Any]:
    """What is reported of a program that runs *body* and then wants too much."""

    def program() -> None:
        held = body()
        torch.empty(1 << 40, device="cuda", dtype=torch.uint8)
        del held

    (section,) = report_document(distsim.simulate(program, nproc_per_node=1, check=False))["training"]["out_of_memory"]
    result: dict[str, Any] = section
    return result


@pytest.mark.parametrize(("body", "held", "coming_gradients", "coming_optimizer"), SHORT)
def test_what_is_held_and_what_is_to_come(
    body: Any, held: dict[str, int], coming_gradients: int, coming_optimizer: int | None
) -> None:
    """Of the GPU that has too little memory, and of no other."""
    section = short(body)
    assert {kind: nbytes // MIB for kind, nbytes in section["held"].items() if nbytes >= MIB} == held
    assert section["coming_gradients"] == coming_gradients * MIB
    assert section["coming_optimizer"] == (None if coming_optimizer is None else coming_optimizer * MIB)
    assert section["missing"] == section["allocated"] + (1 << 40) - section["capacity"]
    assert not section["sharded"]
    assert not section["in_backward"]


def test_a_shortage_in_backward_is_one() -> None:
    """Then checkpoints help."""

    class Large(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Any) -> Any:
            return value.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:  # type: ignore[override]
            return torch.empty(1 << 40, device="cuda", dtype=torch.uint8)

    def body() -> None:
        Large.apply(torch.zeros(1, device="cuda", requires_grad=True)).backward()  # type: ignore[no-untyped-call]

    assert short(body)["in_backward"]


def test_memory_belongs_to_the_innermost_module() -> None:
    """Also after one that failed; what is allocated outside of modules belongs to none."""

    class Inner(torch.nn.Module):
        def forward(self, fails: bool) -> Any:
            if fails:
                raise ValueError
            return torch.empty(3 * MIB, device="cuda", dtype=torch.uint8)

    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.weight = Inner(), parameter()

        def forward(self) -> Any:
            with contextlib.suppress(ValueError):
                self.inner(True)
            return self.inner(False), torch.empty(5 * MIB, device="cuda", dtype=torch.uint8)

    def program() -> None:
        model = Outer()
        optimizer = SGD(model.parameters())
        for _ in range(3):
            held = model(), torch.empty(7 * MIB, device="cuda", dtype=torch.uint8)
            optimizer.step()
            del held

    (rank,) = report_document(distsim.simulate(program, nproc_per_node=1))["training"]["ranks"]
    sizes = {name: nbytes // MIB for name, nbytes in rank["modules"].items()}
    assert sizes == {"Outer": 6, "inner": 3, "outside of modules": 7}


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("layers.3.mlp.up", "layers.*.mlp.up"),
        ("module.layers.3.mlp.up", "layers.*.mlp.up"),
        ("_fsdp_wrapped_module.layers.12._checkpoint_wrapped_module.mlp", "layers.*.mlp"),
        ("module", "module"),
        ("_orig_mod.module", "_orig_mod.module"),
        ("a.b.c.d.e", "a.b.c.d"),
        ("modules.mlp", "modules.mlp"),
        ("head", "head"),
    ],
)
def test_the_group_of_a_modules_name(name: str, group: str) -> None:
    """Without wrappers, layers alike, four names deep; what is a wrapper only keeps its name."""
    assert claims.family(name) == group
