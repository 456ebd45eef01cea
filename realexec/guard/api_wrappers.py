"""Wrappers of torch.distributed's public functions that send repeated calls to the fast path.

Each wrapper takes the arguments of one function of torch, and splits them into tensors, arguments of the backend and
other options. If an argument has an unusual type, torch's own function gets the call.

Most of torch's functions are a decorator around an inner function in a closure cell. The content of that cell is
exchanged, and the decorator's code is replaced by code that packs no arguments; of functions without a decorator the
code is replaced. So a name that a script imported earlier is wrapped, too, and the public function stays the same
object, by which torch.compile and `P2POp` recognize it.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable
from types import CellType, CodeType, FunctionType, NoneType
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from distsim.realexec.guard.fast_path import MISSED, USUAL, WORLD, Public, coalescing, default_group, learn, through
from distsim.torch_compat import compiler, groups

Backend = groups.BACKEND.get(None)
SEND: Any = getattr(Backend, "send", None)
RECV: Any = getattr(Backend, "recv", None)
function_modes = groups.FUNCTION_MODES.get(groups.unknown)
C10D = vars(c10d)
HIDDEN = "_distsim_"
P2POp = dist.P2POp
RedOpType = type(dist.ReduceOp.SUM)
COLLECTIVE = groups.COLLECTIVE_OP.attribute
ALL_GATHER, REDUCE_SCATTER = "all_gather_single", "reduce_scatter_single"


def posts(name: str, up: int = 1) -> Callable[[Public], Public]:
    """Return the wrapper of `send`, `recv`, `isend` or `irecv`.

    *up* is the number of frames between the wrapper and the caller of the public function.
    """
    later, receives = name.startswith("i"), name.endswith("recv")
    method = RECV if receives else SEND
    by_group = name != "recv"
    """Whether the program may pass the peer as a group rank. `recv` may not take this path then: it returns the
    global rank.
    """

    def way(long: Public) -> Public:
        def post(tensor: Any, peer: Any, group: Any, tag: Any, group_peer: Any) -> Any:
            args = (tensor, peer, group, tag, group_peer)
            if type(tag) is not int or not (type(peer) is int or (by_group and type(group_peer) is int)):
                return long(*args)
            key, tensors = (name, peer, group_peer, tag), (tensor,)
            answer = through(method, key, tensors, ([tensor],), (), group, later, None, up + 2)
            if answer is MISSED:
                return learn(long, args, key, tensors, 1, (), group, later, up + 1)
            return peer if receives and not later else answer

        return post

    return way


def isend(tensor, dst=None, group=None, tag=0, group_dst=None):  # type: ignore[no-untyped-def]
    return _distsim_isend(tensor, dst, group, tag, group_dst)  # type: ignore[name-defined]  # noqa: F821


def irecv(tensor, src=None, group=None, tag=0, group_src=None):  # type: ignore[no-untyped-def]
    return _distsim_irecv(tensor, src, group, tag, group_src)  # type: ignore[name-defined]  # noqa: F821


MESSAGES: dict[str, tuple[Any, Callable[[Public], Public]]] = {
    "isend": (isend, posts("isend")),
    "irecv": (irecv, posts("irecv")),
}
"""Functions without torch's decorator: the replacement code, which calls the module's attribute under `HIDDEN`, and
the wrapper stored there.
"""


if not hasattr(c10d, ALL_GATHER):  # torch 2.11
    ALL_GATHER, REDUCE_SCATTER = "all_gather_into_tensor", "reduce_scatter_tensor"


def _listed(name: str, source: Any, out: Any, op: Any, group: Any, async_op: bool) -> bool:
    """Add a call inside a coalescing block to torch's list like the function *name*; return False if torch has to do
    it.

    The group's own method, which is called at the end of the block, is what is recorded.
    """
    calls = coalescing(USUAL).get(default_group(USUAL) if group is None else group)
    if (
        calls is None
        or C10D[WORLD] is not USUAL
        or async_op is not False
        or type(op) is not (NoneType if name == ALL_GATHER else RedOpType)
        or function_modes()
        or type(source) is not Tensor
        or source.is_complex()
        or (out is not None and (type(out) is not Tensor or out.is_complex()))
    ):
        return False
    calls.append(C10D[COLLECTIVE](C10D[name], source, out, op, None))
    return True


Split = tuple[tuple[Any, ...], tuple[Any, ...], Any, Any, Any]
"""Tensors, arguments of the backend beside its options, what decides the options, the group, async_op."""


def _broadcast(tensor: Any, src: Any, group: Any, async_op: Any, group_src: Any) -> Split | None:
    root = _root(src, group_src)
    return None if root is None else ((tensor,), ([tensor],), root, group, async_op)


def _reduce(tensor: Any, dst: Any, op: Any, group: Any, async_op: Any, group_dst: Any) -> Split | None:
    root = _root(dst, group_dst)
    return None if root is None else ((tensor,), ([tensor],), (*root, op), group, async_op)


def _root(rank: Any, group_rank: Any) -> tuple[Any, ...] | None:
    """Return what distinguishes a root, or None for one that torch may refuse, such as 0.0, which equals 0."""
    if type(rank) is int and group_rank is None:
        return (rank,)
    return (None, group_rank) if rank is None and type(group_rank) is int else None


def _all_gather(tensor_list: Any, tensor: Any, group: Any, async_op: Any) -> Split | None:
    if type(tensor_list) is not list:
        return None
    return (tensor, *tensor_list), ([tensor_list], [tensor]), (), group, async_op


def _all_to_all_single(
    output: Any, input: Any, output_splits: Any, input_splits: Any, group: Any, async_op: Any
) -> Split | None:
    outs, ins = ([] if splits is None else splits for splits in (output_splits, input_splits))
    if type(outs) is not list or type(ins) is not list or not all(type(one) is int for one in (*outs, *ins)):
        return None
    return (output, input), (output, input, outs, ins), (tuple(outs), tuple(ins)), group, async_op


def _barrier(group: Any, async_op: Any, device_ids: Any, timeout: Any) -> Split | None:
    return None if device_ids is not None or timeout is not None else ((), (), (), group, async_op)


def _collective(name: str, backends: str, split: Callable[..., Split | None]) -> Callable[[Public], Public]:
    """Return the wrapper of the public function *name*, for which *backends* is the backend's method."""
    method, is_listed = getattr(Backend, backends, None), name in ("all_reduce", ALL_GATHER, REDUCE_SCATTER)

    def way(long: Public) -> Public:
        def entrance(*args: Any) -> Any:
            parts = split(*args)
            if parts is None:
                return long(*args)
            tensors, lead, options, group, later = parts
            if is_listed and coalescing(USUAL):
                out, op = tensors[0] if len(tensors) > 1 else None, options[0] if options else None
                return None if _listed(name, tensors[-1], out, op, group, later) else long(*args)
            kind = f"{name} async" if later else name
            answer = through(method, kind, tensors, lead, options, group, later)
            if answer is MISSED:
                return learn(long, args, kind, tensors, len(lead), options, group, later)
            return answer

        return entrance

    return way


def _batch(long: Public) -> Public:
    """Return the wrapper of `batch_isend_irecv`, which posts each message as `isend` or `irecv` would.

    Lists with unusual elements are passed to torch's function *long*.
    """
    longs: list[Any] = [getattr(C10D.get(HIDDEN + name), "long", None) for name in ("isend", "irecv")]
    if None in longs:
        return long  # this torch writes them otherwise
    isend, irecv = (posts(name, 2)(one) for name, one in zip(("isend", "irecv"), longs, strict=True))

    def batch_isend_irecv(p2p_op_list: Any) -> Any:
        if type(p2p_op_list) is not list or not p2p_op_list or getattr(p2p_op_list[0], "group", None) is None:
            return long(p2p_op_list)
        group, sends, receives = p2p_op_list[0].group, C10D["isend"], C10D["irecv"]
        if getattr(group, "fast", None) is None:
            return long(p2p_op_list)
        for one in p2p_op_list:
            if type(one) is not P2POp or one.group is not group or type(one.tag) is not int:
                return long(p2p_op_list)
            if one.op is not sends and one.op is not receives:
                return long(p2p_op_list)
        works = []
        for one in p2p_op_list:
            post = isend if one.op is sends else irecv
            work = post(one.tensor, None, group, one.tag, one.group_peer)
            if work is not None:
                works.append(work)
        return works

    return batch_isend_irecv


def batch_isend_irecv(p2p_op_list):  # type: ignore[no-untyped-def]
    return _distsim_batch_isend_irecv(p2p_op_list)  # type: ignore[name-defined]  # noqa: F821


LOGGER, MESSAGE = groups.LOGGER.attribute, groups.LOG_MESSAGE.attribute
SPLITS = "output_split_sizes, input_split_sizes"
WAYS: dict[str, tuple[str, Callable[[Public], Public]]] = {
    "all_reduce": (
        "tensor, op, group, async_op",
        _collective("all_reduce", "allreduce", lambda t, op, group, later: ((t,), ([t],), (op,), group, later)),
    ),
    "broadcast": ("tensor, src, group, async_op, group_src", _collective("broadcast", "broadcast", _broadcast)),
    "reduce": ("tensor, dst, op, group, async_op, group_dst", _collective("reduce", "reduce", _reduce)),
    "all_gather": ("tensor_list, tensor, group, async_op", _collective("all_gather", "allgather", _all_gather)),
    ALL_GATHER: (
        "output_tensor, input_tensor, group, async_op",
        _collective(
            ALL_GATHER,
            groups.BACKEND_NAMES["all_gather_single"],
            lambda out, t, group, later: ((out, t), (out, t), (), group, later),
        ),
    ),
    REDUCE_SCATTER: (
        "output, input, op, group, async_op",
        _collective(
            REDUCE_SCATTER,
            groups.BACKEND_NAMES["reduce_scatter_single"],
            lambda out, t, op, group, later: ((out, t), (out, t), (op,), group, later),
        ),
    ),
    "all_to_all_single": (
        f"output, input, {SPLITS}, group, async_op",
        _collective("all_to_all_single", groups.BACKEND_NAMES["all_to_all_single"], _all_to_all_single),
    ),
    "barrier": ("group, async_op, device_ids, timeout", _collective("barrier", "barrier", _barrier)),
    "send": ("tensor, dst, group, tag, group_dst", posts("send")),
    "recv": ("tensor, src, group, tag, group_src", posts("recv")),
}
"""Functions with torch's decorator: their parameters, and the wrapper."""
BARE = {**MESSAGES, "batch_isend_irecv": (batch_isend_irecv, _batch)}


# torch's asks for the group only if it was given by name; one that it does not know any more (or never did) must not
# put another error in the place of this one.
FRONT = """
def decorated(func):
    def {name}({parameters}):
        try:
            return func({parameters})
        except Exception as error:
            try:
                said = {message}("{name}", group=group)
            except Exception:
                said = {{"func_name": "{name}"}}
            {logger}.debug({{**said, "error": str(error)}})
            raise
    return {name}
"""


class Shortcuts:
    """Installs the wrappers inside torch's public functions, and removes them."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def install(self) -> None:
        if not (groups.DEFAULT_GROUP.exists() and groups.COALESCING.exists() and groups.COLLECTIVE_OP.exists()):
            return  # a torch that keeps them elsewhere: the long way does everything
        for name, (parameters, way) in WAYS.items():
            public, ours = getattr(c10d, name), _front(name, parameters)
            long: Any = getattr(public, "__wrapped__", None)
            torch_code = getattr(public, "__code__", None)
            if (  # else this torch decorates or asks otherwise, or the program has put its own there
                type(torch_code) is CodeType
                and torch_code.co_freevars == ours.co_freevars
                and {LOGGER, MESSAGE} <= public.__globals__.keys()
                and _takes(long, ours)
            ):
                cell = public.__closure__[0]
                self._undo += [_code_back(public, torch_code, None), _put_back(cell, cell.cell_contents)]
                cell.cell_contents = _opaque(way(long))
                public.__code__, public.__defaults__ = ours, long.__defaults__
        for name, (bare, way) in BARE.items():
            public, ours = getattr(c10d, name), bare.__code__
            torch_code = getattr(public, "__code__", None)
            if type(torch_code) is CodeType and _takes(public, ours) and not torch_code.co_freevars:
                long = FunctionType(torch_code, vars(c10d), name, public.__defaults__)
                entrance = _opaque(way(long))
                entrance.long = long
                setattr(c10d, HIDDEN + name, entrance)
                public.__code__ = ours
                self._undo.append(_code_back(public, torch_code, public.__defaults__))

    def remove(self) -> None:
        while self._undo:
            self._undo.pop()()


def _front(name: str, parameters: str) -> CodeType:
    """Return code that replaces torch's decorator and takes its arguments one by one.

    It logs errors as torch's decorator does. Packing and unpacking the arguments would cost two microseconds with
    cold caches.
    """
    namespace: dict[str, Any] = {}
    source, file = FRONT.format(name=name, parameters=parameters, logger=LOGGER, message=MESSAGE), f"{__file__}:{name}"
    exec(compile(source, file, "exec"), namespace)
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file  # for tracebacks
    code: CodeType = namespace["decorated"](None).__code__
    return code


def _opaque(entrance: Any) -> Any:
    """Mark a function so that torch.compile calls it and does not trace into it (see `session.leave_uncompiled`)."""
    setattr(entrance, compiler.DISABLED, True)
    return entrance


def _put_back(cell: CellType, original: Any) -> Callable[[], None]:
    def undo() -> None:
        cell.cell_contents = original

    return undo


def _takes(function: Any, ours: CodeType) -> bool:
    """Return whether a function of torch has the same parameters as ours."""
    code = getattr(function, "__code__", None)
    return type(code) is CodeType and code.co_varnames[: code.co_argcount] == ours.co_varnames[: ours.co_argcount]


def _code_back(public: Any, original: Any, defaults: Any) -> Callable[[], None]:
    def undo() -> None:
        public.__code__, public.__defaults__ = original, defaults
        # What is just running keeps the name: a thread may be between our code and the entrance.

    return undo
