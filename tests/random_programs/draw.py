"""What random programs are made of: tensors of every dtype, shape and layout, drawn alike on every rank.

A `Draw` stands in the same place on all ranks, so that what one rank draws all draw; what differs by rank is computed
from the rank. Whole numbers, and few of them: no order of adding up changes a bit.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["DTYPES", "OPS", "Draw", "bits", "said"]

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu)
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
WHOLE = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64)
DTYPES = (*FLOATS, *FLOATS, *WHOLE, torch.bool, torch.bool, torch.complex64, torch.complex128, torch.complex32, *FLOAT8)
OPS = ("SUM", "SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
SHAPES = ((3,), (4,), (2, 3), (4, 2), (1,), (), (0,), (0, 3), (3, 0), (2, 1, 3), (4, 4), (130,), (8, 3))
LAYOUTS = ("plain", "plain", "plain", "transposed", "strided", "offset", "expanded", "conj", "neg", "leaf", "flipped")


class Draw(random.Random):
    """The same on every rank."""

    def dtype(self) -> torch.dtype:
        return self.choice(DTYPES) if self.random() < 0.6 else torch.float32

    def shape(self) -> tuple[int, ...]:
        return self.choice(SHAPES)

    def layout(self) -> str:
        return self.choice(LAYOUTS) if self.random() < 0.4 else "plain"

    def op(self, dtype: torch.dtype) -> Any:
        if self.random() < 0.5:
            return dist.ReduceOp.SUM
        name = self.choice(OPS)
        if name == "PREMUL_SUM":
            return dist._make_nccl_premul_sum(2.0)
        return getattr(dist.ReduceOp, name)

    def coin(self, chance: float = 0.5) -> bool:
        return self.random() < chance


def tensor(rank: int, salt: int, shape: tuple[int, ...], dtype: torch.dtype, layout: str = "plain") -> torch.Tensor:
    """A tensor that tells rank and *salt*; small whole numbers, whatever its layout."""
    if layout == "transposed" and len(shape) > 1:
        return values(rank, salt, shape[::-1], dtype).permute(*reversed(range(len(shape))))
    if layout == "strided" and shape:
        return values(rank, salt, (*shape[:-1], 2 * shape[-1]), dtype)[..., ::2]
    if layout == "offset":
        count = torch.Size(shape).numel()
        return values(rank, salt, (count + 5,), dtype)[2 : 2 + count].reshape(shape)
    if layout == "expanded" and len(shape) > 1:
        return values(rank, salt, (1, *shape[1:]), dtype).expand(shape)
    made = values(rank, salt, shape, dtype)
    if layout == "conj" and dtype in (torch.complex64, torch.complex128):
        return made.conj()
    if layout == "neg" and dtype in (torch.complex64, torch.complex128):
        return (made * 1j).conj().imag
    if layout == "leaf" and (dtype.is_floating_point or dtype.is_complex) and dtype not in FLOAT8:
        return made.requires_grad_()
    return made


def values(rank: int, salt: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    count = torch.Size(shape).numel()
    numbers = (torch.arange(count) * 3 + rank * 5 + salt) % 7
    if dtype is torch.bool:
        return (numbers > 2).reshape(shape)
    if dtype.is_complex:
        return torch.complex(numbers.double(), (numbers - 2).double()).reshape(shape).to(dtype)
    return numbers.reshape(shape).to(torch.float32 if dtype in FLOAT8 else dtype).to(dtype)


def bits(value: Any) -> Any:
    """What can be compared: a tensor as its dtype, shape and the bytes of its elements."""
    if isinstance(value, torch.Tensor):
        if type(value) is not torch.Tensor and hasattr(value, "_local_tensor"):
            return {"placements": str(value.placements), "local": bits(value._local_tensor)}
        if type(value) is not torch.Tensor and hasattr(value, "wait"):
            return {"waits": bits(value.wait())}
        if value.is_sparse:
            return {"sparse": bits(value.detach().to_dense())}
        flat = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        raw = flat.view(torch.uint8).tolist() if flat.numel() else []
        return [str(value.dtype), list(value.shape), bool(value.requires_grad), bytes(raw).hex()]
    if isinstance(value, dict):
        return {str(key): bits(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [bits(one) for one in value]
    if isinstance(value, torch._C.Future):
        return ["future", said(value.wait)]
    if isinstance(value, dist.Work):
        return "work"
    if isinstance(value, BaseException):
        return _error(value)
    return value if isinstance(value, bool | int | float | str | bytes | None) else repr(type(value))


def said(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What the call returns, or what it raises; backends have words of their own for a RuntimeError."""
    try:
        return bits(function(*args, **kwargs))
    except Exception as error:
        return _error(error)


def _error(error: BaseException) -> str:
    return f"{type(error).__name__}: {'' if isinstance(error, RuntimeError) else first_line(error)}"


def first_line(error: BaseException) -> str:
    """Without the time and the line of C++ that glog puts before it, and without lists of kernels behind it."""
    line = re.sub(r"^\[rank\d\]:\[.*?\] ", "", str(error).split("\n")[0]).rstrip()
    return re.sub(r"(<torch\S* object at 0x\w+>|SimGroup\(.*?\))", "<group>", line).split(". ")[0].rstrip(".")
