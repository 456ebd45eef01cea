"""What PyTorch says on a GPU where its kernels without data say the same in other words."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

__all__ = ["in_torchs_words"]

_PRODUCT = re.compile(r"a and b must have same reduction dim, but got \[(.*?)\] X \[(.*?)\]")


def in_torchs_words(error: RuntimeError, args: tuple[Any, ...]) -> RuntimeError:
    """*error*, which an operator's meta kernel raised for *args*; or as its CUDA kernel would have put it."""
    text = str(error)
    product = _PRODUCT.search(text)
    if product is not None:
        one, other = (shape.replace(", ", "x") for shape in product.groups())
        return RuntimeError(f"mat1 and mat2 shapes cannot be multiplied ({one} and {other})")
    if text.startswith("Attempting to broadcast a dimension"):
        said = _broadcast([tuple(arg.shape) for arg in args if isinstance(arg, Tensor)])
        if said is not None:
            return RuntimeError(said)
    return error


def _broadcast(shapes: list[tuple[int, ...]]) -> str | None:
    """infer_size_impl in aten/src/ATen/ExpandUtils.cpp: the last dimension in which two do not fit."""
    if not shapes:
        return None
    whole = shapes[0]
    for shape in shapes[1:]:
        dims = max(len(whole), len(shape))
        a, b = (1,) * (dims - len(whole)) + whole, (1,) * (dims - len(shape)) + shape
        for dim in reversed(range(dims)):
            if a[dim] != b[dim] and 1 not in (a[dim], b[dim]):
                return (
                    f"The size of tensor a ({a[dim]}) must match the size of tensor b ({b[dim]}) at non-singleton "
                    f"dimension {dim}"
                )
        whole = tuple(y if x == 1 else x for x, y in zip(a, b, strict=True))
    return None
