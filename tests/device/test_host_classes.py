"""What launching work costs the host of a rank, by class."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import distsim
from distsim.kernels.gpu import RECORDED_SHARE, host_of

HOST = host_of("2x Intel Xeon Platinum 8480C", 0.0)


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 2.0


def host_s(call: Callable[[], Any]) -> float:
    """Virtual seconds that the host spends in *call*."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def test_a_collective_costs_the_host_more_than_an_operator() -> None:
    """Issuing an all_reduce takes the host as long as its class says, and an operator no longer than its own."""

    def body() -> tuple[float, float]:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        x = torch.ones(8, device="cuda")
        dist.init_process_group("nccl")
        handles: list[Any] = []
        call_s = host_s(lambda: handles.append(dist.all_reduce(x, async_op=True)))
        handles[0].wait()
        other = torch.ones(8, device="cuda")
        return call_s, host_s(lambda: other + other)

    call_s, operator_s = distsim.simulate(body, on="dgx-h100:1", nproc_per_node=2).results[0]
    assert operator_s == pytest.approx(HOST.operator_s, rel=0.05)
    assert HOST.collective_s <= call_s < 1.5 * HOST.collective_s


def test_an_autograd_function_in_python_costs_more_than_its_operators() -> None:
    """A Function of Python costs its class beyond the operators that it calls, of which autograd records none."""

    def body() -> tuple[float, float]:
        x = torch.ones(8, device="cuda", requires_grad=True)
        gradient = torch.ones(8, device="cuda")
        x.grad = torch.zeros(8, device="cuda")
        own = host_s(lambda: _Twice.apply(x).backward(gradient))
        return own, host_s(lambda: (x * 2.0).backward(gradient))

    own_s, plain_s = distsim.simulate(body, on="dgx-h100:1", nproc_per_node=1).results[0]
    node_s = (RECORDED_SHARE - 1.0) * HOST.operator_s
    assert own_s - plain_s == pytest.approx(HOST.function_s - node_s, rel=0.05)


def test_a_kernel_of_triton_costs_the_host_more_than_an_operator() -> None:
    """A launch by Triton takes the host as long as its class says: of the program, and of a library."""

    def body() -> tuple[float, float]:
        import triton
        from flash_attn.ops.triton.layer_norm import layer_norm_fn

        @triton.jit
        def own(x: Any) -> None: ...

        x, weight = torch.ones(8, 64, device="cuda"), torch.ones(64, device="cuda")
        norm_s = host_s(lambda: layer_norm_fn(x, weight, None, is_rms_norm=True))
        return host_s(lambda: own[(1,)](x)), norm_s

    own_s, norm_s = distsim.simulate(body, on="dgx-h100:1", nproc_per_node=1).results[0]
    assert own_s == pytest.approx(HOST.triton_s, rel=0.05)
    assert HOST.triton_wrapper_s < norm_s < HOST.triton_wrapper_s + 2 * HOST.operator_s


def test_an_operator_costs_more_where_autograd_records_or_runs_it() -> None:
    """A product costs the host half as much again in training as without gradients, and so does its view."""

    def body() -> list[float]:
        x = torch.ones(8, 8, device="cuda", requires_grad=True)
        with torch.no_grad():
            alone = [host_s(lambda: x * 2.0), host_s(lambda: x.view(64))]
        recorded = [host_s(lambda: x * 2.0), host_s(lambda: x.view(64))]
        y, gradient = x * 2.0, torch.ones(8, 8, device="cuda")
        return [*alone, *recorded, host_s(lambda: torch.autograd.grad(y, x, gradient))]

    operator_s, view_s, *training = distsim.simulate(body, on="dgx-h100:1", nproc_per_node=1).results[0]
    assert [operator_s, view_s] == pytest.approx([HOST.operator_s, HOST.view_s], rel=0.05)
    assert training == pytest.approx([RECORDED_SHARE * each for each in (operator_s, view_s, operator_s)], rel=0.05)


def test_a_step_of_tiny_operators_is_called_host_bound() -> None:
    """A step whose kernels are shorter than their launches is host-bound, and its host's work is all of it."""

    def body() -> None:
        weight = torch.nn.Parameter(torch.ones(8, device="cuda"))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for _ in range(3):
            loss = weight
            for _ in range(50):
                loss = loss * 1.5
            loss.sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    training = distsim.simulate(body, on="dgx-h100:1", nproc_per_node=1).training
    assert training is not None
    assert training.host_bound
    assert training.host_work_s is not None
    assert training.host_work_s == pytest.approx(training.step_time_s, rel=0.2)
