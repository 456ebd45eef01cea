"""What an operator costs, and the call that the cost is of: arguments by name, bytes of tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

__all__ = ["NOTHING", "Cost", "OperatorCall", "nbytes", "tensors_in"]


@dataclass(frozen=True, slots=True)
class Cost:
    """One operator on an otherwise idle device, all its kernels together."""

    seconds: float
    """From the first kernel's begin to the last one's end, the gaps between them included."""
    kernels: int
    """How many it launches; 0 for a view."""
    flops: int
    """What the model asks for, not what a kernel wastes on padding."""
    nbytes: int
    """To and from device memory."""
    kind: str
    """gemm, attention, conv, norm, softmax, elementwise, reduction, embedding, optimizer, copy, index, random, sort,
    transfer (over PCIe), custom or none."""
    memory_bound: bool

    def plus(self, other: Cost) -> Cost:
        """One after the other; the kind is that of the longer."""
        longer = self if self.seconds >= other.seconds else other
        return replace(
            longer,
            seconds=self.seconds + other.seconds,
            kernels=self.kernels + other.kernels,
            flops=self.flops + other.flops,
            nbytes=self.nbytes + other.nbytes,
        )


NOTHING = Cost(0.0, 0, 0, 0, "none", False)
"""A view: the device never hears of it."""


# -- One call of an operator: its arguments by name, and the bytes of its tensors.


def tensors_in(value: Any) -> Iterator[Any]:
    """Every tensor in a value, in lists and tuples also."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors_in(each)


def nbytes(value: Any) -> int:
    """Return the bytes of all tensors in *value*; an expanded tensor counts with its memory."""
    total = 0
    for tensor in tensors_in(value):
        elements = 1
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            elements *= size if stride or not size else 1
        total += elements * tensor.element_size()
    return total


class OperatorCall:
    """An operator and what it was called with; only shapes, strides, dtypes and devices of tensors are looked at."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        self.func, self.args, self.kwargs, self.result = func, args, kwargs, result
        self.schema = func._schema
        self.name: str = self.schema.name
        """As `aten::mm`."""

    def __getitem__(self, name: str) -> Any:
        """The argument of that name, or its default; None where the operator has no such argument."""
        for i, argument in enumerate(self.schema.arguments):
            if argument.name == name:
                if name in self.kwargs:
                    return self.kwargs[name]
                if i < len(self.args):
                    return self.args[i]
                return argument.default_value if argument.has_default_value() else None
        return None

    @property
    def inputs(self) -> tuple[Any, ...]:
        """All tensors that go in, an out= argument among them."""
        return (*tensors_in(self.args), *tensors_in(self.kwargs))

    @property
    def outputs(self) -> tuple[Any, ...]:
        """All tensors that are written: the results, or where there is none, the arguments the schema says."""
        tensors = tuple(tensors_in(self.result))
        return tensors or self.written

    @property
    def written(self) -> tuple[Any, ...]:
        """Arguments that are changed in place, out= ones among them."""
        tensors: list[Any] = []
        for argument in self.schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                tensors += tensors_in(self[argument.name])
        return tuple(tensors)

    @property
    def is_view(self) -> bool:
        """Whether every result is an argument seen otherwise, and nothing is written."""
        returns = self.schema.returns
        return bool(returns) and all(each.alias_info is not None and not each.alias_info.is_write for each in returns)

    @property
    def read(self) -> int:
        """Bytes read by a kernel that reads every input once (not those that out= alone names)."""
        total = 0
        for argument in self.schema.arguments:
            if not argument.is_out:
                total += nbytes(self[argument.name])
        return total

    @property
    def write(self) -> int:
        """Bytes written by a kernel that writes every output once."""
        return nbytes(self.outputs)
