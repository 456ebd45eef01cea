"""Cost of an operator on a GPU, and the call that is priced: arguments by name, bytes of tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one operator with all its kernels on an otherwise idle device."""

    seconds: float
    """Seconds from the start of the first kernel to the end of the last, including the gaps between them."""
    kernels: int
    """Number of kernels that the operator launches; 0 for a view."""
    flops: int
    """Floating-point operations of the model, without the padding of a kernel."""
    nbytes: int
    """Bytes read from and written to device memory."""
    kind: str
    """Kind of operator: gemm, attention, conv, norm, softmax, elementwise, reduction, embedding, optimizer, copy,
    index, random, sort, h2d or d2h (over PCIe), peer (over NVLink), custom or none.
    """
    memory_bound: bool

    def plus(self, other: Cost) -> Cost:
        """Return the cost of this operator followed by *other*; the kind is that of the longer one."""
        longer = self if self.seconds >= other.seconds else other
        return replace(
            longer,
            seconds=self.seconds + other.seconds,
            kernels=self.kernels + other.kernels,
            flops=self.flops + other.flops,
            nbytes=self.nbytes + other.nbytes,
        )


NOTHING = Cost(0.0, 0, 0, 0, "none", False)
"""Cost of a view, which launches no kernel."""


# -- One call of an operator: its arguments by name, and the bytes of its tensors.


def tensors_in(value: Any) -> Iterator[Any]:
    """Yield every tensor in *value*, also inside lists and tuples."""
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
    """An operator with its arguments. Only shapes, strides, dtypes and devices of tensors are used."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        self.func, self.args, self.kwargs, self.result = func, args, kwargs, result
        self.schema = func._schema
        self.name: str = self.schema.name
        """Name of the operator, such as `aten::mm`."""

    def __getitem__(self, name: str) -> Any:
        """Return the argument *name* or its default; None if the operator has no such argument."""
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
        """Return all tensors among the arguments, including those of out=."""
        return (*tensors_in(self.args), *tensors_in(self.kwargs))

    @property
    def outputs(self) -> tuple[Any, ...]:
        """Return the tensors that are written: the results or, without results, the arguments that the schema marks."""
        tensors = tuple(tensors_in(self.result))
        return tensors or self.written

    @property
    def written(self) -> tuple[Any, ...]:
        """Return the arguments that are modified in place, including those of out=."""
        tensors: list[Any] = []
        for argument in self.schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                tensors += tensors_in(self[argument.name])
        return tuple(tensors)

    @property
    def is_view(self) -> bool:
        """Return whether every result is a view of an argument and nothing is written."""
        returns = self.schema.returns
        return bool(returns) and all(each.alias_info is not None and not each.alias_info.is_write for each in returns)

    @property
    def read(self) -> int:
        """Return the bytes that are read if a kernel reads every input once (except tensors that are only in out=)."""
        total = 0
        for argument in self.schema.arguments:
            if not argument.is_out:
                total += nbytes(self[argument.name])
        return total

    @property
    def write(self) -> int:
        """Return the bytes that are written if a kernel writes every output once."""
        return nbytes(self.outputs)
