"""A synchronous collective that the same line has made before with the same arguments takes a short way to gloo.

Training loops do little else. Between two calls a rank waits, its caches grow cold, and then every line of
Python costs ten times what a benchmark says. torch's own function spends more of it than the guard does: it
checks its arguments, makes an options object, asks for the default group, and passes torch's dispatcher. All of
that came out well the last time and depends only on what is compared here, so it is not done again; what that
saves pays for the record. The record itself is copied from the one before, and is in the ring before gloo
hears of the call.

`torch.distributed.all_reduce` is torch's decorator around the function proper, which it finds in a closure
cell. That cell is what is exchanged: so a name that a script imported before is met, too, and the public
function stays the same object, by which torch.compile knows it.
"""

from __future__ import annotations

from collections.abc import Callable
from sys import _getframe as frame_above
from sys import exception as exception_on_its_way
from threading import get_ident
from types import CellType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch._C import _len_torch_dispatch_stack as dispatch_modes
from torch._C import _len_torch_function_stack as function_modes
from torch._C._autograd import _profiler_enabled as profiler_enabled
from torch._C._distributed_c10d import Backend

from distsim.debug.records.frames import Owner, owner
from distsim.debug.rings import layout as rings
from distsim.debug.rings.callsite import codes_of, way_to
from distsim.debug.words.error_text import error_line
from distsim.realexec.guard.group import GuardedGroup

__all__ = ["Shortcuts"]

C10D = vars(c10d)
MOST = 4096
"""Calls that are remembered for a group."""
PAYLOAD_END = rings.WORDS_AT // 8 + rings.W_PAYLOAD_END

Public = Callable[..., Any]


class Seen:
    """A call as it was recorded the long way."""

    __slots__ = ("body", "codes", "done", "dtype", "expires", "method", "options", "print_", "said", "thread")

    def __init__(
        self, thread: int, body: bytes, done: int, options: Any, dtype: Any, method: Any, said: Any, codes: Any
    ) -> None:
        self.thread = thread
        self.body = body
        self.done = done
        """Flags of the record once the call has ended."""
        self.options = options
        """What torch made of the arguments."""
        self.dtype = dtype
        self.method = method
        self.said = said
        """The arguments besides tensor and group."""
        self.print_: int = rings.RECORD_BODY.unpack(body)[8]
        """Fingerprint, by which strict ranks compare their calls."""
        self.expires = int.from_bytes(body[5 * 8 : 6 * 8], "little") + rings.PAYLOAD_BYTES // 2
        """Position of the payload ring from which on the signature must be written anew."""
        self.codes = codes
        """Kept alive, so that their ids stay theirs."""


def _through(method: Any, tensor: Any, said: tuple[Any, ...], group: Any, long: Public, args: tuple[Any, ...]) -> Any:
    """Make a synchronous call, three frames below the user's, by the short way or with `long(*args)`."""
    world = C10D["_world"]
    guard = world._default_pg if group is None else group
    if type(guard) is not GuardedGroup or guard.fast is None or guard.recorder is None or type(tensor) is not Tensor:
        return long(*args)
    log = guard.group_log
    user = frame_above(2).f_back
    if user is None or owner(user.f_code.co_filename) is Owner.MACHINERY:  # torch itself, or a bare thread
        return long(*args)
    key = (way_to(user), tensor.shape)
    seen = log.seen.get(key)
    ring = guard.recorder.ring
    words = ring.words
    if (
        seen is None
        or seen.method is not method
        or seen.said != said
        or seen.dtype is not tensor.dtype
        or seen.thread != get_ident()
        or seen.expires <= words[PAYLOAD_END]
        or log.busy
        or not tensor.is_cpu
        or tensor.layout is not torch.strided
        or tensor.is_neg()
        or tensor.is_conj()
        or exception_on_its_way() is not None
        or world._pg_coalesce_state
        or function_modes()
        or dispatch_modes()
        or profiler_enabled()
        or (guard.strict is not None and not guard.strict.ready(log))
    ):
        log.last = ()
        try:
            answer = long(*args)
        finally:
            last, log.last = log.last, None
        if last:
            thread, first, body, done, options = last
            if first is tensor and thread == get_ident():  # no view of it, as of complex numbers
                if len(log.seen) > MOST:
                    log.seen.clear()
                log.seen[key] = Seen(thread, body, done, options, tensor.dtype, method, said, codes_of(user))
        return answer
    log.busy = seen.thread
    seq = next(log.seq)
    index = ring.replay(seen.body, seq)
    if guard.recorder.outstanding:
        guard.recorder.poll()
    if guard.strict is not None:
        guard.strict.hold_again(guard, seq, seen.print_, index)
    try:
        method(guard.fast, [tensor], seen.options).wait()
    except BaseException as error:
        ring.error(index, error_line(error))
        ring.finish(index, rings.FAILED)
        log.busy = 0
        raise
    ring.finish_as(index, seen.done)
    log.busy = 0
    return None


def _all_reduce(long: Public) -> Public:
    method = Backend.allreduce

    def all_reduce(tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        if async_op:
            return long(tensor, op, group, async_op)
        return _through(method, tensor, (op,), group, long, (tensor, op, group))

    return all_reduce


def _broadcast(long: Public) -> Public:
    method = Backend.broadcast

    def broadcast(
        tensor: Any, src: Any = None, group: Any = None, async_op: bool = False, group_src: Any = None
    ) -> Any:
        if async_op:
            return long(tensor, src, group, async_op, group_src)
        return _through(method, tensor, (src, group_src), group, long, (tensor, src, group, False, group_src))

    return broadcast


def _reduce(long: Public) -> Public:
    method = Backend.reduce

    def reduce(
        tensor: Any,
        dst: Any = None,
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
        group_dst: Any = None,
    ) -> Any:
        if async_op:
            return long(tensor, dst, op, group, async_op, group_dst)
        return _through(method, tensor, (dst, op, group_dst), group, long, (tensor, dst, op, group, False, group_dst))

    return reduce


WAYS: dict[str, Callable[[Public], Public]] = {"all_reduce": _all_reduce, "broadcast": _broadcast, "reduce": _reduce}


class Shortcuts:
    """Exchanges the functions proper inside torch's public ones, and puts them back."""

    def __init__(self) -> None:
        self._undo: list[tuple[CellType, Any]] = []

    def install(self) -> None:
        if not {"_default_pg", "_pg_coalesce_state"} <= vars(c10d._world).keys():
            return  # a torch that keeps them elsewhere: the long way does everything
        for name, way in WAYS.items():
            public = getattr(c10d, name)
            cells = dict(zip(public.__code__.co_freevars, public.__closure__ or (), strict=True))
            cell = cells.get("func")
            if cell is not None:  # else this torch decorates otherwise
                self._undo.append((cell, cell.cell_contents))
                cell.cell_contents = way(cell.cell_contents)

    def remove(self) -> None:
        while self._undo:
            cell, original = self._undo.pop()
            cell.cell_contents = original
