"""Tensors as MPI sees them: memory and datatype; and torch's reductions as MPI's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from distsim.realexec.mpi.library import mpi

__all__ = ["buffer", "operation", "spread"]

_NAMES = {
    torch.uint8: "UINT8_T",
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.bool: "C_BOOL",
    torch.complex64: "C_FLOAT_COMPLEX",
    torch.complex128: "C_DOUBLE_COMPLEX",
}
"""MPI has no half precision."""
_OPERATIONS = {"SUM": "SUM", "PRODUCT": "PROD", "MIN": "MIN", "MAX": "MAX"}
"""torch's ProcessGroupMPI.cpp, `mpiOp`."""
_LOGICAL = {"SUM": "LOR", "MAX": "LOR", "PRODUCT": "LAND", "MIN": "LAND"}


def buffer(tensor: Tensor) -> list[Any]:
    """[memory, datatype] of a contiguous tensor on the host; RuntimeError where MPI can not have it. mpi4py counts the
    elements, and shares them out where each rank has a part."""
    _refuse(tensor)
    library = mpi()
    memory = library.memory.fromaddress(tensor.data_ptr(), tensor.numel() * tensor.element_size())
    return [memory, getattr(library, _NAMES[tensor.dtype])]


def spread(tensor: Tensor, counts: list[int]) -> list[Any]:
    """[memory, (elements a rank, where each begins), datatype]: *tensor*'s rows in the order of the ranks."""
    memory, kind = buffer(tensor)
    begins = [sum(counts[:rank]) for rank in range(len(counts))]
    return [memory, (counts, begins), kind]


def _refuse(tensor: Tensor) -> None:
    if not tensor.is_cpu:
        raise RuntimeError(f"backend 'mpi': tensors of the host are expected, this one is on {tensor.device}")
    if tensor.layout is not torch.strided:
        raise RuntimeError("input tensor has to be dense")
    if not tensor.is_contiguous():
        raise RuntimeError("input tensor has to be contiguous")
    if tensor.dtype not in _NAMES:
        raise RuntimeError(f"MPI process group does not support {tensor.dtype} tensors")


def operation(op: Any, tensor: Tensor) -> Any:
    """MPI's reduction for torch's on this tensor; RuntimeError where MPI has none."""
    name = ReduceOp.RedOpType(op.op if isinstance(op, ReduceOp) else op).name
    known = _LOGICAL if tensor.dtype is torch.bool else _OPERATIONS
    if name not in known or (tensor.is_complex() and name in ("MIN", "MAX")):
        raise RuntimeError(f"MPI process group does not support ReduceOp.{name} on {tensor.dtype} tensors")
    return getattr(mpi(), known[name])
