"""Answers as plain values: what a body found, in a form that two arms can be compared by."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int8, torch.uint8, torch.int32, torch.int64]
ALL_DTYPES = [*FLOATS, *INTEGERS, torch.int16, torch.bool, torch.complex64, torch.complex128]


def mine(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor that tells its rank: 10 * rank, 10 * rank + 1, ..."""
    count = torch.Size(shape).numel()
    return (torch.arange(count) + 10 * rank).reshape(shape).to(dtype)


def plain(value: Any) -> Any:
    """The value without tensors and objects of torch: dtype, shape and contents as lists."""
    if isinstance(value, torch.Tensor):
        detached = value.detach()
        if detached.dtype in (torch.float16, torch.bfloat16):
            contents = detached.float().tolist()
        else:
            contents = detached.tolist()
        return {"dtype": str(value.dtype), "shape": list(value.shape), "values": contents}
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if value is None:
        return None
    for kind in (bool, int, float, complex, str, bytes):
        if isinstance(value, kind):
            as_kind: Callable[[Any], Any] = kind  # a Backend is a str: its plain self
            return as_kind(value)
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, type):
        return value.__name__
    return repr(value)


def error_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The type of what the call raises, or `"none"`."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return type(error).__name__
    return "none"


def says(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Type and first line of what the call raises, or `"none"`. Backends have words of their own for a RuntimeError."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        words = "" if isinstance(error, RuntimeError) else str(error).partition("\n")[0]
        return f"{type(error).__name__}: {words}"
    return "none"


def differences(expected: Any, got: Any, path: str = "") -> list[str]:
    """Where two plain values differ, by name. Whole numbers exactly, other floats closely."""
    if isinstance(expected, dict) and isinstance(got, dict):
        found = []
        for key in [*expected, *(k for k in got if k not in expected)]:
            here = f"{path}.{key}" if path else str(key)
            if key not in got:
                found.append(f"{here}: expected {expected[key]!r}, got nothing")
            elif key not in expected:
                found.append(f"{here}: expected nothing, got {got[key]!r}")
            else:
                found += differences(expected[key], got[key], here)
        return found
    if isinstance(expected, list) and isinstance(got, list) and len(expected) == len(got):
        return [
            line
            for i, (one, other) in enumerate(zip(expected, got, strict=True))
            for line in differences(one, other, f"{path}[{i}]")
        ]
    if _equal(expected, got):
        return []
    return [f"{path}: expected {expected!r}, got {got!r}"]


def _equal(expected: Any, got: Any) -> bool:
    if type(expected) is not type(got):
        return False
    if isinstance(expected, float):
        if math.isnan(expected):
            return math.isnan(got)
        if expected.is_integer() or math.isinf(expected):
            return bool(expected == got)
        return math.isclose(expected, got, rel_tol=1e-5, abs_tol=1e-6)
    return bool(expected == got)
