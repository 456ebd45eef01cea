"""A call that the same line has made before with the same arguments takes a short way to gloo.

Training loops do little else. Between two calls a rank waits, its caches grow cold, and then every line of
Python costs ten times what a benchmark says. torch's own function spends more of it than the guard does: it
checks its arguments, makes an options object, asks for the default group, and passes torch's dispatcher. All of
that came out well the last time and depends only on what is compared here, so it is not done again; what that
saves pays for the record. The record itself is copied from the one before, and is in the ring before gloo
hears of the call.

There are two ways in. `through` is for torch's public functions (`entrances` says what each hands over); `again` is for
methods of a group, by which C++ comes (DDP's reducer, functional collectives) and coalesced calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from sys import _getframe as frame_above
from sys import exception as exception_on_its_way
from threading import get_ident
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch._C import _len_torch_dispatch_stack as dispatch_modes
from torch._C import _len_torch_function_stack as function_modes
from torch._C._autograd import _profiler_enabled as profiler_enabled
from torch.nn import Parameter

from distsim.debug.records.arguments import Call
from distsim.debug.rings import layout as rings
from distsim.debug.rings.callsite import calling, codes_of, way_to
from distsim.debug.rings.writer import stays
from distsim.debug.words.error_text import error_line
from distsim.realexec.guard.handle import MessageHandle, SyncHandle
from distsim.realexec.guard.recorder import GroupLog, Made

__all__ = ["MISSED", "Public", "again", "keep", "through"]

C10D = vars(c10d)
MOST = 4096
"""Calls that are remembered for a group."""
PAYLOAD_END = rings.WORDS_AT // 8 + rings.W_PAYLOAD_END
STRIDED = torch.strided
LEARNT = frozenset({rings.WAITING, rings.ASYNC, rings.WAITING | rings.P2P_CALL, rings.ASYNC | rings.P2P_CALL})
"""What a record may say besides that the call is made: no race, no exception on its way, nothing found in its data."""

MISSED: Any = object()
"""The answer of `again` where the call must take the long way."""

Public = Callable[..., Any]


class Seen:
    """A call as it was recorded the long way."""

    __slots__ = (
        "codes",
        "done",
        "end",
        "expires",
        "owned",
        "print_",
        "said",
        "same",
        "tail",
        "thread",
    )

    def __init__(self, made: Made, num_lead: int, said: Any, codes: Any) -> None:
        self.thread = made.thread
        self.same = stays(made.body)
        flags = made.flags
        self.done = flags & ~(rings.STATE_MASK | rings.WAITING) | rings.COMPLETED
        """Flags of the record once the call has ended."""
        self.tail = made.args[num_lead:]
        """What torch made of the arguments besides the tensors."""
        self.said = said
        """The arguments besides tensors and group."""
        self.owned = made.owned
        """A user gets the handle, and is told of one that he drops."""
        call = made.call
        self.end = (call.key[0], call.peer, call.tag) if flags & rings.P2P_CALL else None
        self.print_: int = rings.RECORD_BODY.unpack(made.body)[8]
        """Fingerprint, by which strict ranks compare their calls."""
        self.expires = int.from_bytes(made.body[5 * 8 : 6 * 8], "little") + rings.PAYLOAD_BYTES // 2
        """Position of the payload ring from which on the signature must be written anew."""
        self.codes = codes
        """Kept alive, so that their ids stay theirs."""


def through(
    method: Any,
    what: Any,
    tensors: tuple[Any, ...],
    lead: tuple[Any, ...],
    said: tuple[Any, ...],
    group: Any,
    later: bool,
    long: Public,
    args: tuple[Any, ...],
) -> Any:
    """Make a public function's call by the short way or with `long(*args)`; synchronous calls have ended then.

    *method* of the backend is called with *lead* and what torch makes of the other arguments, *said*. *what* tells
    calls of one line apart besides the shapes of *tensors*, all there are; the caller goes on if *later*.
    """
    world = C10D["_world"]
    guard = world._default_pg if group is None else group
    if getattr(guard, "fast", None) is None or world._pg_coalesce_state:
        return long(*args)
    caller = frame_above(2).f_back
    if caller is None or guard.recorder is None:  # no frame of Python's calls it; the guard was taken off
        return long(*args)
    looks = _looks(tensors)
    if looks is None:
        return long(*args)
    log: GroupLog = guard.group_log
    key = (way_to(caller), what, looks)
    seen = log.seen.get(key)
    if seen is None or seen.said != said or not _holds(guard, log, seen):
        return _long_way(guard, key, lead, tensors, said, later, long, args, caller)
    work, index = _make(guard, log, seen, later, tensors, method, (*lead, *seen.tail))
    if later:
        return work
    try:
        work.wait()
    except BaseException as error:
        guard.recorder.ring.fail(index, error_line(error))
        if seen.end is None:
            log.busy = 0
        raise
    if guard.strict is None:
        guard.recorder.ring.finish_as(index, seen.done)
    else:
        guard.recorder.ring.finish(index, rings.COMPLETED)  # it may have been marked as not held
    if seen.end is None:
        log.busy = 0
    return None


def again(guard: Any, method: Any, call: Call, args: tuple[Any, ...], caller: Any) -> tuple[Any, Any]:
    """Make a call of a group's method by the short way: its handle, or MISSED; and the key by which to `keep` it.
    Synchronous ones are torch's own, which waits for them at once."""
    if caller is None or not (call.is_async or caller.f_globals is C10D):
        return MISSED, None
    log: GroupLog = guard.group_log
    key = (way_to(caller), call.key, call.is_async, call.peer, call.tag)
    seen = log.seen.get(key)
    tensors = (*call.inputs, *call.outputs) if call.inputs is not call.outputs else call.inputs
    if seen is None or _looks(tensors) is None or not _holds(guard, log, seen):
        return MISSED, key
    work, index = _make(guard, log, seen, call.is_async, tensors, method, args)
    return work if call.is_async else SyncHandle(work, guard.recorder.ring, log, index), key


def keep(guard: Any, key: tuple[Any, ...], made: Made, caller: Any) -> None:
    """Remember a call of a method, which has just been made the long way."""
    if _may_be_kept(guard, made, made.call.is_async, caller):
        if _looks((*made.call.inputs, *made.call.outputs)) is not None:
            _keep(guard.group_log, key, Seen(made, 0, None, codes_of(caller)))


def _looks(tensors: Sequence[Any]) -> tuple[Any, ...] | None:
    """Dtype and shapes of plain tensors on the host; None where one may take another way in torch."""
    looks = []
    dtype = None
    for tensor in tensors:
        kind = type(tensor)
        if (
            (kind is not Tensor and kind is not Parameter)  # a subclass may see to its calls itself
            or not tensor.is_cpu
            or tensor.layout is not STRIDED
            or tensor.is_neg()
        ):
            return None
        if tensor.dtype is not dtype:
            if dtype is not None:
                return None
            dtype = tensor.dtype
            looks.append(dtype)
        looks.append(tensor.shape)
    return tuple(looks)


def _holds(guard: Any, log: GroupLog, seen: Seen) -> bool:
    """Whether all is as it was when the call was recorded, besides what its key says."""
    return (
        seen.thread == get_ident()
        and seen.expires > guard.recorder.ring.words[PAYLOAD_END]
        and not log.busy
        and exception_on_its_way() is None
        and not function_modes()
        and not dispatch_modes()
        and not profiler_enabled()
        and (guard.strict is None or guard.strict.ready(log, seen.end))
    )


def _make(
    guard: Any,
    log: GroupLog,
    seen: Seen,
    later: bool,
    tensors: Sequence[Any],
    method: Any,
    args: tuple[Any, ...],
) -> tuple[Any, int]:
    """Record the call and make it: the backend's work, or our handle around it if the caller goes on; the index."""
    recorder = guard.recorder
    end = seen.end
    if end is None:
        if not later:
            log.busy = seen.thread
        index: int = recorder.ring.replay(seen.same, next(log.seq))
    else:
        ordinal = log.ordinals[end] = log.ordinals.get(end, 0) + 1
        index = recorder.ring.replay(seen.same, next(log.p2p), ordinal)
    if recorder.outstanding:
        recorder.poll()
    if guard.strict is not None:
        issue = partial(method, guard.fast, *args)
        held = guard.strict.hold_again(guard, end, seen.print_, index, later, tensors, issue)
        if held is not None:
            if later:
                held._touched = not seen.owned
            return held, index
    try:
        work = method(guard.fast, *args)
    except BaseException as error:
        recorder.not_issued(log, end, index, error_line(error))
        raise
    if later:
        work = (guard.later if end is None else MessageHandle)(work, recorder, log, index, seen.owned)
    return work, index


def _long_way(
    guard: Any,
    key: tuple[Any, ...],
    lead: tuple[Any, ...],
    tensors: tuple[Any, ...],
    said: tuple[Any, ...],
    later: bool,
    long: Public,
    args: tuple[Any, ...],
    caller: Any,
) -> Any:
    """Make the call by torch's own function, and remember how it was recorded."""
    log = guard.group_log
    asked, log.last = log.last, ()
    try:
        answer = long(*args)
    finally:
        made, log.last = log.last, asked
    if not made:
        return answer
    if asked is not None:
        log.last = made  # `send` calls `isend`: both are asked about
    same = (*made.call.inputs, *made.call.outputs)
    if (
        _may_be_kept(guard, made, later, caller)
        and all(any(tensor is one for one in same) for tensor in tensors)  # no view of it, as of complex numbers
    ):
        _keep(log, key, Seen(made, len(lead), said, codes_of(caller)))
    return answer


def _may_be_kept(guard: Any, made: Made, later: bool, caller: Any) -> bool:
    user = calling(caller)
    return (
        made.thread == get_ident()
        and made.flags & ~rings.STATE_MASK in LEARNT
        and bool(made.flags & rings.ASYNC) == later
        and not getattr(made.call.key[3], "is_complex", False)
        and guard.recorder is not None
        and user is not None
        and guard.recorder.sites.knows(way_to(user))
    )


def _keep(log: GroupLog, key: tuple[Any, ...], seen: Seen) -> None:
    if len(log.seen) > MOST:
        log.seen.clear()
    log.seen[key] = seen
