"""Wrappers of torch.distributed's public functions that send repeated calls to the fast path.

Each wrapper takes the arguments of one function of torch, and splits them into tensors, arguments of the backend and
other options. If an argument has an unusual type, torch's own function gets the call.

Most of torch's functions are a decorator around an inner function in a closure cell. The content of that cell is
exchanged, and the decorator's code is replaced by code that packs no arguments; of functions without a decorator the
code is replaced. So a name that a script imported earlier is wrapped, too, and the public function stays the same
object, by which torch.compile and `P2POp` recognize it.

Messages have a fast path of their own, `posts`: `fast_path.through` for one tensor and one peer, written as one
function. A message of a few bytes costs gloo a third of a collective, so each Python call and list would be
noticeable.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable
from sys import _getframe as frame_above
from sys import exception as exception_on_its_way
from threading import get_ident
from time import monotonic_ns
from types import CellType, CodeType, FunctionType, NoneType
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from distsim.debug.rings import layout as rings
from distsim.realexec.guard.fast_path import (
    COUNT,
    FEW,
    MISSED,
    USUAL,
    WORLD,
    Public,
    coalescing,
    default_group,
    find,
    learn,
    pack,
    through,
)
from distsim.realexec.guard.group import BACKEND_NAMES
from distsim.realexec.guard.handle import MessageHandle
from distsim.text.tracebacks import error_line
from distsim.torch_compat import compiler, groups

__all__ = ["Shortcuts"]

Backend = groups.BACKEND.get(None)
SEND: Any = getattr(Backend, "send", None)
RECV: Any = getattr(Backend, "recv", None)
dispatch_modes, function_modes = groups.DISPATCH_MODES.get(groups.unknown), groups.FUNCTION_MODES.get(groups.unknown)
profiler_enabled = groups.PROFILES.get(groups.unknown)
C10D = vars(c10d)
FIRST, RECORDS, EACH = rings.RECORDS_AT // 8, rings.RECORDS, rings.RECORD_WORDS
FLAGS, ENDED = rings.WORD_FLAGS, rings.WORD_COMPLETED
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
    method, above = RECV if receives else SEND, up + 1
    by_group = name != "recv"
    """Whether the program may pass the peer as a group rank. `recv` may not take this path then: it returns the
    global rank.
    """

    def way(long: Public) -> Public:
        def post(tensor: Any, peer: Any, group: Any, tag: Any, group_peer: Any) -> Any:
            if type(tag) is not int or not (type(peer) is int or (by_group and type(group_peer) is int)):
                return long(tensor, peer, group, tag, group_peer)
            world = C10D[WORLD]
            if world is not USUAL:
                return long(tensor, peer, group, tag, group_peer)
            guard = default_group(world) if group is None else group
            fast = getattr(guard, "fast", None)
            key = (name, peer, group_peer, tag)
            seen: Any = None
            if fast is not None and not coalescing(world):
                try:
                    caller = frame_above(above)  # who called the public function
                except ValueError:
                    return long(tensor, peer, group, tag, group_peer)
                log = guard.group_log
                before = log.before
                seen = before.next
                if (
                    seen.what == key
                    and seen.at == caller.f_lasti
                    and seen.code is caller.f_code
                    and not getattr(tensor, "is_nested", True)
                    and seen.alike(tensor)
                    and seen.thread == get_ident()
                ):
                    frame: Any = caller
                    for code, position in seen.steps:
                        frame = frame.f_back
                        if frame is None or frame.f_code is not code or frame.f_lasti != position:
                            seen = find(log, key, (tensor,), (), caller)
                            break
                    else:
                        if frame.f_trace is not seen.mark:
                            seen = find(log, key, (tensor,), (), caller)
                else:
                    seen = find(log, key, (tensor,), (), caller)
            recorder = None if seen is None else guard.recorder
            if (
                recorder is None  # not known, or the guard was taken off
                or log.busy
                or log.last is not None
                or seen.expires <= (ring := recorder.ring).payload_end
                or exception_on_its_way() is not None
                or function_modes()
                or dispatch_modes()
                or profiler_enabled()
            ):
                args = (tensor, peer, group, tag, group_peer)
                return learn(long, args, key, (tensor,), 1, (), group, later, above)
            before.next = log.before = seen
            made_call = seen.made
            ordinal = made_call[0] = made_call[0] + 1
            index = next(ring.numbers)
            word, words = FIRST + index % RECORDS * EACH, ring.words
            first, second = seen.same
            pack(ring.buffer, word * 8, 0, monotonic_ns(), first, next(log.p2p), second, ordinal)
            words[word] = words[COUNT] = index + 1
            if len(recorder.outstanding) > FEW:
                recorder.poll()
            strict = guard.strict
            shown = None if strict is None else strict.messages.again(guard, seen, ordinal, index, tensor)
            try:
                work = method(fast, [tensor], *seen.tail)
            except BaseException as error:
                recorder.not_issued(log, seen.end, index, error_line(error))
                raise
            if later:
                handle: MessageHandle = MessageHandle() if shown is None else strict.messages.handle(shown)
                handle._inner = work
                handle._group_log = log
                handle._index = index
                handle._word = word
                handle._touched = not seen.owned
                return handle
            try:
                if shown is None:
                    work.wait()
                else:
                    strict.messages.wait(work.wait, *shown, index)
            except BaseException as error:
                ring.fail(index, error_line(error))
                raise
            if words[word] == index + 1:
                words[word + ENDED] = monotonic_ns()
                words[word + FLAGS] = seen.done
            return peer if receives else None

        # The interpreter keeps what it learns of a function with its code: each of the four has its own.
        post.__code__ = post.__code__.replace(co_name=name)
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


def _backends(name: str) -> Any:
    return getattr(Backend, BACKEND_NAMES.get(name, name), None)


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


def _all_reduce(long: Public) -> Public:
    method = _backends("allreduce")

    def all_reduce(tensor: Any, op: Any, group: Any, async_op: bool) -> Any:
        if coalescing(USUAL):
            if _listed("all_reduce", tensor, None, op, group, async_op):
                return None
            return long(tensor, op, group, async_op)
        kind = "all_reduce async" if async_op else "all_reduce"
        answer = through(method, kind, (tensor,), ([tensor],), (op,), group, async_op)
        if answer is MISSED:
            return learn(long, (tensor, op, group, async_op), kind, (tensor,), 1, (op,), group, async_op)
        return answer

    return all_reduce


def _broadcast(long: Public) -> Public:
    method = _backends("broadcast")

    def broadcast(tensor: Any, src: Any, group: Any, async_op: bool, group_src: Any) -> Any:
        kind = "broadcast async" if async_op else "broadcast"
        if type(src) is int and group_src is None:
            options: Any = src  # one number takes no more than the tuple for two would
        elif src is None and type(group_src) is int:
            options = (None, group_src)
        else:
            return long(tensor, src, group, async_op, group_src)  # 0.0 equals 0, and torch refuses it
        answer = through(method, kind, (tensor,), ([tensor],), options, group, async_op)
        if answer is MISSED:
            return learn(long, (tensor, src, group, async_op, group_src), kind, (tensor,), 1, options, group, async_op)
        return answer

    return broadcast


def _reduce(long: Public) -> Public:
    method = _backends("reduce")

    def reduce(tensor: Any, dst: Any, op: Any, group: Any, async_op: bool, group_dst: Any) -> Any:
        kind = "reduce async" if async_op else "reduce"
        if type(dst) is int and group_dst is None:
            options: Any = (dst, op)
        elif dst is None and type(group_dst) is int:
            options = (None, op, group_dst)
        else:
            return long(tensor, dst, op, group, async_op, group_dst)
        answer = through(method, kind, (tensor,), ([tensor],), options, group, async_op)
        if answer is MISSED:
            return learn(
                long, (tensor, dst, op, group, async_op, group_dst), kind, (tensor,), 1, options, group, async_op
            )
        return answer

    return reduce


def _all_gather(long: Public) -> Public:
    method = _backends("allgather")

    def all_gather(tensor_list: Any, tensor: Any, group: Any, async_op: bool) -> Any:
        if type(tensor_list) is not list:
            return long(tensor_list, tensor, group, async_op)
        kind = "all_gather async" if async_op else "all_gather"
        tensors = (tensor, *tensor_list)
        answer = through(method, kind, tensors, ([tensor_list], [tensor]), (), group, async_op)
        if answer is MISSED:
            return learn(long, (tensor_list, tensor, group, async_op), kind, tensors, 2, (), group, async_op)
        return answer

    return all_gather


def _all_gather_single(long: Public) -> Public:
    method = _backends("all_gather_single")

    def all_gather_single(output_tensor: Any, input_tensor: Any, group: Any, async_op: bool) -> Any:
        if coalescing(USUAL):
            if _listed(ALL_GATHER, input_tensor, output_tensor, None, group, async_op):
                return None
            return long(output_tensor, input_tensor, group, async_op)
        both = (output_tensor, input_tensor)
        kind = "all_gather_single async" if async_op else "all_gather_single"
        answer = through(method, kind, both, both, (), group, async_op)
        if answer is MISSED:
            return learn(long, (output_tensor, input_tensor, group, async_op), kind, both, 2, (), group, async_op)
        return answer

    return all_gather_single


def _reduce_scatter_single(long: Public) -> Public:
    method = _backends("reduce_scatter_single")

    def reduce_scatter_single(output: Any, input: Any, op: Any, group: Any, async_op: bool) -> Any:
        if coalescing(USUAL):
            if _listed(REDUCE_SCATTER, input, output, op, group, async_op):
                return None
            return long(output, input, op, group, async_op)
        both = (output, input)
        kind = "reduce_scatter_single async" if async_op else "reduce_scatter_single"
        answer = through(method, kind, both, both, (op,), group, async_op)
        if answer is MISSED:
            return learn(long, (output, input, op, group, async_op), kind, both, 2, (op,), group, async_op)
        return answer

    return reduce_scatter_single


def _all_to_all_single(long: Public) -> Public:
    method = _backends("all_to_all_single")

    def all_to_all_single(
        output: Any, input: Any, output_split_sizes: Any, input_split_sizes: Any, group: Any, async_op: bool
    ) -> Any:
        args = (output, input, output_split_sizes, input_split_sizes, group, async_op)
        outs = [] if output_split_sizes is None else output_split_sizes
        ins = [] if input_split_sizes is None else input_split_sizes
        if type(outs) is not list or type(ins) is not list or not all(type(one) is int for one in (*outs, *ins)):
            return long(*args)
        kind = "all_to_all_single async" if async_op else "all_to_all_single"
        both, options = (output, input), (tuple(outs), tuple(ins))
        answer = through(method, kind, both, (output, input, outs, ins), options, group, async_op)
        return learn(long, args, kind, both, 4, options, group, async_op) if answer is MISSED else answer

    return all_to_all_single


def _barrier(long: Public) -> Public:
    method = _backends("barrier")

    def barrier(group: Any, async_op: bool, device_ids: Any, timeout: Any) -> Any:
        if device_ids is not None or timeout is not None:
            return long(group, async_op, device_ids, timeout)
        kind = "barrier async" if async_op else "barrier"
        answer = through(method, kind, (), (), (), group, async_op)
        if answer is MISSED:
            return learn(long, (group, async_op, device_ids, timeout), kind, (), 0, (), group, async_op)
        return answer

    return barrier


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
    "all_reduce": ("tensor, op, group, async_op", _all_reduce),
    "broadcast": ("tensor, src, group, async_op, group_src", _broadcast),
    "reduce": ("tensor, dst, op, group, async_op, group_dst", _reduce),
    "all_gather": ("tensor_list, tensor, group, async_op", _all_gather),
    ALL_GATHER: ("output_tensor, input_tensor, group, async_op", _all_gather_single),
    REDUCE_SCATTER: ("output, input, op, group, async_op", _reduce_scatter_single),
    "all_to_all_single": (f"output, input, {SPLITS}, group, async_op", _all_to_all_single),
    "barrier": ("group, async_op, device_ids, timeout", _barrier),
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
