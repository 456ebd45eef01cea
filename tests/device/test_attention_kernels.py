"""The kernel of scaled_dot_product_attention: torch's choice, and how a program changes it."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import distsim

FIRST_EFFICIENT = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION]


def taken() -> str:
    query = torch.empty(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    return type(scaled_dot_product_attention(query, query, query).grad_fn).__name__


def taken_in_its_order() -> tuple[str, str]:
    with sdpa_kernel(FIRST_EFFICIENT, set_priority=True):
        inside = taken()
    return inside, taken()


def kernel_on(gpu: str) -> str:
    return distsim.simulate(taken, nproc_per_node=1, on=gpu).results[0]


def test_cudnn_comes_first_on_hopper_alone() -> None:
    """As in torch 2.13."""
    assert "Cudnn" in kernel_on("dgx-h100:1")
    assert "Flash" in kernel_on("dgx-a100:1")


def test_a_variable_puts_flash_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch before 2.7 had no other order on Hopper."""
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert "Flash" in kernel_on("dgx-h100:1")


def test_a_program_sets_an_order() -> None:
    """It holds inside of the context."""
    inside, after = distsim.simulate(taken_in_its_order, nproc_per_node=1, on="dgx-h100:1").results[0]
    assert "Efficient" in inside
    assert "Cudnn" in after
