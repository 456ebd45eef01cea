"""Writes the execution trace of one simulated rank, in the schema of torch's ExecutionTraceObserver.

torch's own observer is one for the whole process, and knows neither ranks nor simulated collectives. Nodes are the
operators below composite ones, the program's `record_function` labels, and each call of torch.distributed.

Source of the schema: torch/csrc/profiler/standalone/execution_trace_observer.cpp, and pytorch/pytorch#124674 for the
attributes of communication nodes.
"""

from __future__ import annotations

import gzip
import json
import os
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from distsim.debug.records import CallRecord
from distsim.sim.c10d.group_api import c10d_arguments
from distsim.sim.isolation.process import current_task

SCHEMA = "1.1.1-chakra.0.0.4"
PROCESS, THREAD = (f"[pytorch|profiler|execution_trace|{name}]" for name in ("process", "thread"))
OPERATOR_SCOPE, USER_SCOPE = 0, 7
"""at::RecordScope::FUNCTION and USER_SCOPE."""
_COLLECTIVES = {
    "all_reduce": "allreduce",
    "all_reduce_coalesced": "allreduce_coalesced",
    "all_gather_into_tensor": "_allgather_base",
    "all_gather_into_tensor_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_tensor": "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "all_to_all",
}
"""Names in communication nodes that differ from torch's public ones (ProcessGroupNCCL.cpp)."""
_CPP = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.int64: "long int",
    torch.int32: "int",
    torch.int16: "short int",
    torch.int8: "signed char",
    torch.uint8: "unsigned char",
    torch.bool: "bool",
}
"""C++ names of dtypes; other dtypes have their Python names."""
_SCALAR_TYPES = {
    "float32": "Float",
    "float64": "Double",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "int64": "Long",
    "int32": "Int",
    "int16": "Short",
    "int8": "Char",
    "uint8": "Byte",
    "bool": "Bool",
}
"""c10::ScalarType's names of dtypes."""
TITLES = {
    "gloo": {
        "all_reduce_coalesced": "all_reduce",
        "all_gather_coalesced": "all_gather",
        "all_gather_into_tensor": "all_gather",
        "all_gather_into_tensor_coalesced": "all_gather",
        "reduce_scatter": "all_reduce",
        "reduce_scatter_tensor": "all_reduce",
        "reduce_scatter_tensor_coalesced": "all_reduce",
        "all_to_all_single": "all_to_all",
    },
    "nccl": {
        "all_gather_into_tensor": "_all_gather_base",
        "reduce_scatter_tensor": "_reduce_scatter_base",
        "all_to_all_single": "all_to_all",
    },
}
"""Names of a backend's work if they differ from torch's (ProcessGroupGloo.cpp, ProcessGroupNCCL.cpp)."""
_SIMPLE = {bool: "Bool", int: "Int", float: "Double", str: "String", type(None): "None"}


class ExecutionTrace:
    """Collects nodes between `start` and `stop` of one observer."""

    def __init__(self, path: str, observer: Any) -> None:
        self._path, self.observer = path, observer
        self._nodes: list[dict[str, Any]] = []
        self._begun = time.strftime("%Y-%m-%d %H:%M:%S")
        self._began_s = 0.0
        self._threads: dict[str, list[int]] = {}
        """Nodes that are open in each thread, the outermost first."""
        self._objects: dict[tuple[str, int], int] = {}
        """Numbers of tensors and storages, by kind and identity."""
        self._alive: list[Any] = []
        """Tensors with a number: an identity is not used again while they live."""
        self._next = 2
        self.is_active = False

    def start(self) -> None:
        """Begin to collect."""
        task = current_task()
        self.is_active, self._began_s = True, 0.0 if task is None else task.now_s()

    # -- what happens

    def ran(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Record an operator. A detach is left out, because below a dispatch mode torch calls it on each new tensor."""
        if self.is_active and func is not torch.ops.aten.detach.default:
            name = str(getattr(func, "overloadpacket", func)).replace(".", "::", 1)
            schema = str(getattr(func, "_schema", ""))
            self._add(name, [*args, *kwargs.values()], [] if result is None else [result], OPERATOR_SCOPE, schema)

    def called(self, record: CallRecord, operator: str, backend: str, tensors: Sequence[Sequence[Tensor]]) -> None:
        """Record a call of torch.distributed: *operator* of c10d, carried out by *backend*."""
        if not self.is_active:
            return
        inputs, outputs = (list(part) for part in tensors)
        call = self._add(f"c10d::{operator}", c10d_arguments(operator, inputs, outputs), [outputs], OPERATOR_SCOPE)
        work = f"{backend}:{TITLES.get(backend, {}).get(record.op, record.op)}"
        if not inputs and record.op == "recv":
            inputs = outputs
        if backend == "nccl":
            name = _COLLECTIVES.get(record.op, record.op)
            arguments = [
                inputs,
                [record.seq, record.is_p2p],
                [record.group.name, record.group.description],
                record.rank,
                name,
            ]
            comms = self._add("record_param_comms", arguments, [outputs], OPERATOR_SCOPE, under=call)
            self._nodes[-1]["attrs"] += _comms_attributes(record, name, inputs, outputs)
            self._add(work, inputs, [], USER_SCOPE, under=comms)
        else:
            self._add(work, inputs, [], USER_SCOPE, under=call)

    def enter(self, name: str) -> None:
        """Start a label of the program; following entries are below it."""
        if self.is_active:
            self._open().append(self._add(name, [], [], USER_SCOPE))

    def leave(self) -> None:
        """End the innermost label."""
        if self.is_active and len(self._open()) > 1:
            self._open().pop()

    def write(self) -> None:
        """Write the file."""
        process = {"id": 1, "name": PROCESS, "ctrl_deps": 1, **_values([], []), "attrs": _attributes(0, USER_SCOPE, 0)}
        task = current_task()
        document = {
            "schema": SCHEMA,
            "pid": os.getpid(),
            "time": self._begun,
            "start_ts": round(self._began_s * 1e6),
            "nodes": [*self._nodes, process],
            "finish_ts": round((self._began_s if task is None else task.now_s()) * 1e6),
        }
        opened = gzip.open if self._path.endswith(".gz") else open
        with opened(self._path, "wt", encoding="utf-8") as file:
            json.dump(document, file)
        self._alive.clear()

    # -- nodes

    def _open(self) -> list[int]:
        """Return the nodes that are open in this thread; its own node is the first."""
        task = current_task()
        thread = "MainThread" if task is None else task.name
        if thread not in self._threads:
            self._threads[thread] = []
            number = self._add(THREAD, [], [], USER_SCOPE, under=1, thread=len(self._threads))
            self._threads[thread].append(number)
        return self._threads[thread]

    def _add(
        self,
        name: str,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        scope: int,
        schema: str = "",
        under: int | None = None,
        thread: int | None = None,
    ) -> int:
        if under is None:
            under = self._open()[-1]
        if thread is None:
            task = current_task()
            thread = 1 + list(self._threads).index("MainThread" if task is None else task.name)
        texts = [[self._value(value) for value in part] for part in (inputs, outputs)]
        number, self._next = self._next, self._next + 1
        attributes = _attributes(number - 2, scope, thread, schema)
        self._nodes.append({"id": number, "name": name, "ctrl_deps": under, **_values(*texts), "attrs": attributes})
        return number

    def _value(self, value: Any) -> tuple[Any, Any, str, Any]:
        """Return a value as in a node: itself, its shape, type and strides."""
        if isinstance(value, Tensor):
            kind = f"Tensor({_CPP.get(value.dtype, str(value.dtype).removeprefix('torch.'))})"
            if value.layout is not torch.strided:
                return self._named(value, 0, 0), list(value.shape), kind, []
            numbers = self._named(value, value.storage_offset(), self._number("storage", value.untyped_storage()))
            return numbers, list(value.shape), kind, list(value.stride())
        if isinstance(value, list | tuple):
            parts = [self._value(part) for part in value]
            kinds = ",".join(kind for _, _, kind, _ in parts)
            return [p[0] for p in parts], [p[1] for p in parts], f"GenericList[{kinds}]", [p[3] for p in parts]
        kind = _SIMPLE.get(type(value), "Object")
        return "<None>" if value is None else value if kind != "Object" else "<Object>", [], kind, []

    def _named(self, tensor: Tensor, offset: int, storage: int) -> list[Any]:
        return [
            self._number("tensor", tensor),
            storage,
            offset,
            tensor.numel(),
            tensor.element_size(),
            str(tensor.device),
        ]

    def _number(self, kind: str, thing: Any) -> int:
        key = (kind, id(thing) if kind == "tensor" else thing._cdata)
        if key not in self._objects:
            self._alive.append(thing)
            self._objects[key], self._next = self._next, self._next + 1
        return self._objects[key]


def _values(inputs: Sequence[Any], outputs: Sequence[Any]) -> dict[str, Any]:
    names = ("values", "shapes", "types", "strides")
    return {
        key: {name: [value[index] for value in part] for index, name in enumerate(names)}
        for key, part in (("inputs", inputs), ("outputs", outputs))
    }


def _attributes(number: int, scope: int, thread: int, schema: str = "") -> list[dict[str, Any]]:
    numbers = {"rf_id": number, "fw_parent": 0, "seq_id": -1, "scope": scope, "tid": thread, "fw_tid": 0}
    texts = {"op_schema": schema, "kernel_backend": "", "kernel_file": "", "tensor_range": ""}
    return [
        *({"name": k, "type": "int64" if k == "seq_id" else "uint64", "value": v} for k, v in numbers.items()),
        *({"name": name, "type": "string", "value": value} for name, value in texts.items()),
    ]


def _comms_attributes(record: CallRecord, name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Any:
    """Return the attributes of a communication node: elements, splits, and the ranks of the group as start and step."""
    ranks = record.group.ranks
    steps = {after - before for before, after in pairwise(ranks)}
    dtype = record.dtypes[0] if record.dtypes else ""
    texts = {
        "collective_name": name,
        "dtype": _SCALAR_TYPES.get(dtype, dtype),
        "in_split_size": str(list(record.input_splits or ())),
        "out_split_size": str(list(record.output_splits or ())),
        "pg_name": record.group.name,
        "pg_desc": record.group.description,
    }
    numbers = {
        "in_msg_nelems": sum(tensor.numel() for tensor in inputs),
        "out_msg_nelems": sum(tensor.numel() for tensor in outputs),
        "global_rank_start": ranks[0],
        "global_rank_stride": steps.pop() if len(steps) == 1 else 0,
        "pg_size": len(ranks),
    }
    return [
        *({"name": key, "type": "string", "value": value} for key, value in texts.items()),
        *({"name": key, "type": "uint64", "value": value} for key, value in numbers.items()),
    ]
