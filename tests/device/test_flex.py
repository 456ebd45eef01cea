"""flex_attention on a simulated GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import distsim

BATCH, HEADS, LENGTH, DIM = 4, 16, 1024, 64
Shape = tuple[int, ...]


def test_flex_attention_is_one_kernel_each_way() -> None:
    """Results look as torch's, and cost what fused attention of the blocks that the mask leaves does."""

    def body() -> Any:
        from distsim.sim.isolation.process import require_task

        compiled = torch.compile(flex_attention)
        shape = (BATCH, LENGTH, HEADS, DIM)
        q, k, v = (
            torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for _ in range(3)
        )
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, LENGTH, LENGTH, device="cuda")
        found: list[tuple[Shape, Shape, int, int]] = []
        steps = require_task().process.accelerators.steps
        for block_mask in (None, mask):
            before = sum(steps.flops.values())
            out = compiled(q, k, v, block_mask=block_mask)
            forward = sum(steps.flops.values()) - before
            q.grad = None
            out.float().sum().backward()
            backward = sum(steps.flops.values()) - before - forward
            assert q.grad.shape == q.shape
            assert q.grad.stride() == q.stride()
            found.append((tuple(out.shape), out.stride(), forward, backward))
        return found

    whole, causal = distsim.simulate(body, on="dgx-h100:1", nproc_per_node=1).results[0]
    looks = (BATCH, HEADS, LENGTH, DIM), (LENGTH * HEADS * DIM, DIM, HEADS * DIM, 1)
    flops = 4 * BATCH * HEADS * LENGTH * LENGTH * DIM
    assert whole == (*looks, flops, flops * 5 // 2)
    assert causal[:2] == looks
    blocks = LENGTH // 128
    share = (blocks + 1) / (2 * blocks)
    assert causal[2:] == (pytest.approx(flops * share), pytest.approx(2.5 * flops * share))
