"""Calls that torch's backends refuse: the error's type is the backend's (torch 2.13), and a sentence says why."""

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

_PLAIN_TYPES = frozenset(
    {
        torch.uint8,
        torch.int8,
        torch.int32,
        torch.int64,
        torch.float32,
        torch.float64,
        torch.bool,
        torch.complex64,
        torch.complex128,
    }
)
TYPES = {"gloo": _PLAIN_TYPES | {torch.float16, torch.bfloat16}, "mpi": _PLAIN_TYPES | {torch.int16}}
"""Dtypes that a backend of CPU tensors moves; those of MPI as in `distsim/mpi/group.py`."""
_AS_REAL = frozenset(
    {
        "all_reduce",
        "all_reduce_coalesced",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "reduce_scatter_tensor_coalesced",
    }
)
"""Operations whose complex numbers torch passes to gloo as pairs of reals; for all others only torch.distributed
does.
"""
_BY_TYPE = frozenset(
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
_DENSE = (_BY_TYPE - {"all_gather_into_tensor_coalesced"}) | {
    *("all_reduce_coalesced", "broadcast", "reduce", "scatter", "reduce_scatter", "reduce_scatter_tensor")
}
"""Operations for which torch's dispatcher has no kernel for sparse tensors."""


def refuse(call: MethodCall, flavour: str) -> RuntimeError | None:
    """Raise the backend's error for these dtypes, devices and reduction.

    Return the error if gloo finds it in its own thread, so that an asynchronous call reports it through its handle.
    """
    op, number, tensors = call.key[0], call.key[4], (*call.inputs, *call.outputs)
    for tensor in tensors:
        if not (tensor.is_cpu or tensor.is_meta or tensor.is_cuda):
            raise NotSimulated(f"{op} on {tensor.device.type} tensors", "use CPU tensors and backend 'gloo'")
    if flavour == "nccl" and tensors and tensors[0].is_cuda:
        for tensor in tensors:
            _refuse_as_nccl(tensor)
    elif op in P2P:
        _refuse_message(call, tensors, flavour)
    elif tensors:
        return _refuse_on_host(call, flavour, tensors[0], None if number is None else REDUCE_OPS[number])
    return None


def _refuse_as_nccl(tensor: Tensor) -> None:
    """Raise NCCL's errors (ProcessGroupNCCL.cpp: `check_gpu_single_tensor`, `getNcclDataType`)."""
    if not tensor.is_cuda or tensor.is_sparse:
        raise ValueError("Tensors must be CUDA and dense")
    if not tensor.is_contiguous(memory_format=torch.preserve_format) and not tensor.is_contiguous():
        raise ValueError("Tensors must be contiguous")
    if tensor.dtype in (torch.int16, torch.complex32):
        raise TypeError(f"NCCL does not support {tensor.dtype} tensors")


def _refuse_message(call: MethodCall, tensors: Sequence[Tensor], flavour: str) -> None:
    if call.tag < 0:
        raise RuntimeError("Tag must be nonnegative")
    if any(tensor.layout is not torch.strided for tensor in tensors):
        raise NotImplementedError(f"{call.key[0]} of sparse tensors")
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise RuntimeError("input tensor has to be contiguous")
    if call.key[0] == "recv" and call.peer < 0 and flavour != "mpi" and not tensors[0].numel():
        raise RuntimeError("gloo receives no empty tensor from any rank")


def _refuse_on_host(call: MethodCall, flavour: str, first: Tensor, reduction: str | None) -> RuntimeError | None:
    op, backend = call.key[0], "mpi" if flavour == "mpi" else "gloo"
    if op == "all_reduce" and first.is_sparse and reduction != "SUM":
        raise RuntimeError("all_reduce of sparse tensors only works with ReduceOp.SUM")
    why = None
    if not _moves(op, first.dtype, backend) or not _reduces(first.dtype, reduction, backend):
        by = "" if reduction is None else f" with ReduceOp.{reduction}"
        why = f"{backend} does not support {op} of {first.dtype} tensors{by}"
    elif op == "all_gather" and backend == "gloo" and any(t.requires_grad and t.is_leaf for t in call.outputs):
        why = "a leaf Variable that requires grad is being used in an in-place operation."
    if why is not None and (backend == "mpi" or not call.is_async):
        raise RuntimeError(why)
    return None if why is None else RuntimeError(why)


def _moves(op: str, dtype: torch.dtype, backend: str) -> bool:
    if backend == "gloo" and dtype.is_complex and op in _BY_TYPE:
        return False
    return dtype in TYPES[backend] or (backend == "gloo" and dtype is torch.complex32 and op in _AS_REAL)


def _reduces(dtype: torch.dtype, reduction: str | None, backend: str) -> bool:
    """Return whether a backend has a reduction for numbers of *dtype*; MPI has four, and no order of complex ones."""
    if reduction is None:
        return True
    if backend == "mpi":
        return reduction in ("SUM", "PRODUCT") or (reduction in ("MIN", "MAX") and not dtype.is_complex)
    if dtype.is_complex:
        return reduction in ("SUM", "AVG")
    if dtype.is_floating_point:
        return reduction not in ("BAND", "BOR", "BXOR", "PREMUL_SUM")
    return reduction not in ("AVG", "PREMUL_SUM")


def refuse_arguments(call: MethodCall, rank: int, size: int, flavour: str) -> None:
    """Raise what gloo raises at *rank* of the group for lists and sizes that do not fit, or a root that is none.
    *flavour*: the backend."""
    op, inputs, outputs = call.key[0], call.inputs, call.outputs
    if op in _DENSE and not inputs and not outputs and "coalesced" in op:
        raise NotImplementedError(f"{op} of no tensors")
    if op in _DENSE and any(tensors and tensors[0].is_sparse for tensors in (inputs, outputs)):
        raise NotImplementedError(f"{op} of sparse tensors")
    if FIELDS[op].rooted and call.key[5] is None:
        root = getattr(call.opts, "rootRank", call.opts)
        raise RuntimeError(f"{op}: invalid root rank: {root}, in a group of {size}")
    refuse = _ARGUMENTS.get(op)
    if refuse is not None:
        refuse(call, rank, size, flavour)


def _one_tensor(call: MethodCall, rank: int, size: int, flavour: str) -> None:
    if len(call.inputs) != 1:
        raise ValueError(f"{call.key[0]} requires a single tensor, got {len(call.inputs)}")


def _lists(call: MethodCall, rank: int, size: int, flavour: str) -> None:
    """Check a list with a tensor for each member; of gather and scatter only the root has one."""
    op, many, few = call.key[0], call.inputs, call.outputs
    if op in ("all_gather", "gather"):
        many, few = few, many
    if op == "all_gather" and flavour == "nccl" and len({tensor.shape for tensor in many}) > 1:
        raise NotSimulated(
            "all_gather of tensors that differ in size",
            "pad them to one size, or use all_to_all_single with output_split_sizes",
        )
    if FIELDS[op].rooted and (getattr(call.opts, "rootRank", call.opts) or 0) != rank:
        if many:
            raise RuntimeError(f"{op}: only the root gives a list of tensors")
        return
    if len(few) != 1:
        raise ValueError(f"{op} requires a single tensor, got {len(few)}")
    _one_for_each(op, many, few[0], size)


def _one_for_each(op: str, tensors: Sequence[Tensor], like: Tensor, size: int) -> None:
    if len(tensors) != size:
        raise RuntimeError(
            f"{op}: expected a list of {size} tensors, one for each member of the group, got {len(tensors)}"
        )
    for i, tensor in enumerate(tensors):
        if tensor.shape != like.shape or (tensor.dtype != like.dtype and op != "reduce_scatter"):
            expected, got = (f"{t.dtype} of shape {tuple(t.shape)}" for t in (like, tensor))
            raise RuntimeError(f"{op}: expected {expected} at index {i} of the list, got {got}")


def _coalesced_gather(call: MethodCall, rank: int, size: int, flavour: str) -> None:
    for output, given in zip(call.outputs, call.inputs, strict=False):
        part = output.chunk(size)[0] if output.dim() else output
        if not output.is_cuda and part.shape != given.shape:
            shapes = f"{size} times {tuple(given.shape)}, got {tuple(output.shape)}"
            raise RuntimeError(f"{call.key[0]}: expected an output of {shapes}")


def _into_tensor(call: MethodCall, rank: int, size: int, flavour: str) -> None:
    """Check all_gather_into_tensor and reduce_scatter_tensor: one tensor is *size* times as large as the other."""
    op, large, small = call.key[0], call.inputs[0], call.outputs[0]
    gathers = op == "all_gather_into_tensor"
    if gathers:
        large, small = small, large
    if large.dtype != small.dtype:
        raise RuntimeError(f"{op}: expected tensors of one dtype, got {large.dtype} and {small.dtype}")
    if large.is_cuda:  # ProcessGroupNCCL.cpp, `_allgather_base` and `_reduce_scatter_base`: shapes do not matter
        if large.numel() != size * small.numel():
            raise ValueError(f"{op}: expected {size} times {small.numel()} elements, got {large.numel()}")
    elif gathers:
        _one_for_each(op, large.chunk(size) if large.dim() else (large,), small, size)
    elif not small.dim():
        raise NotSimulated("reduce_scatter_tensor into a tensor without dimensions", "gloo ends the process of it")
    elif _rows(large) != size * _rows(small):
        raise RuntimeError(f"{op}: expected {size} times {_rows(small)} rows, got {_rows(large)}")


def _all_to_all(call: MethodCall, rank: int, size: int, flavour: str) -> None:
    for tensors in (call.inputs, call.outputs):
        if len(tensors) != size:
            raise RuntimeError(f"all_to_all: expected lists of {size} tensors, got {len(tensors)}")
        if flavour != "mpi":  # MPI_Alltoallv: to each as much as it is for
            _one_for_each("all_to_all", tensors, tensors[0], size)


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
    **dict.fromkeys(("all_reduce", "broadcast", "reduce"), _one_tensor),
    **dict.fromkeys(("all_gather", "gather", "scatter", "reduce_scatter"), _lists),
    **dict.fromkeys(("all_gather_into_tensor", "reduce_scatter_tensor"), _into_tensor),
    "all_gather_into_tensor_coalesced": _coalesced_gather,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
}
"""For each operation the check of its tensors, for a rank in a group of a size with a backend."""


def argument_error(method: str) -> TypeError:
    """Return pybind's error for arguments that a method of torch's group does not take."""
    forms = getattr(dist.ProcessGroup, method).__doc__
    return TypeError(
        f"{method}(): incompatible function arguments. The following argument types are supported:\n{forms}"
    )


def refuse_peer(op: str, peer: int, rank: int, size: int) -> None:
    """Raise what gloo raises for the other end of a message; both by their rank in the group."""
    if peer == rank:
        raise RuntimeError(f"{op}: a rank cannot {op} to or from itself (rank {peer})")
    if not 0 <= peer < size:
        raise RuntimeError(f"{op}: peer {peer} is out of range for a group of {size}")


def _splits(tensor: Tensor, splits: Sequence[int], size: int) -> None:
    if not splits:
        even_shares(tensor, size)
    elif len(splits) != size:
        raise RuntimeError("Number of tensor splits not equal to group size")
    elif sum(splits) != _rows(tensor):
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
