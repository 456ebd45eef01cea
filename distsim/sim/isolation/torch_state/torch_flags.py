"""torch's flags in C++ that hold for the whole process: turned by one simulated rank, for it alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.backends import ContextProp

from distsim.torch_compat.state import (
    FLAG_PAIRS,
    FLAGS_IN_C,
    GET_CUDNN_ALLOW_TF32,
    GET_FP32_PRECISION_GETTER,
    SET_CUBLAS_ALLOW_TF32,
    SET_CUDNN_ALLOW_TF32,
    SET_FLOAT32_MATMUL_PRECISION,
    SET_FP32_PRECISION_SETTER,
)

__all__ = ["FLAGS", "Flag"]

_get_cudnn_allow_tf32 = GET_CUDNN_ALLOW_TF32.get()
_get_fp32_precision_getter = GET_FP32_PRECISION_GETTER.get()
_set_cudnn_allow_tf32 = SET_CUDNN_ALLOW_TF32.get()
_set_float32_matmul_precision = SET_FLOAT32_MATMUL_PRECISION.get()

Flag = tuple[Callable[[], Any], Callable[[Any], None], tuple[tuple[Any, str], ...]]


def _flags() -> list[Flag]:
    props = [p for m in sys.modules.copy().values() for p in vars(type(m)).values() if isinstance(p, ContextProp)]
    found: list[Flag] = []
    for getter, setter in FLAG_PAIRS:
        get, put = FLAGS_IN_C[getter].get(None), FLAGS_IN_C[setter].get(None)
        if get is None or put is None:
            continue
        holders = [(FLAGS_IN_C[setter].holder(), setter)]
        holders += [(prop, "setter") for prop in dict.fromkeys(props) if prop.setter is put]
        found.append((get, put, tuple(holders)))
    ways = [(torch, "set_float32_matmul_precision")]
    for name in (SET_CUBLAS_ALLOW_TF32, SET_CUDNN_ALLOW_TF32, SET_FP32_PRECISION_SETTER):
        put = name.get(None)
        if put is not None:
            ways.append((name.holder(), name.attribute))
            ways += [(prop, "setter") for prop in dict.fromkeys(props) if prop.setter is put]
    found.append((_precisions, _set_precisions, tuple(ways)))
    return found


_PRECISIONS = tuple(
    [("generic", "all")]
    + [(backend, what) for backend in ("cuda", "mkldnn") for what in ("all", "matmul", "conv", "rnn")]
)
_set_precision = SET_FP32_PRECISION_SETTER.get(None)


def _precisions() -> tuple[str | None, bool | None, tuple[str, ...]]:
    """How products of 32-bit numbers may be rounded: four setters of torch write to the same few places, and its older
    getters raise once a newer setter was used."""
    exact = () if _set_precision is None else tuple(_get_fp32_precision_getter(*of) for of in _PRECISIONS)
    return _asked(torch.get_float32_matmul_precision), _asked(_get_cudnn_allow_tf32), exact


def _asked(get: Any) -> Any:
    try:
        return get()
    except RuntimeError:
        return None


def _set_precisions(values: tuple[str | None, bool | None, tuple[str, ...]]) -> None:
    products, convolutions, exact = values
    if products is not None:
        _set_float32_matmul_precision(products)
    if convolutions is not None:
        _set_cudnn_allow_tf32(convolutions)
    for of, value in zip(_PRECISIONS, exact, strict=False):  # last: the others write to them
        assert _set_precision is not None
        _set_precision(*of, value)


FLAGS = _flags()
