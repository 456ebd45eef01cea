"""Kineto's words for our calls: how PyTorch's profiler, Holistic Trace Analysis and NCCL name them.

Names of collectives and arguments: torch/csrc/distributed/c10d/ParamCommsUtils.hpp and Kineto's
`NcclMetadata`; kernels: NCCL's src/device/generate.py, which builds one kernel a function, named
after RING_LL whatever algorithm and protocol then run inside it.
"""

from __future__ import annotations

from math import prod
from typing import Any

from distsim.debug.records import CallRecord
from distsim.debug.records.arguments import FIELDS

__all__ = ["call_name", "collective_args", "is_kernel", "kernel_name"]

_COLLECTIVE_NAMES = {
    "all_reduce": "allreduce",
    "all_reduce_coalesced": "allreduce_coalesced",
    "all_gather": "allgather",
    "all_gather_into_tensor": "_allgather_base",
    "all_gather_coalesced": "allgather_coalesced",
    "all_gather_into_tensor_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_tensor": "_reduce_scatter_base",
    "all_to_all_single": "all_to_all",
}
_KERNELS = {
    "all_reduce": "AllReduce",
    "all_reduce_coalesced": "AllReduce",
    "barrier": "AllReduce",
    "broadcast": "Broadcast",
    "reduce": "Reduce",
    "all_gather": "AllGather",
    "all_gather_into_tensor": "AllGather",
    "all_gather_coalesced": "AllGather",
    "all_gather_into_tensor_coalesced": "AllGather",
    "reduce_scatter": "ReduceScatter",
    "reduce_scatter_tensor": "ReduceScatter",
    "reduce_scatter_tensor_coalesced": "ReduceScatter",
    "all_to_all": "SendRecv",
    "all_to_all_single": "SendRecv",
    "gather": "SendRecv",
    "scatter": "SendRecv",
    "send": "SendRecv",
    "recv": "SendRecv",
}
_REDUCING = {"AllReduce", "Reduce", "ReduceScatter"}
_REDUCE_OPS = {"SUM": "Sum", "AVG": "Sum", "PRODUCT": "Prod", "MIN": "MinMax", "MAX": "MinMax"}
_REDUCE_OPS["PREMUL_SUM"] = "PreMulSum"
_KERNEL_DTYPES = {
    "float16": "f16",
    "bfloat16": "bf16",
    "float32": "f32",
    "float64": "f64",
    "int32": "i32",
    "int64": "i64",
    "int8": "i8",
    "uint8": "u8",
    "bool": "u8",
}
_SCALAR_TYPES = {
    "float16": "Half",
    "bfloat16": "BFloat16",
    "float32": "Float",
    "float64": "Double",
    "int8": "Char",
    "uint8": "Byte",
    "int16": "Short",
    "int32": "Int",
    "int64": "Long",
    "bool": "Bool",
    "complex64": "ComplexFloat",
    "complex128": "ComplexDouble",
}


def call_name(record: CallRecord) -> str:
    """Return the name of the call on the host."""
    return f"c10d::{record.op}"


def is_kernel(record: CallRecord) -> bool:
    """Return whether the call moves data on a device's stream, unlike new_group."""
    return record.op in _KERNELS


def kernel_name(record: CallRecord) -> str:
    """`ncclDevKernel_AllReduce_Sum_f32_RING_LL`."""
    function = _KERNELS[record.op]
    if function == "SendRecv":
        return "ncclDevKernel_SendRecv"
    if function not in _REDUCING:
        return f"ncclDevKernel_{function}_RING_LL"
    reduce_op = _REDUCE_OPS.get(record.reduce_op or "SUM", "Sum")
    dtype = _KERNEL_DTYPES.get(record.dtypes[0], "i8") if record.dtypes else "i8"
    return f"ncclDevKernel_{function}_{reduce_op}_{dtype}_RING_LL"


def collective_args(record: CallRecord, stream: int) -> dict[str, Any]:
    """The arguments Kineto gives a communication kernel, then distsim's own."""
    fields = FIELDS.get(record.op)
    in_place = fields is not None and fields.in_place
    args: dict[str, Any] = {
        "Collective name": _COLLECTIVE_NAMES.get(record.op, record.op),
        "dtype": _SCALAR_TYPES.get(record.dtypes[0], record.dtypes[0]) if record.dtypes else "",
        "In msg nelems": _elements(record.input_shapes),
        "Out msg nelems": _elements(record.input_shapes if in_place else record.output_shapes),
        "In split size": str(list(record.input_splits or ())),
        "Out split size": str(list(record.output_splits or ())),
        "Group size": len(record.group.ranks),
        "Process Group Name": record.group.name,
        "Process Group Description": record.group.description,
        "Process Group Ranks": str(list(record.group.ranks)),
        "Rank": record.rank,
        "Src Rank": _source(record),
        "Dst Rank": _destination(record),
        "Seq": record.seq,
        "stream": stream,
        "device": record.rank,
        "State": record.state.value,
    }
    if record.reduce_op is not None:
        args["Reduce op"] = record.reduce_op
    if record.tag is not None:
        args["Tag"] = record.tag
    if record.site is not None:
        args["Call site"] = str(record.site)
    if record.error is not None:
        args["Error"] = record.error
    return args


def _elements(shapes: tuple[tuple[int, ...], ...]) -> int:
    return sum(prod(shape) for shape in shapes)


def _source(record: CallRecord) -> int:
    """-1 is Kineto's word for none."""
    end = {"send": record.rank, "recv": record.peer}.get(record.op, record.root)
    return -1 if end is None or record.op in ("reduce", "gather") else end


def _destination(record: CallRecord) -> int:
    end = {"send": record.peer, "recv": record.rank}.get(record.op, record.root)
    return -1 if end is None or record.op in ("broadcast", "scatter") else end
