"""What only a GPU's kernels compute, on the host: recurrent cells and SyncBatchNorm, by their kernels' formulas.

Sources: aten/src/ATen/native/cuda/RNN.cu and Normalization.cuh (torch 2.13). Sums are made in float32 for half
precision, as there (`acc_type`).
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "batch_norm_backward_elemt",
    "batch_norm_backward_reduce",
    "batch_norm_elemt",
    "batch_norm_gather",
    "batch_norm_stats",
    "gru_cell",
    "gru_cell_backward",
    "lstm_cell",
    "lstm_cell_backward",
]

Parts = list[Tensor | None]


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _with_bias(gates: Tensor, bias: Tensor | None) -> Tensor:
    return _wide(gates) if bias is None else _wide(gates) + _wide(bias)


def lstm_cell(
    input_gates: Tensor, hidden_gates: Tensor, cx: Tensor, input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> Parts:  # fmt: skip
    """(state, cell, the gates after their functions)."""
    i, f, g, o = (_with_bias(input_gates, input_bias) + _with_bias(hidden_gates, hidden_bias)).chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * _wide(cx) + i * g
    return [o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)]


def lstm_cell_backward(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> Parts:
    """(gradients of the gates, of the cell, of a bias)."""
    i, f, g, o = _wide(workspace).chunk(4, 1)
    shape = _wide(torch.zeros_like(cx))
    gh, gc = (shape if each is None else _wide(each) for each in (grad_hy, grad_cy))
    squashed = _wide(cy).tanh()
    gcx = gh * o * (1 - squashed * squashed) + gc
    gates = torch.cat(
        [gcx * g * (1 - i) * i, gcx * _wide(cx) * (1 - f) * f, gcx * i * (1 - g * g), gh * squashed * (1 - o) * o], 1
    )
    return [gates, gcx * f, gates.sum(0) if has_bias else None]


def gru_cell(
    input_gates: Tensor, hidden_gates: Tensor, hx: Tensor, input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> Parts:  # fmt: skip
    """(state, workspace: the gates after their functions, the state before, the hidden part of the new one)."""
    ir, iz, new = _with_bias(input_gates, input_bias).chunk(3, 1)
    hr, hz, hn = _with_bias(hidden_gates, hidden_bias).chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    new, before = (new + r * hn).tanh(), _wide(hx)
    return [new + z * (before - new), torch.cat([r, z, new, before, hn], 1)]


def gru_cell_backward(grad_hy: Tensor, workspace: Tensor, has_bias: bool) -> Parts:
    """(gradients of the input's gates, of the hidden ones, of the state, of both biases)."""
    r, z, new, before, hn = _wide(workspace).chunk(5, 1)
    go = _wide(grad_hy)
    gz = go * (before - new) * (1 - z) * z
    gn = go * (1 - z) * (1 - new * new)
    gr = gn * hn * (1 - r) * r
    inputs, hidden = torch.cat([gr, gz, gn], 1), torch.cat([gr, gz, gn * r], 1)
    biases = (inputs.sum(0), hidden.sum(0)) if has_bias else (None, None)
    return [inputs, hidden, go * z, *biases]


def _by_channel(x: Tensor) -> Tensor:
    """(channels, all else)."""
    return _wide(x).transpose(0, 1).reshape(x.shape[1], -1)


def _along(values: Tensor, x: Tensor) -> Tensor:
    return values.reshape(1, -1, *[1] * (x.dim() - 2))


def batch_norm_stats(x: Tensor, eps: float) -> Parts:
    rows = _by_channel(x)
    return [rows.mean(1), (rows.var(1, unbiased=False) + eps).rsqrt()]


def batch_norm_gather(
    x: Tensor, means: Tensor, inverses: Tensor, running_mean: Tensor | None, running_var: Tensor | None,
    momentum: float, eps: float, counts: Tensor,
) -> Parts:  # fmt: skip
    """(mean, inverse deviation) of all ranks; the running ones are updated in place."""
    shares = counts.to(means.dtype).reshape(-1, 1)
    total = shares.sum()
    mean = (means * shares).sum(0) / total
    squares = ((inverses**-2 - eps + (means - mean) ** 2) * shares).sum(0)
    for running, now in ((running_mean, mean), (running_var, squares / (total - 1))):
        if running is not None:
            running.mul_(1 - momentum).add_(now.to(running.dtype), alpha=momentum)
    return [mean, (squares / total + eps).rsqrt()]


def batch_norm_elemt(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, inverse: Tensor, eps: float
) -> Parts:
    out = (_wide(x) - _along(mean, x)) * _along(inverse, x)
    if weight is not None:
        out = out * _along(_wide(weight), x)
    return [out if bias is None else out + _along(_wide(bias), x)]


def batch_norm_backward_reduce(
    gradient: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor | None, input_g: bool, weight_g: bool,
    bias_g: bool,
) -> Parts:  # fmt: skip
    """(sum of the gradient, of it times the distance from the mean, gradients of weight and bias)."""
    rows = _by_channel(gradient)
    sums, products = rows.sum(1), (rows * (_by_channel(x) - mean.reshape(-1, 1))).sum(1)
    return [sums, products, products * inverse, sums]


def batch_norm_backward_elemt(
    gradient: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor | None, sums: Tensor, products: Tensor,
    counts: Tensor,
) -> Parts:  # fmt: skip
    total = counts.sum().to(sums.dtype)
    scale = inverse if weight is None else inverse * _wide(weight)
    slope = inverse**2 * products / total
    away = _wide(gradient) - _along(sums / total, x) - (_wide(x) - _along(mean, x)) * _along(slope, x)
    return [away * _along(scale, x)]
