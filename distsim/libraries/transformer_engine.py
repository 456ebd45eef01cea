"""transformer_engine.pytorch: the modules that Megatron-core and Accelerate use, attention and optimizers.

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
from torch.utils import checkpoint as torch_checkpoint

from distsim.errors import NotSimulated
from distsim.libraries.apex import MULTI_TENSOR, FusedAdam, FusedSGD
from distsim.libraries.experts import PERMUTATION, Fp8Padding, Fp8Unpadding, grouped_product
from distsim.libraries.flash_attn import FA2, FA3, attend, flash_attn_varlen_func
from distsim.libraries.fused import FusedKernel, launch, needs_values, refuse_values
from distsim.libraries.fused import fused as one_kernel
from distsim.libraries.te_context import attend_by_heads, attend_in_ring, check_context_parallel
from distsim.libraries.te_fp8 import (
    FP8,
    QUANTIZATION,
    RECIPES,
    Product,
    cast,
    fp8_recipe,
    general_gemm,
    get_dummy_wgrad,
    get_workspace,
    multiply,
    region,
    unused_gradient,
)

_NAME = "transformer_engine"
_SPLIT = {"column": 0, "row": 1}
"""Dimension along which the ranks of a tensor-parallel group share a weight."""

# -- Modules


class TransformerEngineBaseModule(nn.Module):
    """Base of all modules: the tensor-parallel group, a norm before the product, and the product."""

    save_original_input = False

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
        self._weight_copies: dict[int, tuple[Tensor, Tensor]] = {}
        """The weights in fp8, by the parameters' ids, from a step's first micro-batch to its last."""

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        self.tp_group = tp_group
        self.tp_size = 1 if tp_group is None else dist.get_world_size(tp_group)

    def backward_dw(self) -> None:
        """Refuse to compute the weights' gradients apart from backward."""
        raise NotSimulated("delay_wgrad_compute of transformer_engine", "leave out Megatron's --delay-wgrad-compute")

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
            forks = self.tracker is not None and split is not None
            with torch.no_grad(), self.tracker().fork() if forks else contextlib.nullcontext():  # type: ignore[misc]
                (init or self.init_method)(parameter)
        parameter.tensor_model_parallel = split is not None
        parameter.partition_dim, parameter.partition_stride = (-1 if split is None else split), 1
        if split is None:
            parameter.sequence_parallel = self.sequence_parallel
        return parameter

    def _weight(self, rows: int, columns: int, mode: str | None) -> nn.Parameter:
        """Return this rank's part of a weight (*columns*, *rows*)."""
        shape = [columns, rows]
        split = _SPLIT.get(mode or "")
        if split is not None:
            shape[split] //= self.tp_size
        weight = self._parameter(*shape, split=split)
        weight.is_fp8 = region().makes_parameters and weight.element_size() == 2
        return weight

    def _add_norm(self, size: int, eps: float, options: dict[str, Any]) -> None:
        self.eps, self.zero_centered_gamma = eps, bool(options.get("zero_centered_gamma"))
        self.return_layernorm_output = bool(options.get("return_layernorm_output"))
        scale = nn.init.zeros_ if self.zero_centered_gamma else nn.init.ones_
        self.layer_norm_weight = self._parameter(size, init=scale)
        has_bias = options.get("normalization", "LayerNorm") == "LayerNorm"
        self.layer_norm_bias = self._parameter(size, init=nn.init.zeros_) if has_bias else None

    def _normed(self, x: Tensor) -> Tensor:
        return _norm_kernel(x, self.layer_norm_weight, self.layer_norm_bias, self.eps, self.zero_centered_gamma)

    def _project(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, mode: str | None, is_first_microbatch: bool | None,
        cast_before: bool = False,
    ) -> Tensor:  # fmt: skip
        """Return the product of *x* and a weight."""
        state, recipe = region(), fp8_recipe()
        if torch.is_autocast_enabled("cuda"):
            x = x.to(torch.get_autocast_dtype("cuda"))
        if x.dtype != weight.dtype:
            weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
        product = Product(self.tp_group, self.tp_size, mode, self.sequence_parallel, self.fuse_wgrad_accumulation)
        if recipe is not None:
            _check_fp8_shape(x, weight)
            product.recipe, product.amax_group = recipe, state.group
            product.cast_before = cast_before and (recipe.delayed() or recipe.mxfp8())
            product.ends_backward = state.products == 0
            product.keeps_input = self.save_original_input
            state.products += 1
        copies = None if recipe is None else self._copies(weight, recipe, is_first_microbatch)
        return multiply(x, weight, bias, product, copies)

    def _copies(self, weight: Tensor, recipe: Any, is_first_microbatch: bool | None) -> tuple[Tensor, Tensor]:
        """Return *weight* in fp8 and its transpose. A step's first micro-batch casts it for all; None: each does.

        The two bytes of an element that is made in fp8 are those of the weight and of its transpose.

        Source: get_weight_workspace of transformer_engine/pytorch/module/base.py.
        """
        if getattr(weight, "is_fp8", False):
            rows, columns = weight.detach().view(FP8).view(2, *weight.shape)
            return rows, columns.view(weight.shape[::-1])
        copies = self._weight_copies.get(id(weight))
        if copies is None or is_first_microbatch in (None, True):
            with torch.no_grad():
                copies = cast(weight, FP8, recipe, into=copies if is_first_microbatch else None)
        if is_first_microbatch is not None and isinstance(weight, nn.Parameter):
            self._weight_copies[id(weight)] = copies
        return copies

    def _results(self, out: Tensor, bias: Tensor | None, normed: Tensor | None = None) -> Any:
        """Return what the module's arguments ask for: the output, its bias, the output of the norm."""
        results = [out, *([bias] if self.return_bias else []), *([] if normed is None else [normed])]
        return tuple(results) if len(results) > 1 else out


def _check_fp8_shape(x: Tensor, weight: Tensor) -> None:
    rows = x.numel() // x.shape[-1]
    for shape in ((rows, x.shape[-1]), tuple(weight.shape)):
        if shape[0] % 8 or shape[1] % 16:
            raise AssertionError(
                f"FP8 execution requires the product of all dimensions except the last to be divisible by 8 and the "
                f"last dimension to be divisible by 16, but got tensor with dims={list(shape)}"
            )


def _norm_kernel(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centered: bool) -> Tensor:
    """Return LayerNorm, or RMSNorm if *bias* is None: one kernel forward and two backward."""
    shape = (x.shape[-1],)

    def by_torch(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        scale = weight + 1 if centered else weight
        return F.rms_norm(x, shape, scale, eps) if bias is None else F.layer_norm(x, shape, scale, bias, eps)

    kernel = FusedKernel(f"{_NAME}::norm", by_torch, "norm", backward_kernels=2, saves=(0, 1))
    return one_kernel(kernel, x, weight, bias)


class LayerNorm(TransformerEngineBaseModule):
    """Stand-in for transformer_engine.pytorch.LayerNorm."""

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


class TransformerEngineRMSNorm(LayerNorm):
    """Stand-in for transformer_engine.pytorch.RMSNorm."""

    has_bias = False


class Linear(TransformerEngineBaseModule):
    """Stand-in for transformer_engine.pytorch.Linear."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True, parallel_mode: str | None = None,
                 **options: Any) -> None:  # fmt: skip
        super().__init__()
        self._set_up(options)
        self.in_features, self.out_features, self.parallel_mode = in_features, out_features, parallel_mode
        self.use_bias = bias
        self.weight = self._weight(in_features, out_features, parallel_mode)
        split = 0 if parallel_mode == "column" else None
        self.bias = self._parameter(self.weight.shape[0], init=nn.init.zeros_, split=split) if bias else None

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None, **options: Any) -> Any:
        bias = None if self.return_bias else self.bias
        return self._results(self._project(inp, self.weight, bias, self.parallel_mode, is_first_microbatch), self.bias)


class LayerNormLinear(Linear):
    """Stand-in for transformer_engine.pytorch.LayerNormLinear."""

    def __init__(self, in_features: int, out_features: int, eps: float = 1e-5, **options: Any) -> None:
        super().__init__(in_features, out_features, **options)
        self._add_norm(in_features, eps, options)

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None, **options: Any) -> Any:
        normed, bias = self._normed(inp), None if self.return_bias else self.bias
        out = self._project(normed, self.weight, bias, self.parallel_mode, is_first_microbatch, cast_before=True)
        return self._results(out, self.bias, normed if self.return_layernorm_output else None)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functools.partial(F.gelu, approximate="tanh"), "silu": F.silu, "relu": F.relu,
    "srelu": lambda x: F.relu(x).square(), "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}  # fmt: skip
_GATED = {"geglu": "gelu", "swiglu": "silu", "reglu": "relu", "qgeglu": "quick_gelu"}


def _activate(x: Tensor, name: str) -> Tensor:
    """Return an activation of *x*, gated by its second half if *name* is a gated one, in one kernel."""
    gated = name in _GATED

    def by_torch(x: Tensor) -> Tensor:
        if not gated:
            return _ACTIVATIONS[name](x)
        one, other = x.chunk(2, dim=-1)
        return _ACTIVATIONS[_GATED[name]](one) * other

    if name not in _ACTIVATIONS and not gated:
        names = ", ".join([*_ACTIVATIONS, *_GATED])
        raise NotSimulated(f"the activation {name!r} of transformer_engine", f"use {names}")
    shape = (*x.shape[:-1], x.shape[-1] // (2 if gated else 1))
    return one_kernel(FusedKernel(f"{_NAME}::{name}", by_torch, outputs=((shape, x.dtype),)), x)


class LayerNormMLP(TransformerEngineBaseModule):
    """Stand-in for transformer_engine.pytorch.LayerNormMLP."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int, eps: float = 1e-5, *, bias: bool = True,
                 activation: str = "gelu", set_parallel_mode: bool = False, **options: Any) -> None:  # fmt: skip
        super().__init__()
        self._set_up(options)
        self._add_norm(hidden_size, eps, options)
        self.activation = activation
        self.modes = ("column", "row") if set_parallel_mode else (None, None)
        wide = 2 * ffn_hidden_size if activation in _GATED else ffn_hidden_size
        self.fc1_weight = self._weight(hidden_size, wide, self.modes[0])
        split = 0 if set_parallel_mode else None
        self.fc1_bias = self._parameter(self.fc1_weight.shape[0], init=nn.init.zeros_, split=split) if bias else None
        self.fc2_weight = self._weight(ffn_hidden_size, hidden_size, self.modes[1])
        self.fc2_bias = self._parameter(hidden_size, init=nn.init.zeros_) if bias else None

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        normed, bias = self._normed(inp), None if self.return_bias else self.fc2_bias
        up = self._project(normed, self.fc1_weight, self.fc1_bias, self.modes[0], is_first_microbatch, cast_before=True)
        active = _activate(up, self.activation)
        out = self._project(active, self.fc2_weight, bias, self.modes[1], is_first_microbatch, cast_before=True)
        return self._results(out, self.fc2_bias, normed if self.return_layernorm_output else None)


class GroupedLinear(TransformerEngineBaseModule):
    """transformer_engine.pytorch.GroupedLinear: one product for each expert, all in one launch."""

    def __init__(self, num_gemms: int, in_features: int, out_features: int, *, bias: bool = True,
                 parallel_mode: str | None = None, **options: Any) -> None:  # fmt: skip
        super().__init__()
        self._set_up(options)
        self.num_gemms, self.use_bias = num_gemms, bias
        for i in range(num_gemms):
            weight = self._weight(in_features, out_features, parallel_mode)
            setattr(self, f"weight{i}", weight)
            if bias:
                setattr(self, f"bias{i}", self._parameter(weight.shape[0], init=nn.init.zeros_))

    def forward(self, inp: Tensor, m_splits: Any, is_first_microbatch: bool | None = None, **options: Any) -> Any:
        weights = [getattr(self, f"weight{i}") for i in range(self.num_gemms)]
        recipe, unused = fp8_recipe(), unused_gradient if self.fuse_wgrad_accumulation else None
        copies = [] if recipe is None else [self._copies(weight, recipe, is_first_microbatch) for weight in weights]
        out = grouped_product(f"{_NAME}::grouped_gemm", inp, weights, True, m_splits, copies=copies, unused=unused)
        biases = [getattr(self, f"bias{i}") for i in range(self.num_gemms)] if self.use_bias else []
        if self.return_bias:
            return out, biases or None
        return out + biases[0] if biases else out


# -- Attention and recomputation


class DotProductAttention(TransformerEngineBaseModule):
    """Stand-in for transformer_engine.pytorch.DotProductAttention."""

    def __init__(self, num_attention_heads: int, kv_channels: Any, num_gqa_groups: int | None = None,
                 attention_dropout: float = 0.0, qkv_format: str = "sbhd", attn_mask_type: str = "causal",
                 window_size: Any = None, *, softmax_scale: float | None = None, cp_group: Any = None,
                 cp_comm_type: str = "p2p", **options: Any) -> None:  # fmt: skip
        super().__init__()
        self._set_up(options)
        self.attention_dropout, self.qkv_format, self.attn_mask_type = attention_dropout, qkv_format, attn_mask_type
        self.window_size, self.softmax_scale = window_size, softmax_scale
        self.set_context_parallel_group(cp_group, cp_comm_type=cp_comm_type)

    def set_context_parallel_group(self, cp_group: Any, cp_global_ranks: Any = None, cp_stream: Any = None,
                                   cp_comm_type: str = "p2p") -> None:  # fmt: skip
        groups = cp_group if isinstance(cp_group, list) else [cp_group]
        shares = any(group is not None and dist.get_world_size(group) > 1 for group in groups)
        if shares:
            check_context_parallel(cp_group, cp_comm_type)
        self.cp_group, self.cp_comm_type = cp_group if shares else None, cp_comm_type

    def forward(self, query_layer: Tensor, key_layer: Tensor, value_layer: Tensor, attention_mask: Any = None,
                qkv_format: str | None = None, cu_seqlens_q: Any = None, cu_seqlens_kv: Any = None,
                cu_seqlens_q_padded: Any = None, cu_seqlens_kv_padded: Any = None, max_seqlen_q: int | None = None,
                max_seqlen_kv: int | None = None, attn_mask_type: str | None = None, window_size: Any = None,
                **options: Any) -> Tensor:  # fmt: skip
        layout, causal = qkv_format or self.qkv_format, "causal" in (attn_mask_type or self.attn_mask_type)
        dropout, three = self.attention_dropout if self.training else 0.0, (query_layer, key_layer, value_layer)
        if layout == "thd":
            if self.cp_group is not None:
                raise NotSimulated("context parallelism of packed sequences", "use qkv_format sbhd or bshd")
            longest = max_seqlen_q or query_layer.shape[0]
            return flash_attn_varlen_func(
                *three, cu_seqlens_q, cu_seqlens_kv, longest, max_seqlen_kv or longest, dropout, self.softmax_scale,
                causal,
            ).flatten(-2)  # fmt: skip
        q, k, v = (t.transpose(0, 1) if layout == "sbhd" else t for t in three)
        window = tuple(window_size or self.window_size or (-1, -1))
        window = (-1, -1) if causal and window == (-1, 0) else window
        small = q.shape[-1] <= 128 or (q.shape[-1], v.shape[-1]) == (192, 128)  # the latter are latent attention's
        kernel: Any = FA3 if torch.cuda.get_device_capability() >= (9, 0) and small else FA2
        kernel = kernel if q.element_size() == 2 else None  # as torch chooses
        bias = options.get("core_attention_bias")
        call = "transformer_engine.DotProductAttention"

        def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(call, q, k, v, self.softmax_scale, causal, dropout, window, bias, kernel)

        if self.cp_group is None:
            out = attended(q, k, v)
        elif self.cp_comm_type == "a2a":
            out = attend_by_heads(attended, q, k, v, self.cp_group)
        else:
            out = attend_in_ring(q, k, v, self.cp_group, causal, self.softmax_scale, kernel)
        return (out.transpose(0, 1) if layout == "sbhd" else out).flatten(-2)


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

    return one_kernel(FusedKernel(f"{_NAME}::fused_rope", by_torch, saves=(1,)), t, freqs)


class _CrossEntropy(torch.autograd.Function):
    """Loss of each row of logits (..., words of this rank); forward writes the gradient where the logits were."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, group: Any) -> Tensor:
        losses = torch.empty(logits.shape[:-1], dtype=torch.float32, device=logits.device)
        sums = torch.empty(3 * losses.numel(), dtype=torch.float32, device=logits.device)
        launch(f"{_NAME}::online_softmax", [logits, target], [sums], kind="softmax", triton=True)
        if group is not None and (size := dist.get_world_size(group)) > 1:
            mine, sums = sums, sums.new_empty(size * sums.numel())
            dist.all_gather_into_tensor(sums, mine, group=group)
        launch(f"{_NAME}::cross_entropy", [logits, target, sums], [logits, losses], kind="softmax", triton=True)
        ctx.save_for_backward(logits)
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (of_logits,) = ctx.saved_tensors
        launch(f"{_NAME}::element_mul", [of_logits, grads[0]], [of_logits], triton=True)
        return of_logits, None, None


def parallel_cross_entropy(inp: Tensor, target: Tensor, label_smoothing: float = 0.0, reduce_loss: bool = False,
                           dist_process_group: Any = None, *args: Any, **options: Any) -> Tensor:  # fmt: skip
    """transformer_engine.pytorch.cross_entropy.parallel_cross_entropy of logits whose words the group's ranks share."""
    if needs_values():
        if dist_process_group is not None and dist.get_world_size(dist_process_group) > 1:
            refuse_values(f"{_NAME}.parallel_cross_entropy", "its values are not computed for shared words")
        each = F.cross_entropy(inp.float().flatten(0, -2), target.flatten(), reduction="none")
        losses: Tensor = each.view(target.shape)
    else:
        losses = _CrossEntropy.apply(inp, target, dist_process_group)
    return losses.mean() if reduce_loss else losses


class _SplitAlongDim:
    """transformer_engine.pytorch.attention._SplitAlongDim: views; their gradients are put together again."""

    @staticmethod
    def apply(mixed: Tensor, split_dim: int, split_size_or_sections: Any, squeeze: bool = False) -> tuple[Tensor, ...]:
        parts = torch.split(mixed, split_size_or_sections, dim=split_dim)
        return tuple(part.squeeze(split_dim) for part in parts) if squeeze else parts


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Stand-in for transformer_engine.pytorch.checkpoint: torch's checkpoint, without the additional arguments."""
    for name in ("distribute_saved_activations", "get_rng_state_tracker", "tp_group"):
        kwargs.pop(name, None)
    reentrant = kwargs.pop("use_reentrant", True)
    if reentrant and kwargs:
        function, kwargs = functools.partial(function, **kwargs), {}
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=reentrant, **kwargs)


def get_cpu_offload_context(enabled: bool = False, *args: Any, **options: Any) -> tuple[Any, Callable[[Any], Any]]:
    """transformer_engine.pytorch.get_cpu_offload_context: a context, and what synchronizes a layer's output.

    Raises:
        NotSimulated: Activations are to be moved to the host.
    """
    if enabled:
        raise NotSimulated(f"{_NAME}: activations on the host", "leave out --cpu-offloading-num-layers")
    return contextlib.nullcontext(), lambda output: output


_MODULE: dict[str, Any] = {
    kind.__name__: kind for kind in (Linear, LayerNorm, LayerNormLinear, LayerNormMLP, GroupedLinear)
}
_MODULE |= {"RMSNorm": TransformerEngineRMSNorm, "Fp8Padding": Fp8Padding, "Fp8Unpadding": Fp8Unpadding}
_OFFLOAD = {"get_cpu_offload_context": get_cpu_offload_context}
_ATTENTION = {"DotProductAttention": DotProductAttention, "apply_rotary_pos_emb": apply_rotary_pos_emb}
_ATTENTION["_SplitAlongDim"] = _SplitAlongDim
MODULES: dict[str, dict[str, Any]] = {
    "transformer_engine": {"__version__": "2.20.0"},
    "transformer_engine.common.recipe": RECIPES,
    "transformer_engine.pytorch": {**QUANTIZATION, **_MODULE, **_ATTENTION, **_OFFLOAD, "checkpoint": checkpoint},
    "transformer_engine.pytorch.cpu_offload": _OFFLOAD,
    "transformer_engine.pytorch.module": _MODULE,
    "transformer_engine.pytorch.module.base": {
        "TransformerEngineBaseModule": TransformerEngineBaseModule,
        "get_dummy_wgrad": get_dummy_wgrad,
        "get_workspace": get_workspace,
    },
    "transformer_engine.pytorch.permutation": PERMUTATION,
    "transformer_engine.pytorch.cpp_extensions": {"general_gemm": general_gemm},
    "transformer_engine.pytorch.cross_entropy": {"parallel_cross_entropy": parallel_cross_entropy},
    "transformer_engine.pytorch.fp8": {**QUANTIZATION, **RECIPES},
    "transformer_engine.pytorch.quantization": QUANTIZATION,
    "transformer_engine.pytorch.attention": _ATTENTION,
    "transformer_engine.pytorch.attention.rope": _ATTENTION,
    "transformer_engine.pytorch.distributed": {"checkpoint": checkpoint},
    "transformer_engine.pytorch.optimizers": {"FusedAdam": FusedAdam, "FusedSGD": FusedSGD, **MULTI_TENSOR},
}
