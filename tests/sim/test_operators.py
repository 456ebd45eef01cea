"""Operators that a program defines on every rank run that rank's own functions."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import distsim
from distsim.errors import RankFailure
from distsim.sim.device import dispatch
from distsim.sim.device.gpu import Accelerators
from tests.sim.running import ranks


def own_body() -> tuple[float, float, float]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    @torch.library.custom_op("distsim_test::add_rank", mutates_args=(), schema="(Tensor x) -> Tensor")
    def add_rank(x: torch.Tensor) -> torch.Tensor:
        return x + rank

    add_rank.register_autograd(lambda ctx, grad: grad * (10 + rank))
    dist.barrier()
    x = torch.zeros(1, requires_grad=True)
    y = add_rank(x)
    y.sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    called = torch.ops.distsim_test.add_rank(torch.zeros(1)).item()
    dist.barrier()
    return y.item(), called, x.grad.item()


def own_library() -> None:
    dist.init_process_group("gloo")
    torch.library.Library("distsim_test_library", "DEF")


def test_each_rank_runs_its_own_body() -> None:
    """All ranks have defined it before any calls it: forward and backward are still each rank's own."""
    assert ranks(own_body).results == [(0.0, 0.0, 10.0), (1.0, 1.0, 11.0)]


def test_a_second_library_is_refused_by_name() -> None:
    """torch would say something about TORCH_LIBRARY blocks that no rank of a real job hears."""
    with pytest.raises(RankFailure, match=r'Library\("distsim_test_library", "DEF"\) .* is not simulated'):
        ranks(own_library)


def own_definition() -> None:
    dist.init_process_group("gloo")
    torch.library.define("distsim_test_define::twice", "(Tensor x) -> Tensor")


def test_a_second_definition_is_refused_by_name() -> None:
    """torch would say that one process registered the operator twice."""
    with pytest.raises(RankFailure, match=r'library.define\("distsim_test_define::twice"\) .* is not simulated'):
        ranks(own_definition)


def on_host_then_gpu() -> tuple[int, int, str]:
    looked.clear()
    x = torch.ones(4)
    torch.nn.functional.linear(x, torch.ones(4, 4)).relu_().sum().item()
    before = len(looked)
    y = x.to("cuda:0")  # names a device
    looked.clear()
    y.add_(1)
    return before, len(looked), str(y.device)


looked: list[object] = []


def test_operators_look_for_gpus_once_one_was_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that stays on the host pays nothing for its node's GPUs; from the first tensor on one, all are seen."""
    find = dispatch.gpu_of

    def counted(args: tuple[object, ...], kwargs: dict[str, object]) -> torch.device | None:
        if not kwargs:  # what makes a tensor may name a device in one
            looked.append(args)
        return find(args, kwargs)

    monkeypatch.setattr(Accelerators, "some_used", False)
    monkeypatch.setattr(dispatch, "gpu_of", counted)
    assert distsim.simulate(on_host_then_gpu, on="dgx-h100:1", nproc_per_node=1).results == [(0, 1, "cuda:0")]
