"""transformer_engine.pytorch: its modules, attention, transformer layer and optimizers.

Source of names, arguments and their order: NVIDIA/TransformerEngine, transformer_engine/pytorch at 2.20.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from distsim.errors import NotSimulated
from distsim.sim.stand_ins import te_products as products
from distsim.sim.stand_ins.apex import MULTI_TENSOR, FusedAdam, FusedSGD
from distsim.sim.stand_ins.attention import FA2, FA3, attend
from distsim.sim.stand_ins.experts import grouped_product
from distsim.sim.stand_ins.fused import FusedKernel, cross_entropy, fused, needs_values, note
from distsim.sim.stand_ins.te_products import Product, multiply, region

__all__ = ["MODULES"]

_NAME = "transformer_engine"

# -- Modules


class TransformerEngineBaseModule(nn.Module):
    """Base of all modules: the tensor-parallel group, and the settings of products."""

    def _set_up(self, options: dict[str, Any]) -> None:
        """Read the arguments that all modules have."""
        self.tp_group, self.tp_size = options.get("tp_group"), options.get("tp_size", 1)
        if self.tp_group is not None:
            self.tp_size = dist.get_world_size(self.tp_group)
        self.sequence_parallel = bool(options.get("sequence_parallel")) and self.tp_size > 1
        self.fuse_wgrad_accumulation = bool(options.get("fuse_wgrad_accumulation"))
        self.return_bias = bool(options.get("return_bias"))
        self.device = options.get("device", "cuda")
        self.params_dtype = options.get("params_dtype") or torch.get_default_dtype()
        self.init_method = options.get("init_method") or functools.partial(nn.init.normal_, mean=0.0, std=0.023)
        self.tracker, self.fp8_initialized = options.get("get_rng_state_tracker"), False
        self.fp8_meta: dict[str, Any] = {}
        self._cached: dict[str, tuple[Tensor, Tensor]] = {}

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        self.tp_group = tp_group
        self.tp_size = 1 if tp_group is None else dist.get_world_size(tp_group)

    def get_extra_state(self) -> Tensor:
        """Return the fp8 scales: empty, because a simulation has none."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Ignore the fp8 scales, because a simulation has none."""

    def _parameter(
        self, *shape: int, init: Callable[[Tensor], Any] | None = None, split: int | None = None
    ) -> nn.Parameter:
        """Return a new parameter; this rank has a part of it along dimension *split*."""
        parameter = nn.Parameter(torch.empty(shape, device=self.device, dtype=self.params_dtype))
        if parameter.device.type != "meta":
            forked = (
                self.tracker().fork() if self.tracker is not None and split is not None else contextlib.nullcontext()
            )
            with torch.no_grad(), forked:
                (init or self.init_method)(parameter)
        parameter.tensor_model_parallel = split is not None
        parameter.partition_dim, parameter.partition_stride = (-1 if split is None else split), 1
        if split is None:
            parameter.sequence_parallel = self.sequence_parallel
        return parameter

    def _project(
        self, x: Tensor, name: str, bias: Tensor | None, mode: str | None, first: bool | None, cast_before: bool = False
    ) -> Tensor:
        """Return the product of *x* and the weight *name*."""
        state, weight = region(), getattr(self, name)
        recipe = state.recipe if state.enabled and not needs_values() else None
        if state.enabled and recipe is None:
            note("transformer_engine: with --data real, fp8 products are computed in the parameters' data type")
        if torch.is_autocast_enabled("cuda"):
            x = x.to(torch.get_autocast_dtype("cuda"))
        if x.dtype != weight.dtype:
            weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
        product = Product(
            self.tp_group,
            self.tp_size,
            mode,
            self.sequence_parallel,
            recipe,
            into_main_grad=self.fuse_wgrad_accumulation,
        )
        if recipe is not None:
            _check_fp8_shape(x, weight)
            before = recipe.delayed() or recipe.mxfp8()
            product.cast_before, product.ends_backward = cast_before and before, state.modules == 0
            product.amax_group = state.group
            state.modules += 1
            product.modules = state.modules
            if first is False:
                product.cached = self._cached.get(name)
            product.caches = first is True
        out = multiply(x, weight, bias, product)
        if product.cached is not None and first:
            self._cached[name], product.cached = product.cached, None
        return out


def _check_fp8_shape(x: Tensor, weight: Tensor) -> None:
    rows = x.numel() // x.shape[-1]
    for shape in ((rows, x.shape[-1]), tuple(weight.shape)):
        if shape[0] % 8 or shape[1] % 16:
            raise AssertionError(
                f"FP8 execution requires the product of all dimensions except the last to be divisible by 8 and the "
                f"last dimension to be divisible by 16, but got tensor with dims={list(shape)}"
            )


class Linear(TransformerEngineBaseModule):
    """Stand-in for transformer_engine.pytorch.Linear."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True, parallel_mode: str | None = None,
                 **options: Any) -> None:  # fmt: skip
        super().__init__()
        self._set_up(options)
        self.in_features, self.out_features, self.parallel_mode = in_features, out_features, parallel_mode
        self.use_bias = bias
        self._make_weight(bias)

    def _make_weight(self, bias: bool) -> None:
        columns = self.out_features // (self.tp_size if self.parallel_mode == "column" else 1)
        rows = self.in_features // (self.tp_size if self.parallel_mode == "row" else 1)
        split = {"column": 0, "row": 1}.get(self.parallel_mode or "")
        self.weight = self._parameter(columns, rows, split=split)
        bias_split = 0 if self.parallel_mode == "column" else None
        self.bias = self._parameter(columns, init=nn.init.zeros_, split=bias_split) if bias else None

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None, fp8_output: bool = False,
                fp8_grad: bool = False) -> Any:  # fmt: skip
        bias = None if self.return_bias else self.bias
        out = self._project(inp, "weight", bias, self.parallel_mode, is_first_microbatch)
        return (out, self.bias) if self.return_bias else out


def _norm_kernel(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centered: bool) -> Tensor:
    """Return LayerNorm, or RMSNorm if *bias* is None: one kernel forward and two backward."""
    shape = (x.shape[-1],)

    def by_torch(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        scale = weight + 1 if centered else weight
        return F.rms_norm(x, shape, scale, eps) if bias is None else F.layer_norm(x, shape, scale, bias, eps)

    out: Tensor = fused(
        FusedKernel(f"{_NAME}::norm", by_torch, "norm", backward_kernels=2, saves=(0, 1)), x, weight, bias
    )
    return out


class _Norm(TransformerEngineBaseModule):
    has_bias = True

    def __init__(self, normalized_shape: Any = None, eps: float = 1e-5, sequence_parallel: bool | None = None,
                 params_dtype: Any = None, zero_centered_gamma: bool = False, hidden_size: int | None = None,
                 device: Any = "cuda", dtype: Any = None, **options: Any) -> None:  # fmt: skip
        super().__init__()
        self._set_up({"params_dtype": params_dtype or dtype, "device": device})
        shape = hidden_size if normalized_shape is None else normalized_shape
        size = shape if isinstance(shape, int) else tuple(shape or ())[-1]
        self.sequence_parallel, self.eps, self.zero_centered_gamma = bool(sequence_parallel), eps, zero_centered_gamma
        self.weight = self._parameter(size, init=nn.init.zeros_ if zero_centered_gamma else nn.init.ones_)
        self.bias = self._parameter(size, init=nn.init.zeros_) if self.has_bias else None

    def forward(self, inp: Tensor) -> Tensor:
        return _norm_kernel(inp, self.weight, self.bias, self.eps, self.zero_centered_gamma)


class LayerNorm(_Norm):
    """Stand-in for transformer_engine.pytorch.LayerNorm."""


class TransformerEngineRMSNorm(_Norm):
    """Stand-in for transformer_engine.pytorch.RMSNorm."""

    has_bias = False


class LayerNormLinear(Linear):
    """Stand-in for transformer_engine.pytorch.LayerNormLinear."""

    def __init__(self, in_features: int, out_features: int, eps: float = 1e-5, *, normalization: str = "LayerNorm",
                 zero_centered_gamma: bool = False, return_layernorm_output: bool = False,
                 **options: Any) -> None:  # fmt: skip
        super().__init__(in_features, out_features, **options)
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.return_layernorm_output = return_layernorm_output
        self.layer_norm_weight = self._parameter(
            in_features, init=nn.init.zeros_ if zero_centered_gamma else nn.init.ones_
        )
        has_bias = normalization == "LayerNorm"
        self.layer_norm_bias = self._parameter(in_features, init=nn.init.zeros_) if has_bias else None

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None, fp8_output: bool = False,
                fp8_grad: bool = False) -> Any:  # fmt: skip
        normed = _norm_kernel(inp, self.layer_norm_weight, self.layer_norm_bias, self.eps, self.zero_centered_gamma)
        bias = None if self.return_bias else self.bias
        out = self._project(normed, "weight", bias, self.parallel_mode, is_first_microbatch, cast_before=True)
        results = (
            out,
            *((self.bias,) if self.return_bias else ()),
            *((normed,) if self.return_layernorm_output else ()),
        )
        return results if len(results) > 1 else out


_GATED = {
    "geglu": "gelu",
    "swiglu": "silu",
    "reglu": "relu",
    "glu": "sigmoid",
    "qgeglu": "quick_gelu",
    "srelu": "srelu",
}
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functools.partial(F.gelu, approximate="tanh"), "silu": F.silu, "relu": F.relu, "sigmoid": torch.sigmoid,
    "srelu": lambda x: F.relu(x).square(), "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}  # fmt: skip


def activate(x: Tensor, name: str) -> Tensor:
    """Return an activation of *x*, gated by its second half if *name* is a gated one, in one kernel."""
    gated = name.endswith("glu")

    def by_torch(x: Tensor) -> Tensor:
        if not gated:
            return _ACTIVATIONS[name](x)
        one, other = x.chunk(2, dim=-1)
        return _ACTIVATIONS[_GATED[name]](one) * other

    if name not in _ACTIVATIONS and name not in _GATED:
        raise NotSimulated(
            f"the activation {name!r} of transformer_engine", f"use {', '.join([*_ACTIVATIONS, *_GATED])}"
        )
    shape = (*x.shape[:-1], x.shape[-1] // (2 if gated else 1))
    out: Tensor = fused(FusedKernel(f"{_NAME}::{name}", by_torch, outputs=((shape, x.dtype),)), x)
    return out


class LayerNormMLP(TransformerEngineBaseModule):
    """Stand-in for transformer_engine.pytorch.LayerNormMLP."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int, eps: float = 1e-5, *, bias: bool = True,
                 normalization: str = "LayerNorm", activation: str = "gelu", set_parallel_mode: bool = False,
                 zero_centered_gamma: bool = False, output_layer_init_method: Any = None,
                 return_layernorm_output: bool = False, **options: Any) -> None:  # fmt: skip
        super().__init__()
        self._set_up(options)
        self.eps, self.zero_centered_gamma, self.activation = eps, zero_centered_gamma, activation
        self.modes = ("column", "row") if set_parallel_mode else (None, None)
        self.return_layernorm_output = return_layernorm_output
        size = self.tp_size if set_parallel_mode else 1
        split = (0, 1) if set_parallel_mode else (None, None)
        scale = nn.init.zeros_ if zero_centered_gamma else nn.init.ones_
        has_bias = normalization == "LayerNorm"
        self.layer_norm_weight = self._parameter(hidden_size, init=scale)
        self.layer_norm_bias = self._parameter(hidden_size, init=nn.init.zeros_) if has_bias else None
        wide = ffn_hidden_size // size
        first = 2 * wide if activation.endswith("glu") else wide
        self.fc1_weight = self._parameter(first, hidden_size, split=split[0])
        self.fc1_bias = self._parameter(first, init=nn.init.zeros_, split=split[0]) if bias else None
        self.fc2_weight = self._parameter(hidden_size, wide, init=output_layer_init_method, split=split[1])
        self.fc2_bias = self._parameter(hidden_size, init=nn.init.zeros_) if bias else None

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        first = is_first_microbatch
        normed = _norm_kernel(inp, self.layer_norm_weight, self.layer_norm_bias, self.eps, self.zero_centered_gamma)
        wide = self._project(normed, "fc1_weight", self.fc1_bias, self.modes[0], first, cast_before=True)
        active = activate(wide, self.activation)
        bias = None if self.return_bias else self.fc2_bias
        out = self._project(active, "fc2_weight", bias, self.modes[1], first, cast_before=True)
        results = (out, *((self.fc2_bias,) if self.return_bias else ()),
                   *((normed,) if self.return_layernorm_output else ()))  # fmt: skip
        return results if len(results) > 1 else out


class GroupedLinear(TransformerEngineBaseModule):
    """transformer_engine.pytorch.GroupedLinear: one product for each expert, all in one launch."""

    def __init__(self, num_gemms: int, in_features: int, out_features: int, *, bias: bool = True,
                 parallel_mode: str | None = None, **options: Any) -> None:  # fmt: skip
        super().__init__()
        self._set_up(options)
        self.num_gemms, self.use_bias = num_gemms, bias
        columns = out_features // (self.tp_size if parallel_mode == "column" else 1)
        rows = in_features // (self.tp_size if parallel_mode == "row" else 1)
        split = {"column": 0, "row": 1}.get(parallel_mode or "")
        for i in range(num_gemms):
            setattr(self, f"weight{i}", self._parameter(columns, rows, split=split))
            if bias:
                setattr(self, f"bias{i}", self._parameter(columns, init=nn.init.zeros_))

    def forward(self, inp: Tensor, m_splits: Any, is_first_microbatch: bool | None = None, **options: Any) -> Any:
        weights = [getattr(self, f"weight{i}") for i in range(self.num_gemms)]
        recipe = region().recipe if region().enabled and not needs_values() else None
        out = grouped_product(f"{_NAME}::grouped_gemm", inp, weights, True, m_splits, fp8=recipe is not None)
        biases = [getattr(self, f"bias{i}") for i in range(self.num_gemms)] if self.use_bias else []
        if self.return_bias:
            return out, biases or None
        return out + biases[0] if biases else out


# -- Attention and the transformer layer


class DotProductAttention(TransformerEngineBaseModule):
    """Stand-in for transformer_engine.pytorch.DotProductAttention."""

    def __init__(self, num_attention_heads: int, kv_channels: Any, num_gqa_groups: int | None = None,
                 attention_dropout: float = 0.0, qkv_format: str = "sbhd", attn_mask_type: str = "causal",
                 window_size: Any = None, *, softmax_scale: float | None = None, cp_group: Any = None,
                 **options: Any) -> None:  # fmt: skip
        super().__init__()
        self._set_up(options)
        self.attention_dropout, self.qkv_format, self.attn_mask_type = attention_dropout, qkv_format, attn_mask_type
        self.window_size, self.softmax_scale = window_size, softmax_scale
        self.set_context_parallel_group(cp_group)

    def set_context_parallel_group(self, cp_group: Any, *args: Any, **options: Any) -> None:
        groups = cp_group if isinstance(cp_group, list) else [cp_group]
        if any(group is not None and dist.get_world_size(group) > 1 for group in groups):
            raise NotSimulated(
                "context parallelism of transformer_engine.pytorch.DotProductAttention",
                "use a context-parallel size of 1, or torch.distributed.tensor.experimental.context_parallel",
            )

    def forward(self, query_layer: Tensor, key_layer: Tensor, value_layer: Tensor, attention_mask: Any = None,
                qkv_format: str | None = None, cu_seqlens_q: Tensor | None = None, cu_seqlens_kv: Tensor | None = None,
                cu_seqlens_q_padded: Any = None, cu_seqlens_kv_padded: Any = None, max_seqlen_q: int | None = None,
                max_seqlen_kv: int | None = None, attn_mask_type: str | None = None, window_size: Any = None,
                **options: Any) -> Tensor:  # fmt: skip
        layout, mask = qkv_format or self.qkv_format, attn_mask_type or self.attn_mask_type
        if layout == "thd":
            from distsim.sim.stand_ins.attention import flash_attn_varlen_func

            return flash_attn_varlen_func(
                query_layer, key_layer, value_layer, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q or query_layer.shape[0],
                max_seqlen_kv or key_layer.shape[0], self._dropout(), self.softmax_scale, "causal" in mask,
            ).flatten(-2)  # fmt: skip
        four = [t.transpose(0, 1) if layout == "sbhd" else t for t in (query_layer, key_layer, value_layer)]
        window = tuple(window_size or self.window_size or (-1, -1))
        window = (-1, -1) if "causal" in mask and window == (-1, 0) else window
        kernel: Any = FA3 if torch.cuda.get_device_capability() >= (9, 0) and four[0].shape[-1] <= 128 else FA2
        kernel = kernel if four[0].element_size() == 2 else None  # as torch chooses
        out = attend(
            "transformer_engine.DotProductAttention", four[0], four[1], four[2], self.softmax_scale, "causal" in mask,
            self._dropout(), window, options.get("core_attention_bias"), kernel,
        )  # fmt: skip
        return (out.transpose(0, 1) if layout == "sbhd" else out).flatten(-2)

    def _dropout(self) -> float:
        return self.attention_dropout if self.training else 0.0


def apply_rotary_pos_emb(t: Tensor, freqs: Tensor, tensor_format: str = "sbhd", start_positions: Any = None,
                         interleaved: bool = False, fused: bool = False, **options: Any) -> Tensor:  # fmt: skip
    """transformer_engine.pytorch.attention.rope.apply_rotary_pos_emb: freqs (length, 1, 1, dim)."""

    def by_torch(t: Tensor, freqs: Tensor) -> Tensor:
        length = t.shape[1 if tensor_format == "bshd" else 0]
        angles = freqs[:length].transpose(0, 1) if tensor_format == "bshd" else freqs[:length]
        angles = angles.squeeze(1) if tensor_format == "thd" else angles
        turned, rest = t[..., : freqs.shape[-1]], t[..., freqs.shape[-1] :]
        if interleaved:
            half = torch.stack((-turned[..., 1::2], turned[..., ::2]), dim=-1).flatten(-2)
        else:
            one, other = turned.chunk(2, dim=-1)
            half = torch.cat((-other, one), dim=-1)
        out = turned * angles.cos().to(t.dtype) + half * angles.sin().to(t.dtype)
        return torch.cat((out, rest), dim=-1)

    return _fused(FusedKernel(f"{_NAME}::fused_rope", by_torch, saves=(1,)), t, freqs)


def _fused(kernel: FusedKernel, *inputs: Tensor) -> Tensor:
    out: Tensor = fused(kernel, *inputs)
    return out


class RotaryPositionEmbedding(nn.Module):
    """Stand-in for transformer_engine.pytorch.RotaryPositionEmbedding."""

    def __init__(self, dim: int, rotary_percent: float = 1.0, seq_len_interpolation_factor: int | None = None,
                 pretrained_max_position_embeddings: int | None = None, rotary_base: float = 10000.0,
                 interleaved: bool = False) -> None:  # fmt: skip
        super().__init__()
        self.dim, self.base, self.interleaved = int(dim * min(rotary_percent, 1.0)), rotary_base, interleaved

    def forward(self, max_seq_len: int, offset: int = 0) -> Tensor:
        steps = torch.arange(0, self.dim, 2, device="cuda", dtype=torch.float32) / self.dim
        angles = torch.outer(torch.arange(max_seq_len, device="cuda", dtype=torch.float32) + offset, self.base**-steps)
        if self.interleaved:
            return torch.stack((angles, angles), dim=-1).flatten(-2)[:, None, None, :]
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]


class MultiheadAttention(nn.Module):
    """Stand-in for transformer_engine.pytorch.MultiheadAttention."""

    def __init__(self, hidden_size: int, num_attention_heads: int, kv_channels: int | None = None,
                 attention_dropout: float = 0.1, layernorm_epsilon: float = 1e-5, *, num_gqa_groups: int | None = None,
                 attn_mask_type: str = "causal", window_size: Any = None, tp_group: Any = None, tp_size: int = 1,
                 input_layernorm: bool = False, attention_type: str = "self", set_parallel_mode: bool = False,
                 bias: bool = True, return_bias: bool = False, normalization: str = "LayerNorm",
                 qkv_format: str = "sbhd", output_layer_init_method: Any = None,
                 rotary_pos_interleaved: bool = False, **options: Any) -> None:  # fmt: skip
        super().__init__()
        if attention_type != "self":
            raise NotSimulated(
                "cross attention of transformer_engine.pytorch.MultiheadAttention", "use attention_type='self'"
            )
        size = dist.get_world_size(tp_group) if tp_group is not None else tp_size
        part = size if set_parallel_mode else 1
        self.head_dim = kv_channels or hidden_size // num_attention_heads
        groups = num_gqa_groups or num_attention_heads
        self.heads, self.groups = num_attention_heads // part, max(1, groups // part)
        self.layout, self.rotary_pos_interleaved = qkv_format, rotary_pos_interleaved
        column, row = ("column", "row") if set_parallel_mode else (None, None)
        shared = {"tp_group": tp_group, "tp_size": tp_size, "bias": bias, **options}
        wide = self.head_dim * (num_attention_heads + 2 * groups)
        if input_layernorm:
            self.layernorm_qkv = LayerNormLinear(
                hidden_size, wide, layernorm_epsilon, parallel_mode=column, normalization=normalization, **shared
            )
        else:
            self.qkv = Linear(hidden_size, wide, parallel_mode=column, **shared)
        self.core_attention = DotProductAttention(
            num_attention_heads, self.head_dim, groups, attention_dropout, qkv_format, attn_mask_type, window_size
        )
        shared |= {"return_bias": return_bias, "init_method": output_layer_init_method}
        self.proj = Linear(self.head_dim * num_attention_heads, hidden_size, parallel_mode=row, **shared)

    def forward(self, hidden_states: Tensor, attention_mask: Any = None, *, attn_mask_type: str | None = None,
                is_first_microbatch: bool | None = None, rotary_pos_emb: Any = None,
                checkpoint_core_attention: bool = False, **options: Any) -> Any:  # fmt: skip
        into = self.layernorm_qkv if hasattr(self, "layernorm_qkv") else self.qkv
        mixed = into(hidden_states, is_first_microbatch=is_first_microbatch)
        sizes = [count * self.head_dim for count in (self.heads, self.groups, self.groups)]
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in mixed.split(sizes, dim=-1))
        if rotary_pos_emb is not None:
            angles = rotary_pos_emb if isinstance(rotary_pos_emb, tuple) else (rotary_pos_emb, rotary_pos_emb)
            turn = functools.partial(
                apply_rotary_pos_emb, tensor_format=self.layout, interleaved=self.rotary_pos_interleaved
            )
            q, k = turn(q, angles[0]), turn(k, angles[1])
        attend_to: Any = functools.partial(
            self.core_attention.__call__, attention_mask=attention_mask, attn_mask_type=attn_mask_type
        )
        context = products.checkpoint(attend_to, q, k, v) if checkpoint_core_attention else attend_to(q, k, v)
        return self.proj(context, is_first_microbatch=is_first_microbatch)


def _add_dropped(x: Tensor, bias: Tensor | None, residual: Tensor, rate: float) -> Tensor:
    """Return the residual plus the output with bias and dropout, in one kernel (bias_dropout_add)."""

    def by_torch(x: Tensor, residual: Tensor, bias: Tensor | None = None) -> Tensor:
        return residual + F.dropout(x if bias is None else x + bias, rate, training=rate > 0)

    return _fused(FusedKernel(f"{_NAME}::bias_dropout_add", by_torch, saves=()), x, residual, bias)


class TransformerLayer(nn.Module):
    """transformer_engine.pytorch.TransformerLayer, of an encoder."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int, num_attention_heads: int,
                 num_gqa_groups: int | None = None, layernorm_epsilon: float = 1e-5, hidden_dropout: float = 0.1,
                 attention_dropout: float = 0.1, init_method: Any = None, output_layer_init_method: Any = None, *,
                 layer_number: int | None = None, kv_channels: int | None = None, self_attn_mask_type: str = "causal",
                 window_size: Any = None, layer_type: str = "encoder", activation: str = "gelu", bias: bool = True,
                 attn_input_format: str = "sbhd", parallel_attention_mlp: bool = False, output_layernorm: bool = False,
                 apply_residual_connection_post_layernorm: bool = False, drop_path_rate: float = 0.0,
                 rotary_pos_interleaved: bool = False, **options: Any) -> None:  # fmt: skip
        super().__init__()
        if (
            layer_type != "encoder"
            or parallel_attention_mlp
            or output_layernorm
            or apply_residual_connection_post_layernorm
        ):
            raise NotSimulated(
                "a transformer_engine.pytorch.TransformerLayer of this kind",
                "use layer_type='encoder' without parallel_attention_mlp, output_layernorm or "
                "apply_residual_connection_post_layernorm",
            )
        shared = {
            "init_method": init_method,
            "output_layer_init_method": output_layer_init_method,
            "bias": bias,
            **options,
        }
        self.hidden_dropout, self.self_attn_mask_type = hidden_dropout, self_attn_mask_type
        self.self_attention = MultiheadAttention(
            hidden_size, num_attention_heads, kv_channels, attention_dropout, layernorm_epsilon,
            num_gqa_groups=num_gqa_groups, attn_mask_type=self_attn_mask_type, window_size=window_size,
            input_layernorm=True, qkv_format=attn_input_format, return_bias=True,
            rotary_pos_interleaved=rotary_pos_interleaved, **shared,
        )  # fmt: skip
        self.layernorm_mlp = LayerNormMLP(
            hidden_size, ffn_hidden_size, layernorm_epsilon, activation=activation, return_bias=True, **shared
        )

    def forward(self, hidden_states: Tensor, attention_mask: Any = None, self_attn_mask_type: str | None = None, *,
                is_first_microbatch: bool | None = None, rotary_pos_emb: Any = None,
                checkpoint_core_attention: bool = False, **options: Any) -> Tensor:  # fmt: skip
        rate = self.hidden_dropout if self.training else 0.0
        out, bias = self.self_attention(
            hidden_states, attention_mask, attn_mask_type=self_attn_mask_type or self.self_attn_mask_type,
            is_first_microbatch=is_first_microbatch, rotary_pos_emb=rotary_pos_emb,
            checkpoint_core_attention=checkpoint_core_attention,
        )  # fmt: skip
        hidden = _add_dropped(out, bias, hidden_states, rate)
        out, bias = self.layernorm_mlp(hidden, is_first_microbatch=is_first_microbatch)
        return _add_dropped(out, bias, hidden, rate)


# -- What stands beside the modules


def make_graphed_callables(modules: Any, sample_args: Any, num_warmup_iters: int = 3, allow_unused_input: bool = False,
                           **options: Any) -> Any:  # fmt: skip
    """transformer_engine.pytorch.make_graphed_callables: torch's, in the region of fp8 that the arguments name."""
    enabled = bool(options.get("enabled", options.get("fp8_enabled")))
    recipe = options.get("recipe") or options.get("fp8_recipe")
    with products.autocast(enabled, recipe=recipe):
        return torch.cuda.make_graphed_callables(modules, sample_args, num_warmup_iters, allow_unused_input)


def parallel_cross_entropy(inp: Tensor, target: Tensor, label_smoothing: float = 0.0, reduce_loss: bool = False,
                           dist_process_group: Any = None, ignore_idx: int = -100, is_cg_capturable: bool = False,
                           **options: Any) -> Tensor:  # fmt: skip
    """transformer_engine.pytorch.cross_entropy.parallel_cross_entropy: inp (..., part of the classes)."""
    if dist_process_group is not None and dist.get_world_size(dist_process_group) > 1:
        if needs_values():
            raise NotSimulated("parallel_cross_entropy over a group with --data real", "simulate without --data real")
        rows = torch.empty(3 * target.numel(), dtype=torch.float32, device=inp.device)  # largest, sum, the label's
        products.gather_first(rows, dist_process_group)
    return cross_entropy(f"{_NAME}::cross_entropy", inp, target, "mean" if reduce_loss else "none",
                         ignore_index=ignore_idx, label_smoothing=label_smoothing)  # fmt: skip


_RECIPES = {kind.__name__: kind for kind in (products.Format, products.Recipe, products.DelayedScaling,
            products.Float8CurrentScaling, products.MXFP8BlockScaling, products.Float8BlockScaling)}  # fmt: skip
_QUANTIZATION = {
    "autocast": products.autocast, "fp8_autocast": products.fp8_autocast, "fp8_model_init": products.fp8_model_init,
    "quantized_model_init": products.fp8_model_init, "is_fp8_available": products.is_fp8_available,
    "is_mxfp8_available": products.is_mxfp8_available, "get_default_recipe": products.default_recipe,
    "get_default_fp8_recipe": products.default_recipe,
    "is_fp8_block_scaling_available": products.is_fp8_block_scaling_available,
    "FP8GlobalStateManager": products.FP8GlobalStateManager,
}  # fmt: skip
_MODULE = {kind.__name__: kind for kind in (Linear, LayerNorm, LayerNormLinear, LayerNormMLP, GroupedLinear)}
_MODULE["RMSNorm"] = TransformerEngineRMSNorm
_ROPE = {"RotaryPositionEmbedding": RotaryPositionEmbedding, "apply_rotary_pos_emb": apply_rotary_pos_emb}
_ATTENTION = {"DotProductAttention": DotProductAttention, "MultiheadAttention": MultiheadAttention, **_ROPE}
_DISTRIBUTED = {"checkpoint": products.checkpoint, "CudaRNGStatesTracker": products.CudaRNGStatesTracker,
                "gather_along_first_dim": products.gather_first}  # fmt: skip
_OPTIMIZERS = {"FusedAdam": FusedAdam, "FusedSGD": FusedSGD, **MULTI_TENSOR}
MODULES: dict[str, dict[str, Any]] = {
    "transformer_engine": {"__version__": "2.20.0"},
    "transformer_engine.common.recipe": _RECIPES,
    "transformer_engine.pytorch": {
        **_QUANTIZATION, **_MODULE, **_ATTENTION, "TransformerLayer": TransformerLayer,
        "checkpoint": products.checkpoint,
        "CudaRNGStatesTracker": products.CudaRNGStatesTracker, "make_graphed_callables": make_graphed_callables,
        "parallel_cross_entropy": parallel_cross_entropy,
    },
    "transformer_engine.pytorch.module": _MODULE,
    "transformer_engine.pytorch.module.base": {"TransformerEngineBaseModule": TransformerEngineBaseModule},
    "transformer_engine.pytorch.transformer": {"TransformerLayer": TransformerLayer},
    "transformer_engine.pytorch.fp8": {**_QUANTIZATION, **_RECIPES},
    "transformer_engine.pytorch.quantization": _QUANTIZATION,
    "transformer_engine.pytorch.attention": _ATTENTION,
    "transformer_engine.pytorch.attention.rope": _ROPE,
    "transformer_engine.pytorch.distributed": _DISTRIBUTED,
    "transformer_engine.pytorch.graph": {"make_graphed_callables": make_graphed_callables},
    "transformer_engine.pytorch.cross_entropy": {"parallel_cross_entropy": parallel_cross_entropy},
    "transformer_engine.pytorch.optimizers": _OPTIMIZERS,
}  # fmt: skip
