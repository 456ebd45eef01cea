"""The sketch of a tensor: 16 weighted sums over its elements, in one pass over memory and without torch's operators.

Tensors on the CPU are read where they lie: torch's operators would pass the modes, hooks and autocast of the program,
and `Tensor.numpy` makes a storage that FSDP cannot resize any more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from distsim.debug.diagnosis.silent.facts import Vector
from distsim.torch_compat.state import LOCAL_TENSOR

__all__ = ["WIDTH", "Reader", "array_of", "is_constant", "local_part", "sketch", "sketch_array"]

WIDTH = 16
MEAN_SQUARE = 13 / 12
"""Of a number drawn between 0.5 and 1.5."""
Reader = Callable[[Any], "NDArray[Any] | None"]
"""Answers the values of a tensor; None where nobody knows them."""

_TYPES = {
    torch.float64: "<f8",
    torch.float32: "<f4",
    torch.float16: "<f2",
    torch.bfloat16: "<u2",
    torch.int64: "<i8",
    torch.int32: "<i4",
    torch.int16: "<i2",
    torch.int8: "|i1",
    torch.uint8: "|u1",
    torch.bool: "|b1",
}
_of_dtensor = LOCAL_TENSOR.getter()
_signs = np.ones(0, dtype=np.float32)


def _signs_of(count: int) -> Vector:
    """The first *count* numbers of one sequence, the same in every process: mean 0, mean square 1. They are not just
    -1 and 1, or a constant added to all elements would often leave no trace."""
    global _signs
    if len(_signs) < count:
        size = max(1024, 1 << (count - 1).bit_length())
        draw = np.random.Generator(np.random.PCG64(20)).random((size, 2), dtype=np.float32)
        _signs = np.where(draw[:, 0] < 0.5, -1, 1).astype(np.float32) * (draw[:, 1] + 0.5) * MEAN_SQUARE**-0.5
        _signs = _signs.astype(np.float32)
    return _signs[:count]


def sketch_array(values: NDArray[Any]) -> Vector:
    """The sketch of an array of any shape, in the order of its elements."""
    flat = values.reshape(-1)
    if flat.dtype != np.float32:
        flat = flat.astype(np.float32)
    rows, tail = divmod(flat.size, WIDTH)
    signs = _signs_of(rows + 1)
    total: Vector = signs[:rows] @ flat[: rows * WIDTH].reshape(rows, WIDTH)
    if tail:
        total[:tail] += signs[rows] * flat[rows * WIDTH :]
    return total


class _Memory:
    """The elements of a tensor where they lie; an array that is made of it keeps the tensor alive."""

    __slots__ = ("__array_interface__", "tensor")

    def __init__(self, tensor: torch.Tensor, kind: str) -> None:
        self.tensor = tensor
        size = tensor.element_size()
        self.__array_interface__ = {
            "data": (tensor.data_ptr(), True),
            "shape": tuple(tensor.shape),
            "strides": None if tensor.is_contiguous() else tuple(step * size for step in tensor.stride()),
            "typestr": kind,
            "version": 3,
        }


def local_part(tensor: Any) -> Any:
    """The part of a DTensor that this rank holds; any other tensor itself."""
    return _of_dtensor(tensor) if type(tensor).__name__ == "DTensor" else tensor


def array_of(tensor: Any) -> NDArray[Any] | None:
    """The values of a tensor on the CPU, without a copy where they are contiguous; None for all others."""
    tensor = local_part(tensor)
    kind = type(tensor)
    if kind is not torch.Tensor and kind is not torch.nn.Parameter:
        return None
    if not tensor.is_cpu or tensor.layout is not torch.strided or not tensor.numel():
        return None
    typestr = _TYPES.get(tensor.dtype)
    if typestr is None or tensor.is_neg():
        return None
    try:
        if not tensor.untyped_storage().nbytes():  # FSDP has freed it
            return None
        values = np.asarray(_Memory(tensor, typestr))
    except RuntimeError:  # a wrapper of torch.func, a storage that was freed
        return None
    if tensor.dtype is torch.bfloat16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values


def sketch(tensor: Any, read: Reader = array_of) -> Vector | None:
    """The sketch of a tensor; None where its values are not known."""
    values = read(tensor)
    return None if values is None or not values.size else sketch_array(values)


def is_constant(tensor: Any, read: Reader = array_of) -> bool:
    """Whether all elements are equal; False where nobody knows."""
    values = read(tensor)
    return values is not None and bool(values.size) and bool((values == values.flat[0]).all())
