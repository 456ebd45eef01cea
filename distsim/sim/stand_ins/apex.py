"""apex: its fused norms and optimizers, as torch's own fused ones.

Source of names and arguments: NVIDIA/apex, apex/normalization/fused_layer_norm.py, apex/optimizers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["MODULES"]


class FusedLayerNorm(nn.LayerNorm):
    """apex.normalization.FusedLayerNorm."""

    def __init__(
        self, normalized_shape: Any, eps: float = 1e-5, elementwise_affine: bool = True, **options: Any
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine)


class FusedRMSNorm(nn.RMSNorm):
    """apex.normalization.FusedRMSNorm."""

    def __init__(
        self, normalized_shape: Any, eps: float = 1e-5, elementwise_affine: bool = True, **options: Any
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine)


def fused_layer_norm_affine(
    input: Tensor, weight: Tensor, bias: Tensor, normalized_shape: Any, eps: float = 1e-6, **options: Any
) -> Tensor:
    """apex.normalization.fused_layer_norm_affine."""
    return F.layer_norm(input, normalized_shape, weight, bias, eps)


def fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Any, eps: float = 1e-6, **options: Any
) -> Tensor:
    """apex.normalization.fused_rms_norm_affine."""
    return F.rms_norm(input, normalized_shape, weight, eps)


class FusedAdam(torch.optim.AdamW):
    """apex.optimizers.FusedAdam; with `adam_w_mode=False` its decay costs the same."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)


class FusedSGD(torch.optim.SGD):
    """apex.optimizers.FusedSGD."""

    def __init__(self, params: Any, lr: float, momentum: float = 0.0, dampening: float = 0.0, **options: Any) -> None:
        kept = {name: options[name] for name in ("weight_decay", "nesterov") if name in options}
        super().__init__(params, lr=lr, momentum=momentum, dampening=dampening, fused=True, **kept)


_NORMS = {"FusedLayerNorm": FusedLayerNorm, "FusedRMSNorm": FusedRMSNorm, "MixedFusedLayerNorm": FusedLayerNorm,
          "MixedFusedRMSNorm": FusedRMSNorm, "fused_layer_norm_affine": fused_layer_norm_affine,
          "fused_rms_norm_affine": fused_rms_norm_affine}  # fmt: skip
MODULES: dict[str, dict[str, Any]] = {
    "apex.normalization": _NORMS,
    "apex.normalization.fused_layer_norm": _NORMS,
    "apex.optimizers": {"FusedAdam": FusedAdam, "FusedSGD": FusedSGD},
    "apex.optimizers.fused_adam": {"FusedAdam": FusedAdam},
}
