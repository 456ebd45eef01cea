"""scaled_dot_product_attention on simulated GPUs takes the operator that it takes on CUDA.

torch chooses in C++, by a table that a build without CUDA leaves empty; autograd then sees the operators of the
mathematical form, whose memory and time are others. The rules are those of aten/src/ATen/native/transformers/cuda/
sdp_utils.cpp (torch 2.13) for dense tensors: which backends the program allows, then flash attention, the
memory-efficient one, the formula; cuDNN's first where the GPU's data file says so.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.backends import cuda
from torch.nn.attention import SDPBackend

from distsim.errors import NotSimulated
from distsim.sim.isolation.process import current_task
from distsim.torch_compat.device import aten

__all__ = ["choice", "register_attention"]

_HALVES = (torch.float16, torch.bfloat16)
_MOST_OF_FLASH = 256
"""Elements of a head (check_head_dim_size_flash)."""
_CUDNN_HEADS = 128
"""At most, of queries, keys and values, except for DeepSeek's 192 and 128 (check_cudnn_tensor_shapes; cuDNN 9.11 on
compute capability 9.0 and 10)."""


def choice(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, grouped: bool, cudnn_first: bool
) -> SDPBackend:
    """The backend that torch takes on CUDA; `ERROR` where the program allows none that fits."""
    order = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    order.insert(0 if cudnn_first and mask is None else len(order), SDPBackend.CUDNN_ATTENTION)
    four = all(t.dim() == 4 for t in (query, key, value))
    last = four and all(t.stride(-1) == 1 for t in (query, key, value))
    heads = head, value_head = query.shape[-1], value.shape[-1]
    square = query.shape[-2] == key.shape[-2]
    same_heads = four and query.shape[1] == key.shape[1] == value.shape[1]
    some = query.numel() > 0 and key.numel() > 0
    last = last and head == key.shape[-1] and query.shape[0] == key.shape[0] == value.shape[0]
    half, plain = query.dtype in _HALVES, square or not causal
    fits = {
        SDPBackend.FLASH_ATTENTION: cuda.flash_sdp_enabled() and last and some and half and plain and mask is None
        and head == value_head and head <= _MOST_OF_FLASH and (same_heads or grouped),
        SDPBackend.EFFICIENT_ATTENTION: cuda.mem_efficient_sdp_enabled() and last and some and same_heads
        and (half or query.dtype is torch.float32) and not (mask is not None and mask.requires_grad),
        SDPBackend.CUDNN_ATTENTION: cuda.cudnn_sdp_enabled() and last and some and half and plain
        and (max(heads) <= _CUDNN_HEADS or (cudnn_first and heads == (192, 128))) and not any(h % 8 for h in heads)
        and (same_heads or grouped),
        SDPBackend.MATH: cuda.math_sdp_enabled(),
    }  # fmt: skip
    return next((backend for backend in order if fits[backend]), SDPBackend.ERROR)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    task = current_task()
    if task is None:
        raise NotSimulated("scaled_dot_product_attention on CUDA tensors outside a rank")
    _validate(query, key, value, attn_mask)
    if is_causal and attn_mask is not None:
        raise RuntimeError("_scaled_dot_product_attention: Explicit attn_mask should not be set when is_causal=True")
    cudnn_first = task.process.accelerators.model.sdpa_kernel == "cudnn"
    taken = choice(query, key, value, attn_mask, is_causal, enable_gqa, cudnn_first)
    if taken is SDPBackend.ERROR:
        raise RuntimeError("No available kernel. Aborting execution.")
    if taken is SDPBackend.MATH:
        out: Tensor = aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
        return out
    head = query.shape[-1]
    keeps = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    if taken is SDPBackend.FLASH_ATTENTION:
        if scale is None:
            scale = 1.0 / math.sqrt(head)
        spare = -head % 8
        if spare:  # pad_last_dim
            query, key, value = (torch.nn.functional.pad(t, (0, spare)) for t in (query, key, value))
        out = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        return out[..., :head] if spare else out
    bias = None if attn_mask is None else _bias(attn_mask, query, key)
    if taken is SDPBackend.CUDNN_ATTENTION:
        made = aten._scaled_dot_product_cudnn_attention(
            query, key, value, bias, keeps, dropout_p, is_causal, False, scale=scale
        )
    else:
        made = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, keeps, dropout_p, is_causal, scale=scale
        )
    first: Tensor = made[0]
    return first


def _validate(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> None:
    """validate_sdpa_input (native/transformers/attention.cpp), in its own words: of tensors of nothing on the CPU."""
    three = query, key, value
    if (
        len({t.dtype for t in three}) > 1
        or min(t.dim() for t in three) < 2
        or (mask is not None and mask.dtype not in (torch.bool, torch.float32, query.dtype))
    ):
        nothing = [torch.empty((0,) * t.dim(), dtype=t.dtype, device="cpu") for t in three]
        aten.scaled_dot_product_attention(
            *nothing, None if mask is None else torch.empty((0,) * mask.dim(), dtype=mask.dtype, device="cpu")
        )


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """What is added to the scores (convert_boolean_attn_mask, preprocess_mask)."""
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), -math.inf)
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def register_attention() -> torch.library.Library:
    """It is in force until it is destroyed."""
    library = torch.library.Library("aten", "IMPL")
    for key in ("AutogradCUDA", "CUDA"):
        library.impl("scaled_dot_product_attention", _attention, key)
    return library
