"""scenarios/training/fused.py: what its operators compute, and what they cost beside torch's own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from distsim.kernels import Gpu

FOLDER = Path(__file__).parents[2] / "scenarios" / "training"
aten = torch.ops.aten


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, as a program imports it."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delitem(sys.modules, "fused", raising=False)
    import fused  # type: ignore[import-not-found]

    yield fused
    sys.modules.pop("fused", None)


def test_causal_softmax_is_a_mask_and_softmax(fused: Any) -> None:
    """Values and gradient, to float64's last digits."""
    torch.manual_seed(0)
    scores = torch.randn(3, 8, 8, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(3, 8, 8, dtype=torch.float64)
    future = torch.full((8, 8), float("-inf"), dtype=torch.float64).triu(1)
    found = fused.causal_softmax(scores)
    expected = (scores + future).softmax(-1)
    torch.testing.assert_close(found, expected)
    (gradient,) = torch.autograd.grad((found * weights).sum(), scores)
    torch.testing.assert_close(gradient, torch.autograd.grad((expected * weights).sum(), scores)[0])


def test_cross_entropy_is_torchs(fused: Any) -> None:
    """The mean over rows and its gradient; the gradient has the logits' type."""
    torch.manual_seed(0)
    target = torch.randint(11, (6,))
    logits = torch.randn(6, 11, requires_grad=True)
    found, expected = fused.cross_entropy(logits, target), F.cross_entropy(logits, target)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, logits)[0], torch.autograd.grad(expected, logits)[0])
    short = logits.detach().bfloat16().requires_grad_()
    fused.cross_entropy(short, target).backward()
    assert short.grad is not None
    assert short.grad.dtype == torch.bfloat16


def test_a_fused_causal_softmax_moves_half_of_what_it_does_not_need(fused: Any) -> None:
    """Scores are read up to the diagonal and written whole: three quarters of a whole pass, forward; two thirds of the
    three tensors of a whole pass, backward."""
    gpu = Gpu.named("a100-80gb")
    scores = torch.empty(64, 2048, 2048, dtype=torch.float16, device="meta")
    own = torch.ops.megatron
    forward = gpu.cost(own.scaled_upper_triang_masked_softmax.default, (scores,), {}, scores)
    backward = gpu.cost(own.scaled_upper_triang_masked_softmax_backward.default, (scores, scores), {}, scores)
    assert (forward.nbytes, backward.nbytes) == (scores.nbytes * 3 // 2, scores.nbytes * 2)
    whole = gpu.cost(aten._softmax.default, (scores, -1, False), {}, scores)
    assert 0.4 < forward.seconds / whole.seconds < 0.8


def test_cross_entropy_without_a_copy_in_float32_moves_less(fused: Any) -> None:
    """Forward reads 16-bit logits twice, backward reads and writes them once."""
    gpu = Gpu.named("h100")
    logits = torch.empty(4096, 50_368, dtype=torch.bfloat16, device="meta")
    row, target = torch.empty(4096, device="meta"), torch.empty(4096, dtype=torch.int64, device="meta")
    own = torch.ops.xentropy
    forward = gpu.cost(own.forward.default, (logits, target), {}, (row, row))
    backward = gpu.cost(own.backward.default, (row, logits, row, target), {}, logits)
    assert forward.nbytes == pytest.approx(2 * logits.nbytes, rel=0.01)
    assert backward.nbytes == pytest.approx(2 * logits.nbytes, rel=0.01)
