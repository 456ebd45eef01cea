"""Two kernels that Megatron-LM and flash-attn bring along, as custom operators; what they compute is said in torch.

`megatron::scaled_upper_triang_masked_softmax`: a causal mask and softmax in one pass, of which only the lower triangle
is read. `xentropy::forward` and `backward`: cross entropy of 16-bit logits, without a copy of them in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.library import custom_op, register_autograd


@custom_op("megatron::scaled_upper_triang_masked_softmax", mutates_args=())
def causal_softmax(scores: torch.Tensor) -> torch.Tensor:
    """Weights of [..., seq, seq] scores: each row sees itself and those before it."""
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
    return scores.masked_fill(future, float("-inf")).softmax(-1)


@custom_op("megatron::scaled_upper_triang_masked_softmax_backward", mutates_args=())
def _causal_softmax_backward(dweights: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    product = dweights * weights
    return product - weights * product.sum(-1, keepdim=True)


@custom_op("xentropy::forward", mutates_args=())
def _cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = logits.float().logsumexp(-1)
    return total - logits.gather(1, target[:, None])[:, 0].float(), total


@custom_op("xentropy::backward", mutates_args=())
def _cross_entropy_backward(
    dloss: torch.Tensor, logits: torch.Tensor, total: torch.Tensor, target: torch.Tensor
) -> torch.Tensor:
    gradient = (logits.float() - total[:, None]).exp_()
    gradient.scatter_add_(1, target[:, None], torch.full_like(total, -1.0)[:, None])
    return gradient.mul_(dloss[:, None]).to(logits.dtype)


def cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean over rows, in float32: [n, vocab] and [n] give a scalar."""
    loss, _ = _cross_entropy(logits, target)
    return loss.mean()


@causal_softmax.register_fake
def _(scores: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(scores)


@_causal_softmax_backward.register_fake
def _(dweights: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(weights)


@_cross_entropy.register_fake
def _(logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows = logits.shape[0]
    return logits.new_empty(rows, dtype=torch.float32), logits.new_empty(rows, dtype=torch.float32)


@_cross_entropy_backward.register_fake
def _(dloss: torch.Tensor, logits: torch.Tensor, total: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(logits)


def _keep_weights(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(output)


def _keep_logits(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    logits, target = inputs
    ctx.save_for_backward(logits, output[1], target)


def _of_scores(ctx: Any, dweights: torch.Tensor) -> torch.Tensor:
    return _causal_softmax_backward(dweights, *ctx.saved_tensors)


def _of_logits(ctx: Any, dloss: torch.Tensor, dtotal: torch.Tensor) -> tuple[torch.Tensor, None]:
    return _cross_entropy_backward(dloss, *ctx.saved_tensors), None


register_autograd("megatron::scaled_upper_triang_masked_softmax", _of_scores, setup_context=_keep_weights)
register_autograd("xentropy::forward", _of_logits, setup_context=_keep_logits)
