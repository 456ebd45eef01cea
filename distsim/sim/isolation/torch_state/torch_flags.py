"""torch's flags in C++ that hold for the whole process: turned by one simulated rank, for it alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.backends import ContextProp

__all__ = ["FLAGS", "Flag"]

Flag = tuple[Callable[[], Any], Callable[[Any], None], tuple[tuple[Any, str], ...]]

_PAIRS = (
    ("_get_autograd_fallback_mode", "_set_autograd_fallback_mode"),
    ("_get_backcompat_broadcast_warn", "_set_backcompat_broadcast_warn"),
    ("_get_backcompat_keepdim_warn", "_set_backcompat_keepdim_warn"),
    ("_get_blas_preferred_backend", "_set_blas_preferred_backend"),
    ("_check_sparse_tensor_invariants", "_set_check_sparse_tensor_invariants"),
    ("_get_cpu_allow_fp16_reduced_precision_reduction", "_set_cpu_allow_fp16_reduced_precision_reduction"),
    ("_get_cublas_allow_fp16_accumulation", "_set_cublas_allow_fp16_accumulation"),
    ("_get_cudnn_benchmark", "_set_cudnn_benchmark"),
    ("_get_cudnn_deterministic", "_set_cudnn_deterministic"),
    ("_get_cudnn_enabled", "_set_cudnn_enabled"),
    ("_get_deterministic_fill_uninitialized_memory", "_set_deterministic_fill_uninitialized_memory"),
    ("_get_dtensor_allow_implicit_replication", "_set_dtensor_allow_implicit_replication"),
    ("_get_linalg_preferred_backend", "_set_linalg_preferred_backend"),
    ("_get_math_sdp_allow_fp16_bf16_reduction", "_set_math_sdp_allow_fp16_bf16_reduction"),
    ("_get_mkldnn_deterministic", "_set_mkldnn_deterministic"),
    ("_get_mkldnn_enabled", "_set_mkldnn_enabled"),
    ("_get_nnpack_enabled", "_set_nnpack_enabled"),
    ("_get_qengine", "_set_qengine"),
    ("_get_sdp_priority_order", "_set_sdp_priority_order"),
    ("_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn"),
    ("_get_flash_sdp_enabled", "_set_sdp_use_flash"),
    ("_get_math_sdp_enabled", "_set_sdp_use_math"),
    ("_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient"),
    ("_get_overrideable_sdp_enabled", "_set_sdp_use_overrideable"),
    ("_get_warnAlways", "_set_warnAlways"),
)
"""Getter and setter of what is a bool, a number or a list, in torch._C. Not here: what torch keeps for
each thread (autocast, gradient modes), and what only a GPU or the old JIT reads."""


def _flags() -> list[Flag]:
    props = [p for m in sys.modules.copy().values() for p in vars(type(m)).values() if isinstance(p, ContextProp)]
    found: list[Flag] = []
    for getter, setter in _PAIRS:
        get, put = getattr(torch._C, getter, None), getattr(torch._C, setter, None)
        if get is None or put is None:
            continue
        holders = [(torch._C, setter)]
        holders += [(prop, "setter") for prop in dict.fromkeys(props) if prop.setter is put]
        found.append((get, put, tuple(holders)))
    ways = [(torch, "set_float32_matmul_precision")]
    for setter in ("_set_cublas_allow_tf32", "_set_cudnn_allow_tf32", "_set_fp32_precision_setter"):
        put = getattr(torch._C, setter, None)
        if put is not None:
            ways.append((torch._C, setter))
            ways += [(prop, "setter") for prop in dict.fromkeys(props) if prop.setter is put]
    found.append((_precisions, _set_precisions, tuple(ways)))
    return found


_PRECISIONS = tuple(
    [("generic", "all")]
    + [(backend, what) for backend in ("cuda", "mkldnn") for what in ("all", "matmul", "conv", "rnn")]
)
_set_precision = getattr(torch._C, "_set_fp32_precision_setter", None)


def _precisions() -> tuple[str | None, bool | None, tuple[str, ...]]:
    """How products of 32-bit numbers may be rounded: four setters of torch write to the same few places, and its older
    getters raise once a newer setter was used."""
    exact = () if _set_precision is None else tuple(torch._C._get_fp32_precision_getter(*of) for of in _PRECISIONS)
    return _asked(torch.get_float32_matmul_precision), _asked(torch._C._get_cudnn_allow_tf32), exact


def _asked(get: Any) -> Any:
    try:
        return get()
    except RuntimeError:
        return None


def _set_precisions(values: tuple[str | None, bool | None, tuple[str, ...]]) -> None:
    products, convolutions, exact = values
    if products is not None:
        torch._C._set_float32_matmul_precision(products)
    if convolutions is not None:
        torch._C._set_cudnn_allow_tf32(convolutions)
    for of, value in zip(_PRECISIONS, exact, strict=False):  # last: the others write to them
        assert _set_precision is not None
        _set_precision(*of, value)


FLAGS = _flags()
