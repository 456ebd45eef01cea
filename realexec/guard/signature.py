"""What a process group's method was asked to do, read from its C++ arguments.

A *describer* answers a `Call` whose `key` is cheap to build and to hash (shapes, dtype, numbers): it
runs on every call. `content` spells a key out for the record; it runs once for each new key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

__all__ = ["DESCRIBERS", "METHODS", "Call", "content"]


class Call(NamedTuple):
    """One call, as far as the hot path needs it."""

    key: tuple[Any, ...]
    """(op, input shapes, output shapes, dtype, reduce op number, root, input splits, output splits, device)."""
    is_async: bool
    first: torch.Tensor | None
    """The first tensor: its device decides which backend serves the call."""
    direct: bool
    """The arguments are as c10d passes them (lists and an options object), so a backend takes them as they are."""
    peer: int = -1
    """Global rank of the other end; -1: none, or any."""
    tag: int = 0


Ranks = Sequence[int]
Describer = Callable[[Ranks, tuple[Any, ...], dict[str, Any]], Call]

PAIRWISE = frozenset(
    {
        "all_to_all",
        "all_to_all_single",
        "all_gather",
        "all_gather_coalesced",
        "gather",
        "scatter",
        "reduce_scatter",
    }
)
"""Operations for which equal signatures on all ranks are no proof that they fit together."""

_REDUCE_OPS: dict[int, str] = {}


def _reduce_op_name(number: int) -> str:
    if not _REDUCE_OPS:
        for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"):
            op = getattr(dist.ReduceOp, name, None)
            if op is not None:
                _REDUCE_OPS[int(op)] = name
    return _REDUCE_OPS.get(number, str(number))


def content(key: tuple[Any, ...]) -> tuple[dict[str, Any], bool]:
    """A key for the record, without what is empty, and whether its operation is `PAIRWISE`."""
    op, inputs, outputs, dtype, reduce_op, root, input_splits, output_splits, device = key
    said: dict[str, Any] = {"op": op}
    if inputs:
        said["in"] = [list(shape) for shape in inputs]
    if outputs:
        said["out"] = [list(shape) for shape in outputs]
    if dtype is not None:
        said["dtype"] = str(dtype).removeprefix("torch.")
        size = dtype.itemsize
        # nccl-tests' size: the whole buffer where one rank's part differs from it.
        total = max(sum(prod(shape) for shape in inputs), sum(prod(shape) for shape in outputs))
        said["bytes"] = total * size
    if reduce_op is not None:
        said["reduce"] = _reduce_op_name(reduce_op)
    if root is not None:
        said["root"] = root
    if input_splits:
        said["isplit"] = list(input_splits)
    if output_splits:
        said["osplit"] = list(output_splits)
    if device is not None and device.type != "cpu":
        said["device"] = str(device)
    return said, op in PAIRWISE


# The arguments -------------------------------------------------------------------------------


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, *names: str) -> Any:
    if len(args) > position:
        return args[position]
    for name in names:
        if name in kwargs:
            return kwargs[name]
    return None


def _list(tensors: Any) -> Sequence[torch.Tensor]:
    return (tensors,) if isinstance(tensors, torch.Tensor) else tensors


def _flat(lists: Any) -> Sequence[torch.Tensor]:
    if len(lists) == 1 and not isinstance(lists[0], torch.Tensor):
        return lists[0]  # type: ignore[no-any-return]
    return [tensor for part in lists for tensor in ((part,) if isinstance(part, torch.Tensor) else part)]


def _shapes(tensors: Sequence[torch.Tensor]) -> tuple[torch.Size, ...]:
    if len(tensors) == 1:
        return (tensors[0].shape,)
    return tuple([tensor.shape for tensor in tensors])


def _reduce_op(opts: Any) -> int:
    if opts is None:
        return 0
    return hash(getattr(opts, "reduceOp", opts))


def _call(key: tuple[Any, ...], opts: Any, first: torch.Tensor | None) -> Call:
    is_async = getattr(opts, "asyncOp", None)
    return Call(key, is_async is not False, first, is_async is not None)


def _root(ranks: Ranks, opts: Any) -> int:
    return ranks[getattr(opts, "rootRank", opts) or 0]


def _allreduce(op: str) -> Describer:
    def describe(ranks: Ranks, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        tensors = _list(args[0] if args else kwargs["tensors"])
        opts = _argument(args, kwargs, 1, "opts", "op")
        first = tensors[0]
        key = (op, _shapes(tensors), (), first.dtype, _reduce_op(opts), None, None, None, first.device)
        return _call(key, opts, first)

    return describe


def _broadcast(ranks: Ranks, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    tensors = _list(args[0] if args else kwargs["tensors"])
    opts = _argument(args, kwargs, 1, "opts", "root")
    first = tensors[0]
    key = ("broadcast", _shapes(tensors), (), first.dtype, None, _root(ranks, opts), None, None, first.device)
    return _call(key, opts, first)


def _reduce(ranks: Ranks, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    tensors = _list(args[0] if args else kwargs["tensors"])
    opts = _argument(args, kwargs, 1, "opts", "root")
    op = _reduce_op(opts) if hasattr(opts, "reduceOp") else _reduce_op(_argument(args, kwargs, 2, "op"))
    first = tensors[0]
    key = ("reduce", _shapes(tensors), (), first.dtype, op, _root(ranks, opts), None, None, first.device)
    return _call(key, opts, first)


def _out_in(op: str, reducing: bool = False, rooted: bool = False) -> Describer:
    """Methods that take (outputs, inputs, opts), each a tensor, a list, or a list of lists."""

    def describe(ranks: Ranks, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        outputs = _argument(
            args,
            kwargs,
            0,
            "output_tensors",
            "output",
            "outputTensor",
            "outputTensors",
            "output_lists",
            "output_tensor",
        )
        inputs = _argument(
            args,
            kwargs,
            1,
            "input_tensors",
            "input",
            "inputTensor",
            "inputTensors",
            "input_list",
            "input_tensor",
        )
        opts = _argument(args, kwargs, 2, "opts", "root")
        outs = (outputs,) if isinstance(outputs, torch.Tensor) else _flat(outputs) if outputs else ()
        ins = (inputs,) if isinstance(inputs, torch.Tensor) else _flat(inputs) if inputs else ()
        first = (ins or outs)[0]
        key = (
            op,
            _shapes(ins),
            _shapes(outs),
            first.dtype,
            _reduce_op(opts) if reducing else None,
            _root(ranks, opts) if rooted else None,
            None,
            None,
            first.device,
        )
        return _call(key, opts, first)

    return describe


def _all_to_all_single(ranks: Ranks, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    output = _argument(args, kwargs, 0, "output_tensor", "output")
    source = _argument(args, kwargs, 1, "input_tensor", "input")
    output_splits = _argument(args, kwargs, 2, "output_split_sizes") or ()
    input_splits = _argument(args, kwargs, 3, "input_split_sizes") or ()
    opts = _argument(args, kwargs, 4, "opts")
    key = (
        "all_to_all_single",
        (source.shape,),
        (output.shape,),
        source.dtype,
        None,
        None,
        tuple(input_splits),
        tuple(output_splits),
        source.device,
    )
    return _call(key, opts, source)


def _send(ranks: Ranks, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    return _to_or_from("send", ranks[_argument(args, kwargs, 1, "dstRank")], 2, args, kwargs)


def _recv(ranks: Ranks, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    return _to_or_from("recv", ranks[_argument(args, kwargs, 1, "srcRank")], 2, args, kwargs)


def _recv_anysource(ranks: Ranks, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    return _to_or_from("recv", -1, 1, args, kwargs)


def _to_or_from(op: str, peer: int, tag_at: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    first = _list(_argument(args, kwargs, 0, "tensors"))[0]
    shapes = ((first.shape,), ()) if op == "send" else ((), (first.shape,))
    key = (op, *shapes, first.dtype, None, None, None, None, first.device)
    return Call(key, True, first, len(args) == tag_at + 1, peer, _argument(args, kwargs, tag_at, "tag") or 0)


_BARRIER = ("barrier", (), (), None, None, None, None, None, None)
_MONITORED_BARRIER = ("monitored_barrier", (), (), None, None, None, None, None, None)


def _barrier(ranks: Ranks, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    return _call(_BARRIER, _argument(args, kwargs, 0, "opts"), None)


def _monitored_barrier(ranks: Ranks, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    return Call(_MONITORED_BARRIER, False, None, False)


DESCRIBERS: dict[str, Describer] = {
    "all_reduce": _allreduce("all_reduce"),
    "all_reduce_coalesced": _allreduce("all_reduce_coalesced"),
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_gather": _out_in("all_gather"),
    "all_gather_into_tensor": _out_in("all_gather_into_tensor"),
    "all_gather_coalesced": _out_in("all_gather_coalesced"),
    "all_gather_into_tensor_coalesced": _out_in("all_gather_into_tensor_coalesced"),
    "gather": _out_in("gather", rooted=True),
    "scatter": _out_in("scatter", rooted=True),
    "reduce_scatter": _out_in("reduce_scatter", reducing=True),
    "reduce_scatter_tensor": _out_in("reduce_scatter_tensor", reducing=True),
    "reduce_scatter_tensor_coalesced": _out_in("reduce_scatter_tensor_coalesced", reducing=True),
    "all_to_all": _out_in("all_to_all"),
    "all_to_all_single": _all_to_all_single,
    "send": _send,
    "recv": _recv,
    "recv_anysource": _recv_anysource,
    "barrier": _barrier,
    "monitored_barrier": _monitored_barrier,
}
"""By operation."""

METHODS: dict[str, str] = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "allgather": "all_gather",
    "all_gather_single": "all_gather_into_tensor",
    "_allgather_base": "all_gather_into_tensor",
    "allgather_coalesced": "all_gather_coalesced",
    "all_gather_single_coalesced": "all_gather_into_tensor_coalesced",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor_coalesced",
    "gather": "gather",
    "scatter": "scatter",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor_coalesced",
    "alltoall": "all_to_all",
    "all_to_all_single": "all_to_all_single",
    "alltoall_base": "all_to_all_single",
    "send": "send",
    "recv": "recv",
    "recv_anysource": "recv_anysource",
    "barrier": "barrier",
    "monitored_barrier": "monitored_barrier",
}
"""Every method of torch's ProcessGroup that moves data, in the names of torch 2.11 and of 2.13 (which
renamed the `_base` forms and kept the old names beside them), and the operation it is."""
