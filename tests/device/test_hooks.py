"""What of torch's own is exchanged stands as it was afterwards, and a build that is unlike ours is refused by name."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

import distsim
from distsim.errors import NotSimulated, RankFailure
from distsim.sim.device import hooks
from distsim.torch_compat import releases
from distsim.torch_compat.names import SIM

REMEDY = f"use {releases.tested_range(SIM)} for Linux on x86-64, with or without CUDA; a CPU program needs none of it"


@pytest.fixture
def another_build(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """What was found out about this build is forgotten, before and after."""
    for known in (hooks._parts, hooks.tested):
        known.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    for known in (hooks._parts, hooks.tested):
        known.cache_clear()


def use() -> None:
    torch.ones(1, device="cuda")


def test_a_build_without_the_parts_is_refused(another_build: pytest.MonkeyPatch) -> None:
    """A name that a library of torch lacks: said before any rank starts, with what to install."""

    def missing(path: str) -> NoReturn:
        raise OSError(f"{path}: undefined symbol: registerDeviceGuard\nand more")

    another_build.setattr(hooks, "ctypes", SimpleNamespace(**(vars(ctypes) | {"CDLL": missing})))
    with pytest.raises(NotSimulated) as refused:
        distsim.simulate(use, on="dgx-h100:1", nproc_per_node=1)
    assert str(refused.value).startswith(f"CUDA with this build of torch ({torch.__version__}: ")
    assert str(refused.value).endswith(f"undefined symbol: registerDeviceGuard) is not simulated: {REMEDY}")


def test_a_build_of_another_layout_is_refused(another_build: pytest.MonkeyPatch) -> None:
    """Hooks whose functions stand elsewhere: the first use of a GPU says that torch finds no accelerator."""
    another_build.setattr(hooks, "_ANSWERED", ())
    with pytest.raises(RankFailure) as refused:
        distsim.simulate(use, on="dgx-h100:1", nproc_per_node=1)
    said = f"CUDA with this build of torch ({torch.__version__}: its accelerator is None, not cuda) is not simulated"
    assert f"{said}: {REMEDY}" in str(refused.value)


def test_a_build_without_backward_is_refused(another_build: pytest.MonkeyPatch) -> None:
    """An autograd that does not run on its tensors is seen before the program's own backward."""

    def fails(*args: Any) -> NoReturn:
        raise RuntimeError("please specify an accelerator")

    another_build.setattr(hooks._Looks, "__torch_dispatch__", fails)
    with pytest.raises(RankFailure, match="please specify an accelerator"):
        distsim.simulate(use, on="dgx-h100:1", nproc_per_node=1)


def test_cpu_programs_need_no_parts(another_build: pytest.MonkeyPatch) -> None:
    """On a cluster without GPUs nothing of it is looked for."""
    another_build.setattr(hooks, "_Parts", None)
    assert distsim.simulate(lambda: torch.ones(2).sum().item(), on="ethernet-cpu:1", nproc_per_node=1).results == [2.0]


@pytest.mark.skipif(torch.version.cuda is None, reason="a build without CUDA has no kernels of its own (.ci/soak)")
def test_its_own_kernels_stand_again() -> None:
    """Ours stand before those of a build with CUDA while a simulation runs, and are gone with it."""
    names = ("aten::mul.Tensor", "aten::record_stream", "aten::scaled_dot_product_attention")

    def registered() -> list[str]:
        return [torch._C._dispatch_dump(name) for name in names]

    before = registered()

    def body() -> list[str]:
        use()
        return registered()

    (during,) = distsim.simulate(body, on="dgx-h100:1", nproc_per_node=1).results
    assert all(one != other for one, other in zip(before, during, strict=True))
    assert registered() == before
