"""Calls that torch's backends refuse, with their error types and words (torch 2.13, gloo on CPU).

The words were taken from real gloo groups of two ranks; tests/conformance compares simulator and gloo.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from distsim.debug.records import P2P
from distsim.debug.records.arguments import FIELDS, MethodCall
from distsim.debug.records.signature import REDUCE_OPS
from distsim.errors import NotSimulated
from distsim.torch_compat.groups import HOOK_OP_NAME

__all__ = [
    "argument_error",
    "even_shares",
    "refuse",
    "refuse_arguments",
    "refuse_peer",
]

_GLOO_TYPES = frozenset(
    {
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
        torch.bool,
        torch.complex64,
        torch.complex128,
    }
)
_MPI_TYPES = frozenset(
    {
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float32,
        torch.float64,
        torch.bool,
        torch.complex64,
        torch.complex128,
    }
)
"""Dtypes that MPI supports, as in `realexec/mpi/group.py`: ProcessGroupMPI.cpp maps the first seven."""
_SCATTERS = ("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced")
_LISTS = frozenset(
    {
        "all_gather",
        "all_gather_coalesced",
        "all_gather_into_tensor",
        "all_gather_into_tensor_coalesced",
        "all_to_all",
        "all_to_all_single",
        "gather",
    }
)
"""Operations that gloo moves by data type, and for which it has no complex numbers."""
_BITWISE = frozenset({"BAND", "BOR", "BXOR"})


def refuse(call: MethodCall, flavour: str) -> RuntimeError | None:
    """Raise the backend's error for these dtypes, devices and reduction.

    Return the error if gloo finds it in its own thread, so that an asynchronous call reports it through its handle.
    """
    op, number, tensors = call.key[0], call.key[4], (*call.inputs, *call.outputs)
    for tensor in tensors:
        if not (tensor.is_cpu or tensor.is_meta or tensor.is_cuda):
            raise NotSimulated(f"{op} on {tensor.device.type} tensors", "use CPU tensors and backend 'gloo'")
    if flavour == "nccl" and tensors and tensors[0].is_cuda:
        _refuse_as_nccl(op, tensors)
        return None
    if op in P2P:
        if call.tag < 0:
            raise RuntimeError("Tag must be nonnegative")
        if any(t.layout is not torch.strided for t in tensors):
            raise NotImplementedError("Could not run 'c10d::send' with arguments from the 'SparseCPU' backend")
        if not all(t.is_contiguous() for t in tensors):
            raise RuntimeError("input tensor has to be contiguous")
        if op == "recv" and call.peer < 0 and flavour != "mpi" and not tensors[0].numel():
            raise RuntimeError(
                "[enforce fail at ../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:184] "
                "offset < this->size. 0 vs 0"
            )
        return None
    if not tensors:
        return None
    dtype, name = tensors[0].dtype, None if number is None else REDUCE_OPS[number]
    if op == "all_reduce" and tensors[0].is_sparse and name != "SUM":
        problem = "unsupported reduction operation (allreduce of sparse tensors only works with ReduceOp.SUM)"
        raise RuntimeError(f"ProcessGroupGloo::allreduce: {problem}")
    if flavour == "mpi":
        _refuse_as_mpi(dtype, name)
        return None
    why = _refused_by_gloo(op, dtype, name, number)
    if why is None and op == "all_gather" and any(t.requires_grad and t.is_leaf for t in call.outputs):
        why = "a leaf Variable that requires grad is being used in an in-place operation."  # whatever this thread says
    if why is not None and not call.is_async:
        raise RuntimeError(why)
    return None if why is None else RuntimeError(why)


_AS_REAL = frozenset({"all_reduce", "all_reduce_coalesced", "reduce", *_SCATTERS})
"""Operations whose complex numbers torch passes to gloo as pairs of reals; for all others only torch.distributed
does.
"""


def _refused_by_gloo(op: str, dtype: torch.dtype, name: str | None, number: int | None) -> str | None:
    if dtype not in _GLOO_TYPES and not (dtype is torch.complex32 and op in _AS_REAL):
        return "Invalid scalar type"
    if dtype.is_complex and op in _LISTS:
        return "Invalid scalar type"
    if name is None:
        return None
    if name == "PREMUL_SUM":
        return "Cannot use ReduceOp.PREMUL_SUM with Gloo"
    if dtype.is_complex and name not in ("SUM", "AVG"):
        assert number is not None
        shown = chr(number)  # torch prints the enum's number as a character
        return f"{'reduce' if op == 'reduce' else 'all_reduce'} does not support{shown}on complex tensors"
    floating = dtype.is_floating_point or dtype.is_complex
    if name in _BITWISE and floating:
        return f"Cannot use ReduceOp.{name} with non-integral dtype"
    if name == "AVG" and not floating:
        named = {
            torch.int8: "Char",
            torch.uint8: "Byte",
            torch.int32: "Int",
            torch.int64: "Long",
            torch.bool: "Bool",
        }
        return f"result type Float can't be cast to the desired output type {named[dtype]}"
    return None


def _refuse_as_nccl(op: str, tensors: Sequence[Tensor]) -> None:
    """Raise NCCL's errors (ProcessGroupNCCL.cpp: `check_gpu_single_tensor`, `getNcclDataType`)."""
    for tensor in tensors:
        if not tensor.is_cuda or tensor.is_sparse:
            raise ValueError("Tensors must be CUDA and dense")
        if not tensor.is_contiguous(memory_format=torch.preserve_format) and not tensor.is_contiguous():
            raise ValueError("Tensors must be contiguous")
        if tensor.dtype in (torch.int16, torch.complex32):
            raise TypeError(f"Input tensor data type is not supported for NCCL process group: {_scalar(tensor.dtype)}")


def _scalar(dtype: torch.dtype) -> str:
    return {torch.int16: "Short", torch.complex32: "ComplexHalf"}[dtype]


def _refuse_as_mpi(dtype: torch.dtype, name: str | None) -> None:
    """Raise MPI's errors: it has no half precision, only four operations (ProcessGroupMPI.cpp), and no order of
    complex numbers.
    """
    if dtype not in _MPI_TYPES:
        raise RuntimeError(f"MPI process group does not support {dtype} tensors")
    if name not in (None, "SUM", "PRODUCT", "MIN", "MAX") or (dtype.is_complex and name in ("MIN", "MAX")):
        raise RuntimeError(f"MPI process group does not support ReduceOp.{name} on {dtype} tensors")


def refuse_arguments(call: MethodCall, rank: int, size: int, flavour: str) -> None:
    """Raise what gloo raises at *rank* of the group for lists and sizes that do not fit, or a root that is none.
    *flavour*: the backend."""
    op, inputs, outputs = call.key[0], call.inputs, call.outputs
    _dispatched(op, inputs, outputs)
    if FIELDS[op].rooted and call.key[5] is None:
        root = getattr(call.opts, "rootRank", call.opts)
        raise RuntimeError(f"ProcessGroupGloo::{op}: invalid root rank: {root}")
    refuse = _ARGUMENTS.get(op)
    if refuse is not None:
        refuse(call, rank, size, flavour)


def _one_tensor(call: MethodCall, rank: int, size: int, flavour: str) -> None:
    _single(call.key[0].replace("_", ""), call.inputs)


def _all_gather(call: MethodCall, rank: int, size: int, flavour: str) -> None:
    if flavour == "nccl" and len({tensor.shape for tensor in call.outputs}) > 1:
        raise NotSimulated(
            "all_gather of tensors that differ in size",
            "pad them to one size, or use all_to_all_single with output_split_sizes",
        )
    _equal_lists("allgather", call.outputs, call.inputs, size)


def _all_gather_into_tensors(call: MethodCall, rank: int, size: int, flavour: str) -> None:
    for i, (output, given) in enumerate(zip(call.outputs, call.inputs, strict=False)):
        part = output.chunk(size)[0] if output.dim() else output
        if not output.is_cuda and part.shape != given.shape:
            raise RuntimeError(
                "ProcessGroupGloo::allgather_coalesced: invalid size of output tensor at index "
                f"{i} (expected length {_size(given)}, got {_size(part)})"
            )


def _all_gather_into_tensor(call: MethodCall, rank: int, size: int, flavour: str) -> None:
    _scaled("all_gather", call.outputs[0], call.inputs[0], size)


def _reduce_scatter(call: MethodCall, rank: int, size: int, flavour: str) -> None:
    _reduce_scatter_lists(call.inputs, call.outputs[0], size)


def _reduce_scatter_tensor(call: MethodCall, rank: int, size: int, flavour: str) -> None:
    _scaled("reduce_scatter", call.inputs[0], call.outputs[0], size)


def _gather(call: MethodCall, rank: int, size: int, flavour: str) -> None:
    if not _is_root(call, rank):
        if call.outputs:
            raise RuntimeError("ProcessGroupGloo::gather: requires empty output on non-root")
        return
    if len(call.outputs) != size:
        raise RuntimeError(
            f"ProcessGroupGloo::gather: Incorrect output list size {len(call.outputs)}. "
            f"Output list size should be {size}, same as size of the process group."
        )
    _equal_lists("gather", call.outputs, call.inputs, size)


def _scatter(call: MethodCall, rank: int, size: int, flavour: str) -> None:
    if _is_root(call, rank):
        _scatter_lists(call.inputs, call.outputs[0], size)
    elif call.inputs:
        raise RuntimeError("ProcessGroupGloo::scatter: requires empty input on non-root")


def _all_to_all(call: MethodCall, rank: int, size: int, flavour: str) -> None:
    for kind, tensors in (("input", call.inputs), ("output", call.outputs)):
        if len(tensors) != size:
            raise RuntimeError(
                f"ProcessGroupGloo::alltoall: {kind} tensor list size {len(tensors)} does not match world size {size}"
            )
        if flavour != "mpi":  # MPI_Alltoallv: to each as much as it is for
            _equal_lists("alltoall", tensors, tensors[:1], size)


def _all_to_all_single(call: MethodCall, rank: int, size: int, flavour: str) -> None:
    sent, received = call.inputs[0], call.outputs[0]
    if flavour != "nccl" and not sent.is_contiguous():
        raise ValueError("Tensors must be contiguous")
    if flavour in ("gloo", "sim") and not call.key[6] and not call.key[7]:
        _even_elements(sent, received, size)
        return
    _splits(sent, call.key[6], size)
    _splits(received, call.key[7], size)


_ARGUMENTS: dict[str, Callable[[MethodCall, int, int, str], None]] = {
    "all_reduce": _one_tensor,
    "broadcast": _one_tensor,
    "reduce": _one_tensor,
    "all_gather": _all_gather,
    "all_gather_into_tensor_coalesced": _all_gather_into_tensors,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
}
"""For each operation the check of its tensors, for a rank in a group of a size with a backend."""


_IN_TORCH = {
    "all_reduce_coalesced": "allreduce_coalesced_",
    "broadcast": "broadcast_",
    "reduce": "reduce_",
    "all_gather": "allgather_",
    "all_gather_coalesced": "allgather_coalesced_",
    "all_gather_into_tensor": "_allgather_base_",
    "gather": "gather_",
    "scatter": "scatter_",
    "reduce_scatter": "reduce_scatter_",
    "reduce_scatter_tensor": "_reduce_scatter_base_",
    "all_to_all": "alltoall_",
    "all_to_all_single": "alltoall_base_",
}
"""The operators of torch's dispatcher that have no kernel for sparse tensors, and ask a tensor which they are for."""


def _dispatched(op: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    name = _IN_TORCH.get(op)
    if name and not inputs and not outputs and "coalesced" in op:
        raise NotImplementedError(
            "There were no tensor arguments to this function (e.g., you passed an empty list of Tensors), "
            f"but no fallback function is registered for schema c10d::{name}."
        )
    for tensors in (inputs, outputs):
        if name and tensors and tensors[0].is_sparse:
            raise NotImplementedError(f"Could not run 'c10d::{name}' with arguments from the 'SparseCPU' backend.")


def _is_root(call: MethodCall, rank: int) -> bool:
    return bool((getattr(call.opts, "rootRank", call.opts) or 0) == rank)


def argument_error(method: str) -> TypeError:
    """Return pybind's error for arguments that a method of torch's group does not take."""
    forms = getattr(dist.ProcessGroup, method).__doc__
    return TypeError(
        f"{method}(): incompatible function arguments. The following argument types are supported:\n{forms}"
    )


def refuse_peer(op: str, peer: int, rank: int, size: int) -> None:
    """Raise what gloo raises for the other end of a message; both by their rank in the group."""
    if peer == rank:
        raise RuntimeError(f"ProcessGroupGloo::{op}: a rank cannot {op} to or from itself (rank {peer})")
    if not 0 <= peer < size:
        raise RuntimeError(f"ProcessGroupGloo::{op}: peer {peer} is out of range for a group of {size}")


def _single(op: str, tensors: Sequence[Tensor]) -> None:
    if len(tensors) != 1:
        raise ValueError(f"ProcessGroupGloo::{op}: requires a single tensor")


def _equal_lists(op: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor], size: int) -> None:
    """Check the lists of all_gather and gather: *size* outputs like the one input."""
    _single(op, inputs)
    if len(outputs) != size:
        raise RuntimeError(
            f"ProcessGroupGloo::{op}: invalid output tensor list at index 0 "
            f"(expected length {size}, got {len(outputs)})"
        )
    want = inputs[0]
    for i, tensor in enumerate(outputs):
        if tensor.shape != want.shape:
            raise RuntimeError(
                f"ProcessGroupGloo::{op}: invalid tensor size at index {i} "
                f"(expected {_size(want)}, got {_size(tensor)})"
            )
        if tensor.dtype != want.dtype:
            raise RuntimeError(
                f"ProcessGroupGloo::{op}: invalid tensor type at index {i} (expected {want.dtype}, got {tensor.dtype})"
            )


def _scatter_lists(inputs: Sequence[Tensor], output: Tensor, size: int) -> None:
    if len(inputs) != size:
        raise RuntimeError(
            f"ProcessGroupGloo::scatter: Incorrect input list size {len(inputs)}. "
            f"Input list size should be {size}, same as size of the process group."
        )
    for i, tensor in enumerate(inputs):
        if tensor.shape != output.shape:
            raise RuntimeError(
                f"ProcessGroupGloo::scatter: invalid tensor size at index {i} "
                f"(expected {_size(output)}, got {_size(tensor)})"
            )
        if tensor.dtype != output.dtype:
            raise RuntimeError(
                f"ProcessGroupGloo::scatter: invalid tensor type at index {i} "
                f"(expected {output.dtype}, got {tensor.dtype})"
            )


def _reduce_scatter_lists(inputs: Sequence[Tensor], output: Tensor, size: int) -> None:
    if len(inputs) != size:
        raise RuntimeError("invalid input tensor list size, must be world size")
    for tensor in inputs:
        if tensor.shape != output.shape:
            raise RuntimeError(
                "Check failed: outputs[0].sizes().vec() == inputs[0][i].sizes().vec() "
                f"({', '.join(map(str, output.shape))} vs. {', '.join(map(str, tensor.shape))})."
            )


def _scaled(op: str, large: Tensor, small: Tensor, size: int) -> None:
    """Check all_gather_into_tensor and reduce_scatter_tensor: *large* must be *size* times as large as *small*."""
    if large.dtype != small.dtype:
        raise RuntimeError(
            f"ProcessGroupGloo::{op}: invalid tensor type at index 0 (expected {small.dtype}, got {large.dtype})"
        )
    if large.is_cuda:  # ProcessGroupNCCL.cpp, `_allgather_base` and `_reduce_scatter_base`: shapes do not matter
        if large.numel() != size * small.numel():
            raise ValueError(
                "output tensor size must be equal to world_size times input tensor size"
                if op == "all_gather"
                else "input tensor must be the same size as output size times world size"
            )
        return
    if op == "reduce_scatter":
        if not small.dim():
            raise NotSimulated("reduce_scatter_tensor into a tensor without dimensions", "gloo ends the process of it")
        if (large.shape[0] if large.dim() else 1) != size * (small.shape[0] if small.dim() else 1):
            rows, have = size * (small.shape[0] if small.dim() else 1), large.shape[0] if large.dim() else 1
            raise RuntimeError(f"Check failed: outputShape[0] * worldSize == inputShape[0] ({rows} vs. {have}).")
        return
    parts = large.chunk(size) if large.dim() else (large,)
    _equal_lists("allgather", parts, [small], size)


def _splits(tensor: Tensor, splits: Sequence[int], size: int) -> None:
    if not splits:
        even_shares(tensor, size)
        return
    if len(splits) != size:
        raise RuntimeError("Number of tensor splits not equal to group size")
    if sum(splits) != _rows(tensor):
        raise RuntimeError("Split sizes doesn't match total dim 0 size")


def _even_elements(given: Tensor, output: Tensor, size: int) -> None:
    """Raise an error for an uneven division of elements.

    gloo divides the memory regardless of rows, and reads a remainder from beyond it. Since torch 2.14, whole rows
    are required.
    """
    if not HOOK_OP_NAME.exists() and given.numel() == output.numel() and _rows(given) % size:
        if given.numel() % size:
            raise NotSimulated(
                f"all_to_all_single of {given.numel()} elements among {size} ranks",
                "gloo reads beyond its memory: give it as much for each rank",
            )
        return
    _splits(given, (), size)
    _splits(output, (), size)


def even_shares(tensor: Tensor, size: int) -> tuple[int, ...]:
    """Return the rows that each of *size* members receives (or sends) if the program gives no splits."""
    rows = _rows(tensor)
    if rows % size:
        raise RuntimeError("Tensor's dim 0 does not divide equally across group size")
    return (rows // size,) * size


def _rows(tensor: Tensor) -> int:
    return int(tensor.shape[0]) if tensor.dim() else 1


def _size(tensor: Tensor) -> str:
    return "(" + ", ".join(map(str, tensor.shape)) + ")"
