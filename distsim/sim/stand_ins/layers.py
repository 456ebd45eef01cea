"""Layers with one kernel each: causal_conv1d, mamba_ssm, liger_kernel.

Source of names, arguments and their order: causal_conv1d 1.7.0, mamba_ssm 2.3.2, liger_kernel 0.8.5.
"""

from __future__ import annotations

import importlib
import math
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distsim.sim.stand_ins.attention import layer_norm_fn, rms_norm_fn
from distsim.sim.stand_ins.fused import FusedKernel, cross_entropy, fused, launch, needs_values, note, refuse_values

__all__ = ["MODULES"]

# -- causal_conv1d and mamba_ssm


def causal_conv1d_fn(x: Tensor, weight: Tensor, bias: Tensor | None = None, seq_idx: Any = None,
                     initial_states: Any = None, return_final_states: bool = False, final_states_out: Any = None,
                     activation: str | None = None) -> Any:  # fmt: skip
    """causal_conv1d.causal_conv1d_fn: x (batch, dim, length), weight (dim, width)."""

    def by_torch(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = F.conv1d(x, weight.unsqueeze(1), bias, padding=weight.shape[1] - 1, groups=x.shape[1])[..., : x.shape[2]]
        return F.silu(out) if activation else out

    if seq_idx is not None or initial_states is not None:
        refuse_values("causal_conv1d_fn with seq_idx or initial_states", "they are left out")
    out = fused(FusedKernel("causal_conv1d::causal_conv1d_fn", by_torch), x, weight, bias)
    return (out, x[..., 1 - weight.shape[1] :]) if return_final_states else out


_SCAN_FLOPS = 32
"""Slots of an fp32 multiply-add, times two, for each element and state of selective_scan: an exponential takes 8 (16 a
cycle and multiprocessor where multiply-adds are 128), the recurrence and its output as many."""


def selective_scan_fn(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
                      z: Tensor | None = None, delta_bias: Tensor | None = None, delta_softplus: bool = False,
                      return_last_state: bool = False) -> Any:  # fmt: skip
    """mamba_ssm.ops.selective_scan_interface.selective_scan_fn: u, delta, z (batch, dim, length); A (dim, state);
    B and C (batch, state, length), or with a group before the state."""

    def by_torch(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Any = None, z: Any = None,
                 delta_bias: Any = None) -> Tensor:  # fmt: skip
        step = delta.float() if delta_bias is None else delta.float() + delta_bias.float()[:, None]
        step = F.softplus(step) if delta_softplus else step
        into, out_of = (t.flatten(0, -3).view(u.shape[0], -1, *t.shape[-2:]).float() for t in (B, C))
        repeats = u.shape[1] // into.shape[1]
        into, out_of = (t.repeat_interleave(repeats, dim=1) for t in (into, out_of))
        state, outs = u.new_zeros(*u.shape[:2], A.shape[1], dtype=torch.float32), []
        for i in range(u.shape[2]):
            now = step[..., i, None]
            state = state * (now * A).exp() + now * into[..., i] * u[..., i, None].float()
            outs.append((state * out_of[..., i]).sum(-1))
        out = torch.stack(outs, dim=-1)
        out = out if D is None else out + u.float() * D[:, None]
        return (out if z is None else out * F.silu(z.float())).to(u.dtype)

    flops = _SCAN_FLOPS * u.numel() * A.shape[-1]
    kernel = FusedKernel(
        "mamba_ssm::selective_scan", by_torch, flops=flops, backward_flops=5 * flops // 2, dtype="fp32"
    )
    out = fused(kernel, u, delta, A, B, C, D, z, delta_bias)
    if return_last_state:
        refuse_values("selective_scan_fn with return_last_state", "the last state is not computed")
        return out, u.new_empty(*u.shape[:2], A.shape[-1], dtype=torch.float32)
    return out


def _chunk_flops(batch: int, length: int, heads: int, dim: int, state: int, groups: int, chunk: int) -> int:
    """Return the flops of the state-space dual form (arXiv:2405.21060, section 6).

    They are the scores within a chunk, and by head their products with the values, into and out of the states.
    """
    tokens = batch * length
    return tokens * (2 * groups * chunk * state + 2 * heads * dim * (chunk // 2 + 2 * state))


def mamba_chunk_scan_combined(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int,
                              D: Tensor | None = None, z: Tensor | None = None, dt_bias: Tensor | None = None,
                              initial_states: Any = None, seq_idx: Any = None, cu_seqlens: Any = None,
                              dt_softplus: bool = False, dt_limit: Any = (0.0, float("inf")),
                              return_final_states: bool = False, **options: Any) -> Any:  # fmt: skip
    """mamba_ssm.ops.triton.ssd_combined.mamba_chunk_scan_combined: x (batch, length, heads, dim); dt (batch, length,
    heads); A (heads); B, C (batch, length, groups, state)."""

    def by_torch(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Any = None, z: Any = None,
                 dt_bias: Any = None) -> Tensor:  # fmt: skip
        step = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
        step = (F.softplus(step) if dt_softplus else step).clamp(*dt_limit)
        into, out_of = (t.float().repeat_interleave(x.shape[2] // t.shape[2], dim=2) for t in (B, C))
        state, outs = x.new_zeros(x.shape[0], *x.shape[2:], B.shape[-1], dtype=torch.float32), []
        for i in range(x.shape[1]):
            now = step[:, i, :, None]
            state = (
                state * (now * A[:, None]).exp()[..., None] + (now * x[:, i].float())[..., None] * into[:, i, :, None]
            )
            outs.append((state * out_of[:, i, :, None]).sum(-1))
        out = torch.stack(outs, dim=1)
        out = out if D is None else out + x.float() * (D if D.dim() == 2 else D[:, None])
        return (out if z is None else out * F.silu(z.float())).to(x.dtype)

    refused = [name for name, value in (("initial_states", initial_states), ("seq_idx", seq_idx)) if value is not None]
    if refused:
        refuse_values(f"mamba_chunk_scan_combined with {', '.join(refused)}", "they are left out")
    batch, length, heads, dim = x.shape
    flops = _chunk_flops(batch, length, heads, dim, B.shape[3], B.shape[2], chunk_size)
    kernel = FusedKernel("mamba_ssm::chunk_scan", by_torch, kernels=5, backward_kernels=9, passes=2, flops=2 * flops,
                    backward_flops=5 * flops)  # fmt: skip
    out = fused(kernel, x, dt, A, B, C, D, z, dt_bias)
    if return_final_states:
        return out, x.new_empty(x.shape[0], *x.shape[2:], B.shape[3], dtype=torch.float32)
    return out


def rmsnorm_fn(x: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor | None = None, eps: float = 1e-6,
               group_size: int | None = None, norm_before_gate: bool = True) -> Tensor:  # fmt: skip
    """An RMS norm over groups, with the gate *z* before it or after it: of mamba_ssm.ops.triton.layernorm_gated."""
    size = group_size or x.shape[-1]

    def by_torch(x: Tensor, weight: Tensor, z: Tensor | None = None) -> Tensor:
        value = x.float() if z is None or norm_before_gate else x.float() * F.silu(z.float())
        value = F.rms_norm(value.unflatten(-1, (-1, size)), (size,), None, eps).flatten(-2) * weight.float()
        return (value if z is None or not norm_before_gate else value * F.silu(z.float())).to(x.dtype)

    out: Tensor = fused(FusedKernel("mamba_ssm::rmsnorm_gated", by_torch, "norm"), x, weight, z)
    return out


class RMSNormGated(nn.Module):
    """Stand-in for mamba_ssm.ops.triton.layernorm_gated.RMSNorm."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, group_size: int | None = None,
                 norm_before_gate: bool = True, device: Any = None, dtype: Any = None) -> None:  # fmt: skip
        super().__init__()
        self.eps, self.group_size, self.norm_before_gate = eps, group_size, norm_before_gate
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        return rmsnorm_fn(x, self.weight, None, z, self.eps, self.group_size, self.norm_before_gate)


class Mamba(nn.Module):
    """Stand-in for mamba_ssm.Mamba. Backward keeps the convolution and the steps, which the library recomputes."""

    def __init__(self, d_model: int, d_state: int = 16, d_conv: int = 4, expand: int = 2, dt_rank: Any = "auto",
                 dt_min: float = 0.001, dt_max: float = 0.1, dt_init: str = "random", dt_scale: float = 1.0,
                 dt_init_floor: float = 1e-4, conv_bias: bool = True, bias: bool = False, use_fast_path: bool = True,
                 layer_idx: int | None = None, device: Any = None, dtype: Any = None) -> None:  # fmt: skip
        super().__init__()
        how = {"device": device, "dtype": dtype}
        self.d_inner, self.d_state, self.layer_idx = expand * d_model, d_state, layer_idx
        self.dt_rank = math.ceil(d_model / 16) if dt_rank == "auto" else dt_rank
        self.in_proj = nn.Linear(d_model, 2 * self.d_inner, bias=bias, **how)
        self.conv1d = nn.Conv1d(self.d_inner, self.d_inner, d_conv, groups=self.d_inner, padding=d_conv - 1,
                                bias=conv_bias, **how)  # fmt: skip
        self.x_proj = nn.Linear(self.d_inner, self.dt_rank + 2 * d_state, bias=False, **how)
        self.dt_proj = nn.Linear(self.dt_rank, self.d_inner, bias=True, **how)
        rates = torch.arange(1, d_state + 1, dtype=torch.float32, device=device).repeat(self.d_inner, 1)
        self.A_log, self.D = nn.Parameter(rates.log()), nn.Parameter(torch.ones(self.d_inner, device=device))
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=bias, **how)

    def forward(self, hidden_states: Tensor, inference_params: Any = None) -> Tensor:
        x, z = self.in_proj(hidden_states).transpose(1, 2).chunk(2, dim=1)
        x = causal_conv1d_fn(x, self.conv1d.weight.squeeze(1), self.conv1d.bias, activation="silu")
        mixed = self.x_proj(x.transpose(1, 2))
        dt, into, out_of = mixed.split([self.dt_rank, self.d_state, self.d_state], dim=-1)
        step = F.linear(dt, self.dt_proj.weight).transpose(1, 2)
        y = selective_scan_fn(
            x, step, -self.A_log.float().exp(), into.transpose(1, 2), out_of.transpose(1, 2), self.D.float(), z,
            self.dt_proj.bias.float(), delta_softplus=True,
        )  # fmt: skip
        out: Tensor = self.out_proj(y.transpose(1, 2))
        return out


class Mamba2(nn.Module):
    """mamba_ssm.Mamba2, on one rank."""

    def __init__(self, d_model: int, d_state: int = 128, d_conv: int = 4, conv_init: Any = None, expand: int = 2,
                 headdim: int = 64, d_ssm: int | None = None, ngroups: int = 1, A_init_range: Any = (1, 16),
                 D_has_hdim: bool = False, rmsnorm: bool = True, norm_before_gate: bool = False, *,
                 dt_limit: Any = (0.0, float("inf")), bias: bool = False, conv_bias: bool = True, chunk_size: int = 256,
                 layer_idx: int | None = None, device: Any = None, dtype: Any = None,
                 **options: Any) -> None:  # fmt: skip
        super().__init__()
        how = {"device": device, "dtype": dtype}
        self.d_inner, self.d_state, self.headdim, self.ngroups = expand * d_model, d_state, headdim, ngroups
        self.nheads, self.chunk_size, self.dt_limit = self.d_inner // headdim, chunk_size, dt_limit
        self.layer_idx, wide = layer_idx, self.d_inner + 2 * ngroups * d_state
        self.in_proj = nn.Linear(d_model, self.d_inner + wide + self.nheads, bias=bias, **how)
        self.conv1d = nn.Conv1d(wide, wide, d_conv, groups=wide, padding=d_conv - 1, bias=conv_bias, **how)
        self.dt_bias = nn.Parameter(torch.rand(self.nheads, **how))
        self.A_log = nn.Parameter(torch.empty(self.nheads, device=device).uniform_(*A_init_range).log())
        self.D = nn.Parameter(torch.ones(self.d_inner if D_has_hdim else self.nheads, device=device))
        self.norm = (
            RMSNormGated(self.d_inner, 1e-5, self.d_inner // ngroups, norm_before_gate, **how) if rmsnorm else None
        )
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=bias, **how)

    def forward(self, u: Tensor, seqlen: int | None = None, seq_idx: Any = None, cu_seqlens: Any = None,
                inference_params: Any = None) -> Tensor:  # fmt: skip
        flat = u if seqlen is None else u.view(-1, seqlen, u.shape[-1])
        wide = self.d_inner + 2 * self.ngroups * self.d_state
        z, mixed, dt = self.in_proj(flat).split([self.d_inner, wide, self.nheads], dim=-1)
        weight = self.conv1d.weight.squeeze(1)
        mixed = causal_conv1d_fn(mixed.transpose(1, 2), weight, self.conv1d.bias, activation="silu").transpose(1, 2)
        x, into, out_of = mixed.split([self.d_inner, *[self.ngroups * self.d_state] * 2], dim=-1)
        y = mamba_chunk_scan_combined(
            x.unflatten(-1, (-1, self.headdim)), dt, -self.A_log.float().exp(),
            into.unflatten(-1, (self.ngroups, -1)), out_of.unflatten(-1, (self.ngroups, -1)), self.chunk_size,
            D=self.D.view(self.nheads, -1).squeeze(-1), dt_bias=self.dt_bias, dt_softplus=True, dt_limit=self.dt_limit,
            z=None if self.norm is not None else z.unflatten(-1, (-1, self.headdim)),
        ).flatten(-2)  # fmt: skip
        out: Tensor = self.out_proj(y if self.norm is None else self.norm(y, z))
        return out.view(u.shape)


class PlainNorm(nn.Module):
    """Stand-in for mamba_ssm.ops.triton.layer_norm.RMSNorm."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-5, dropout_p: float = 0.0, device: Any = None, dtype: Any = None
    ):
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)

    def forward(self, x: Tensor, residual: Any = None, prenorm: bool = False, residual_in_fp32: bool = False) -> Any:
        return rms_norm_fn(x, self.weight, None, residual=residual, prenorm=prenorm, eps=self.eps,
                           residual_in_fp32=residual_in_fp32)  # fmt: skip


# -- liger_kernel


def liger_rms_norm(X: Tensor, W: Tensor | None, eps: float, offset: float = 0.0, casting_mode: str = "llama",
                   in_place: bool = True) -> Tensor:  # fmt: skip
    """Stand-in for liger_kernel.transformers.functional.liger_rms_norm."""

    def by_torch(x: Tensor, weight: Tensor | None = None) -> Tensor:
        normed = F.rms_norm(x.float(), (x.shape[-1],), None, eps).to(x.dtype)
        return normed if weight is None else (weight + offset) * normed

    out: Tensor = fused(FusedKernel("liger_kernel::rms_norm", by_torch, "norm"), X, W)
    return out


class LigerRMSNorm(nn.Module):
    """Stand-in for liger_kernel.transformers.LigerRMSNorm."""

    def __init__(self, hidden_size: int, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "llama",
                 init_fn: str = "ones", in_place: bool = True, row_mode: Any = None,
                 elementwise_affine: bool = True) -> None:  # fmt: skip
        super().__init__()
        self.variance_epsilon, self.offset, self.casting_mode = eps, offset, casting_mode
        weight = torch.ones(hidden_size) if init_fn == "ones" else torch.zeros(hidden_size)
        self.weight = nn.Parameter(weight) if elementwise_affine else None

    def forward(self, hidden_states: Tensor) -> Tensor:
        return liger_rms_norm(hidden_states, self.weight, self.variance_epsilon, self.offset)


class LigerRMSNormForGemma(LigerRMSNorm):
    """Stand-in for liger_kernel.transformers.rms_norm.LigerRMSNormForGemma."""

    def __init__(self, hidden_size: int, eps: float = 1e-6, offset: float = 1.0, casting_mode: str = "gemma",
                 init_fn: str = "zeros", in_place: bool = True, row_mode: Any = None) -> None:  # fmt: skip
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn)


class LigerLayerNorm(nn.Module):
    """Stand-in for liger_kernel.transformers.LigerLayerNorm."""

    def __init__(self, hidden_size: int, eps: float = 1e-6, bias: bool = False, init_fn: str = "ones", **options: Any):
        super().__init__()
        self.variance_epsilon = eps
        self.weight = nn.Parameter(torch.ones(hidden_size) if init_fn == "ones" else torch.zeros(hidden_size))
        self.bias = nn.Parameter(torch.randn(hidden_size) if bias else torch.zeros(hidden_size))

    def forward(self, hidden_states: Tensor) -> Tensor:
        eps = self.variance_epsilon
        kernel = FusedKernel(
            "liger_kernel::layer_norm", lambda x, w, b: F.layer_norm(x, w.shape, w, b, eps), "norm", saves=(0, 1)
        )
        out: Tensor = fused(kernel, hidden_states, self.weight, self.bias)
        return out


def liger_swiglu(a: Tensor, b: Tensor) -> Tensor:
    """liger_kernel.transformers.functional.liger_swiglu: silu(a) * b; backward writes into a and b."""
    out: Tensor = fused(FusedKernel("liger_kernel::swiglu", lambda a, b: F.silu(a) * b, in_place=True), a, b)
    return out


def liger_geglu(a: Tensor, b: Tensor) -> Tensor:
    """liger_kernel.transformers.functional.liger_geglu: gelu(a) * b; backward writes into a and b."""
    kernel = FusedKernel("liger_kernel::geglu", lambda a, b: F.gelu(a, approximate="tanh") * b, in_place=True)
    out: Tensor = fused(kernel, a, b)
    return out


class LigerSwiGLUMLP(nn.Module):
    """Stand-in for liger_kernel.transformers.LigerSwiGLUMLP."""

    act = staticmethod(liger_swiglu)

    def __init__(self, config: Any, intermediate_size: int | None = None) -> None:
        super().__init__()
        self.config, self.hidden_size = config, config.hidden_size
        self.intermediate_size = intermediate_size or config.intermediate_size
        bias = getattr(config, "mlp_bias", False)
        self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.act(self.gate_proj(x), self.up_proj(x)))
        return out


class LigerGEGLUMLP(LigerSwiGLUMLP):
    """Stand-in for liger_kernel.transformers.LigerGEGLUMLP."""

    act = staticmethod(liger_geglu)


class LigerPhi3SwiGLUMLP(nn.Module):
    """Stand-in for liger_kernel.transformers.LigerPhi3SwiGLUMLP."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(liger_swiglu(*self.gate_up_proj(x).chunk(2, dim=-1)))
        return out


def liger_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Any = None,
                         unsqueeze_dim: int = 1, rotary_dim: int | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """liger_kernel.transformers.liger_rotary_pos_emb: q, k (batch, heads, length, dim); cos, sin (batch, length,
    dim)."""

    def by_torch(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        halves = [torch.cat((-t[..., t.shape[-1] // 2 :], t[..., : t.shape[-1] // 2]), dim=-1) for t in (q, k)]
        return q * cos + halves[0] * sin, k * cos + halves[1] * sin

    looks = tuple((tuple(t.shape), t.dtype) for t in (q, k))
    out: tuple[Tensor, Tensor] = fused(
        FusedKernel("liger_kernel::rope", by_torch, outputs=looks, saves=(2, 3)), q, k, cos, sin
    )
    return out


def liger_cross_entropy(input: Tensor, target: Tensor, weight: Any = None, size_average: Any = None,
                        ignore_index: int = -100, reduce: Any = None, reduction: str = "mean",
                        label_smoothing: float = 0.0, lse_square_scale: float = 0.0, softcap: float | None = None,
                        return_z_loss: bool = False, **options: Any) -> Any:  # fmt: skip
    """liger_kernel.transformers.functional.liger_cross_entropy: input (tokens, classes), which becomes its gradient."""
    if weight is not None or lse_square_scale or softcap:
        refuse_values("liger_cross_entropy with weight, lse_square_scale or softcap", "they are left out")
    loss = cross_entropy("liger_kernel::cross_entropy", input, target, reduction, ignore_index=ignore_index,
                         label_smoothing=label_smoothing)  # fmt: skip
    return (loss, torch.zeros_like(loss)) if return_z_loss else loss


class LigerCrossEntropyLoss(nn.Module):
    """Stand-in for liger_kernel.transformers.LigerCrossEntropyLoss."""

    def __init__(self, weight: Any = None, ignore_index: int = -100, lse_square_scale: float = 0.0,
                 label_smoothing: float = 0.0, reduction: str = "mean", softcap: float | None = None,
                 return_z_loss: bool = False, **options: Any) -> None:  # fmt: skip
        super().__init__()
        self.options = {
            "weight": weight, "ignore_index": ignore_index, "lse_square_scale": lse_square_scale, "softcap": softcap,
            "label_smoothing": label_smoothing, "reduction": reduction, "return_z_loss": return_z_loss,
        }  # fmt: skip

    def forward(self, _input: Tensor, target: Tensor) -> Any:
        return liger_cross_entropy(_input, target, **self.options)


class _FusedLinearCrossEntropy(torch.autograd.Function):
    """The output layer and its loss, chunk by chunk of the tokens; gradients are computed in forward, and logits of one
    chunk live at a time. A chunk has as many tokens as make its logits as large as the layer's input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, reduced: bool) -> Tensor:
        tokens, classes = x.shape[0], weight.shape[0]
        chunk = 2 ** math.ceil(math.log2(max(1, -(-tokens // -(-classes // x.shape[1])))))
        losses = torch.zeros(tokens, dtype=torch.float32, device=x.device)
        of_x = torch.zeros_like(x)
        of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        of_bias = torch.zeros_like(bias) if bias is not None else None
        for rows, part, gradient, labels in zip(*(t.split(chunk) for t in (x, losses, of_x, target)), strict=True):
            logits = F.linear(rows, weight, bias)
            launch("liger_kernel::cross_entropy", [logits, logits, labels], [logits, part], kind="softmax")
            torch.mm(logits, weight, out=gradient)
            if of_weight is not None:
                of_weight.addmm_(logits.t(), rows)
            if of_bias is not None:
                of_bias.add_(logits.sum(0))
        ctx.save_for_backward(of_x, of_weight, of_bias)
        return losses.sum() if reduced else losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        gradients = ctx.saved_tensors
        if not torch.equal(grad, torch.ones((), device=grad.device)):
            for each in gradients:
                if each is not None:
                    launch("liger_kernel::element_mul", [each], [each])
        return gradients[0], gradients[1], None, gradients[2], None


def liger_fused_linear_cross_entropy(input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None,
                                     ce_weight: Any = None, ignore_index: int = -100, lse_square_scale: float = 0.0,
                                     label_smoothing: float = 0.0, reduction: str = "mean",
                                     softcap: float | None = None, **options: Any) -> Tensor:  # fmt: skip
    """liger_kernel.transformers.functional.liger_fused_linear_cross_entropy: input (tokens, hidden), weight (classes,
    hidden)."""
    if needs_values() or not input.is_cuda:
        logits = F.linear(input, weight, bias)
        return F.cross_entropy(logits.float(), target, reduction=reduction, ignore_index=ignore_index,
                               label_smoothing=label_smoothing)  # fmt: skip
    out: Tensor = _FusedLinearCrossEntropy.apply(input, weight, target, bias, reduction != "none")
    return out


class LigerFusedLinearCrossEntropyLoss(nn.Module):
    """Stand-in for liger_kernel.transformers.LigerFusedLinearCrossEntropyLoss."""

    def __init__(self, ce_weight: Any = None, ignore_index: int = -100, lse_square_scale: float = 0.0,
                 label_smoothing: float = 0.0, reduction: str = "mean", softcap: float | None = None,
                 **options: Any) -> None:  # fmt: skip
        super().__init__()
        self.options: dict[str, Any] = {
            "ce_weight": ce_weight, "ignore_index": ignore_index, "lse_square_scale": lse_square_scale,
            "label_smoothing": label_smoothing, "reduction": reduction, "softcap": softcap,
        }  # fmt: skip

    def forward(self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None) -> Tensor:
        return liger_fused_linear_cross_entropy(_input, lin_weight, target, bias, **self.options)


def _forward_without_logits(self: Any, input_ids: Any = None, attention_mask: Any = None, *args: Any,
                            labels: Any = None, num_items_in_batch: Any = None, **options: Any) -> Any:  # fmt: skip
    """The forward of a transformers model for causal language modelling, without logits where there are labels."""
    keep = options.pop("logits_to_keep", 0)
    outputs = self.model(input_ids, attention_mask, *args, **options)
    hidden, logits, loss = outputs[0], None, None
    if labels is not None and self.training:
        shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1)
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = liger_fused_linear_cross_entropy(
            hidden.reshape(-1, hidden.shape[-1]), self.lm_head.weight, shifted, reduction=reduction
        )
        loss = loss if num_items_in_batch is None else loss / num_items_in_batch
    else:
        logits = self.lm_head(hidden[:, -keep:] if keep else hidden)
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size)
    kind = importlib.import_module("transformers.modeling_outputs").CausalLMOutputWithPast
    passed_on = {name: getattr(outputs, name, None) for name in ("past_key_values", "hidden_states", "attentions")}
    return kind(loss=loss, logits=logits, **passed_on)


def _apply(model_type: str, mlp: type[nn.Module], norm: type[nn.Module], rope: bool = True, cross_entropy: bool = False,
           fused_linear_cross_entropy: bool = True, rms_norm: bool = True, swiglu: bool = True, geglu: bool = True,
           model: Any = None) -> None:  # fmt: skip
    """Replace the classes of a model of transformers, and those of *model*, which exists already."""
    if cross_entropy and fused_linear_cross_entropy:
        raise AssertionError("cross_entropy and fused_linear_cross_entropy cannot both be True.")
    module = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    kinds = {name: kind for name, kind in vars(module).items() if isinstance(kind, type)}
    norms = [name for name in kinds if name.endswith("RMSNorm")] if rms_norm else []
    mlps = [name for name in kinds if name.endswith("MLP")] if swiglu and geglu else []
    if model is not None:
        for each in model.modules():
            if type(each).__name__ in norms:
                each.forward = MethodType(_norm_forward, each)
            elif type(each).__name__ in mlps:
                each.forward = MethodType(mlp.forward, each)
                each.act = mlp.act
    for name in norms:
        setattr(module, name, norm)
    for name in mlps:
        setattr(module, name, mlp)
    if rope and hasattr(module, "apply_rotary_pos_emb"):
        vars(module)["apply_rotary_pos_emb"] = liger_rotary_pos_emb
    if cross_entropy:
        importlib.import_module("transformers.loss.loss_utils").nn.functional.cross_entropy = liger_cross_entropy
    if fused_linear_cross_entropy:
        for name, kind in kinds.items():
            if name.endswith("ForCausalLM"):
                kind.forward = _forward_without_logits  # type: ignore[attr-defined]


def _norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    eps = getattr(self, "variance_epsilon", getattr(self, "eps", 1e-6))
    return liger_rms_norm(hidden_states, self.weight, eps)


_MODELS = {
    **dict.fromkeys(
        ("llama", "mistral", "qwen2", "qwen3", "granite", "smollm3", "olmo2"), (LigerSwiGLUMLP, LigerRMSNorm)
    ),
    **dict.fromkeys(("gemma", "gemma2"), (LigerGEGLUMLP, LigerRMSNormForGemma)),
    "phi3": (LigerPhi3SwiGLUMLP, LigerRMSNorm),
}  # fmt: skip


def _for_model(model_type: str) -> Any:
    mlp, norm = _MODELS[model_type]

    def apply(*args: Any, **options: Any) -> None:
        _apply(model_type, mlp, norm, *args, **options)

    apply.__name__ = f"apply_liger_kernel_to_{model_type}"
    return apply


def _apply_liger_kernel(model_type: str, **options: Any) -> None:
    """Stand-in for liger_kernel.transformers._apply_liger_kernel."""
    if model_type in _MODELS:
        _for_model(model_type)(**options)
    else:
        note(f"liger_kernel: no replacement for models of type {model_type!r}; they run as they are")


def _apply_liger_kernel_to_instance(model: Any, **options: Any) -> None:
    """Stand-in for liger_kernel.transformers._apply_liger_kernel_to_instance."""
    _apply_liger_kernel(model.config.model_type, model=model, **options)


class AutoLigerKernelForCausalLM:
    """liger_kernel.transformers.AutoLigerKernelForCausalLM: transformers' class after the kernels are applied."""

    @classmethod
    def from_config(cls, config: Any, **options: Any) -> Any:
        _apply_liger_kernel(config.model_type)
        return importlib.import_module("transformers").AutoModelForCausalLM.from_config(config, **options)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str, *args: Any, **options: Any) -> Any:
        transformers = importlib.import_module("transformers")
        _apply_liger_kernel(transformers.AutoConfig.from_pretrained(pretrained_model_name_or_path).model_type)
        return transformers.AutoModelForCausalLM.from_pretrained(pretrained_model_name_or_path, *args, **options)


_LIGER = (liger_rms_norm, liger_swiglu, liger_geglu, liger_cross_entropy, liger_fused_linear_cross_entropy)
_FUNCTIONS: dict[str, Any] = {function.__name__: function for function in _LIGER}
_FUNCTIONS["liger_rope"] = liger_rotary_pos_emb
_APPLY = {f"apply_liger_kernel_to_{name}": _for_model(name) for name in _MODELS}
_APPLY |= {function.__name__: function for function in (_apply_liger_kernel, _apply_liger_kernel_to_instance)}
_NORMS = {"LigerRMSNorm": LigerRMSNorm, "LigerRMSNormForGemma": LigerRMSNormForGemma, "LigerLayerNorm": LigerLayerNorm}
_MLPS = {kind.__name__: kind for kind in (LigerSwiGLUMLP, LigerGEGLUMLP, LigerPhi3SwiGLUMLP)}
_LIGER_LOSSES = {kind.__name__: kind for kind in (LigerCrossEntropyLoss, LigerFusedLinearCrossEntropyLoss)}
_CONV, _SCAN = {"causal_conv1d_fn": causal_conv1d_fn}, {"selective_scan_fn": selective_scan_fn}
_PLAIN_NORM = {"RMSNorm": PlainNorm, "layer_norm_fn": layer_norm_fn, "rms_norm_fn": rms_norm_fn}
MODULES: dict[str, dict[str, Any]] = {
    "causal_conv1d": _CONV,
    "causal_conv1d.causal_conv1d_interface": _CONV,
    "mamba_ssm": {"__version__": "2.3.2", "Mamba": Mamba, "Mamba2": Mamba2, **_SCAN},
    "mamba_ssm.modules.mamba_simple": {"Mamba": Mamba},
    "mamba_ssm.modules.mamba2": {"Mamba2": Mamba2},
    "mamba_ssm.ops.selective_scan_interface": _SCAN,
    "mamba_ssm.ops.triton.ssd_combined": {"mamba_chunk_scan_combined": mamba_chunk_scan_combined},
    "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": RMSNormGated, "rmsnorm_fn": rmsnorm_fn},
    "mamba_ssm.ops.triton.layer_norm": _PLAIN_NORM,
    "mamba_ssm.ops.triton.layernorm": _PLAIN_NORM,
    "liger_kernel": {"__version__": "0.8.5"},
    "liger_kernel.transformers": {
        **_NORMS, **_MLPS, **_LIGER_LOSSES, **_APPLY, "liger_rotary_pos_emb": liger_rotary_pos_emb,
        "AutoLigerKernelForCausalLM": AutoLigerKernelForCausalLM,
    },
    "liger_kernel.transformers.functional": _FUNCTIONS,
    "liger_kernel.transformers.monkey_patch": _APPLY,
    "liger_kernel.transformers.rms_norm": _NORMS,
    "liger_kernel.transformers.layer_norm": _NORMS,
    "liger_kernel.transformers.swiglu": _MLPS,
    "liger_kernel.transformers.geglu": _MLPS,
    "liger_kernel.transformers.rope": {"liger_rotary_pos_emb": liger_rotary_pos_emb},
    "liger_kernel.transformers.cross_entropy": _LIGER_LOSSES,
    "liger_kernel.transformers.fused_linear_cross_entropy": _LIGER_LOSSES,
}  # fmt: skip
