"""Fast path for a call that the same line has made before with the same arguments.

Training loops mostly repeat calls. Between two calls a rank waits, its caches grow cold, and every line of Python
then costs ten times what a benchmark shows. torch's own function costs more than the guard: it checks its arguments,
makes an options object, looks up the default group, and passes torch's dispatcher. The results of all that depend
only on what is compared here, so they are reused, and the time saved pays for the record. The record is copied from
the previous one, and is in the ring before gloo gets the call.

There are two entry points: torch's public functions (`api_wrappers` knows which arguments each passes on), and
methods of a group (`group`). A call is cached when it is made for the second time: the first one leaves marks on the
stack (`callsite`), so that later only the frames between the call and its loop are compared.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import partial
from sys import _getframe as frame_above
from sys import exception as exception_on_its_way
from threading import get_ident
from types import FrameType
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.nn import Parameter

from distsim.debug.rings import layout as rings
from distsim.debug.rings.callsite import Standing, after, calling, leave_marks, standing, stands, way_to
from distsim.debug.rings.writer import stays
from distsim.realexec.guard.handle import MessageHandle, watched
from distsim.realexec.guard.recorder import UNKNOWN, GroupLog, Made, Recorder
from distsim.text.tracebacks import error_line
from distsim.torch_compat import compiler, groups

C10D = vars(c10d)
WORLD, USUAL = groups.WORLD.attribute, groups.WORLD.get()
"""torch's table of groups. It may be replaced: torch's own tests run ranks as threads, each with its own table."""
default_group, coalescing = groups.DEFAULT_GROUP.getter(), groups.COALESCING.getter()
dispatch_modes, function_modes = groups.DISPATCH_MODES.get(groups.unknown), groups.FUNCTION_MODES.get(groups.unknown)
profiler_enabled = groups.PROFILES.get(groups.unknown)
FIRST, RECORDS, EACH = rings.RECORDS_AT // 8, rings.RECORDS, rings.RECORD_WORDS
WINDOW = rings.MEETING_WINDOW
FEW = 4
"""Number of outstanding asynchronous calls above which a new call checks which have completed.

The heartbeat checks, too, and with cold caches, as in a backward pass, a check takes 20 us.
"""
SPIN_S, AT_ONCE_S = 300e-6, 50e-6
"""At level strict: seconds that a synchronous call, and an asynchronous one before it is held, polls for its
members.

A sleep with its wake-up costs 25 us of CPU here, about the time between the members of a group; holding a call costs
as much, and the thread that releases it more.
"""

is_nested: Any = Tensor.is_nested.__get__
MISSED: Any = object()
"""Result of `through` if the call must take the long path."""

Public = Callable[..., Any]
MOST = 4096
"""Largest number of calls that are cached for a group."""
OTHERS = 7
"""Maximum number of cached calls of one key that are searched, as a helper is seldom called from more lines in turn."""
STRIDED = torch.strided
transforms = groups.TRANSFORMS.get(groups.unknown)
HEAD = struct.Struct("<QQQ")
BACKWARD = getattr(groups.RUN_BACKWARD.get(None), "__code__", None)
"""Code of autograd's `run_backward`. A group's method whose nearest Python frame runs this code was called by C++:
DDP's reducer.
"""
LEARNT = frozenset({rings.WAITING, rings.ASYNC, rings.WAITING | rings.P2P_CALL, rings.ASYNC | rings.P2P_CALL})
"""Flags of records that may be cached. A record with any other flag (a race, an exception under way, a finding) is
not.
"""
TensorGuards: Any = compiler.TENSOR_GUARDS.get(None)
"""torch.compile's check of tensors: type, dispatch keys (device, layout, sign), dtype, shape and strides in one
call.
"""


def through(
    method: Any,
    kind: Any,
    tensors: Sequence[Any],
    lead: tuple[Any, ...],
    options: tuple[Any, ...],
    group: Any,
    later: bool,
    caller: Any = None,
    up: int = 3,
) -> Any:
    """Make a call by the short path, and return its result, or MISSED if it must take the long path.

    A synchronous call has completed then. *method* of the backend is called with *lead* and torch's version of the
    other arguments, *options*. *kind* distinguishes calls of one line besides the shapes of *tensors*; *later* says
    that the caller continues at once. *caller* is the frame that called a method of *group*; None: a public function
    was called, and its caller is *up* frames above.
    """
    by_public = caller is None
    if caller is None:
        world = C10D[WORLD]
        if world is not USUAL or coalescing(world):
            return MISSED
        guard = default_group(world) if group is None else group
        try:
            caller = frame_above(up)
        except ValueError:
            return MISSED
    else:
        guard = group
    fast = getattr(guard, "fast", None)
    if fast is None:
        return MISSED
    log: GroupLog = guard.group_log
    before = log.before
    seen = before.next
    try:
        again = (
            seen.what == kind
            and seen.at == caller.f_lasti
            and seen.code is caller.f_code
            and seen.num == len(tensors)
            and not (tensors and (tensors[0].is_nested or tensors[-1].is_nested))
            and (seen.num < 3 or True not in map(is_nested, tensors))
            and seen.alike(*tensors)
            and seen.said == options
            and seen.thread == get_ident()
        )
    except (AttributeError, TypeError, ValueError, RuntimeError):  # one is no tensor, or cannot be compared
        return MISSED
    if again:
        frame: Any = caller
        for code, position in seen.steps:
            frame = frame.f_back
            if frame is None or frame.f_code is not code or frame.f_lasti != position:
                again = False
                break
        else:
            again = frame.f_trace is seen.mark
    seen = seen if again else find(log, kind, tensors, options, caller)
    recorder = guard.recorder
    if (
        seen is None
        or recorder is None  # the guard was taken off
        or log.busy
        or log.last is not None
        or seen.expires <= (ring := recorder.ring).payload_end
        or exception_on_its_way() is not None
        or function_modes()
        or dispatch_modes()
        or profiler_enabled()
    ):
        return MISSED
    before.next = log.before = seen
    end, near, shown = seen.end, None, None
    strict = guard.strict
    if end is None:
        if strict is not None and ((near := log.near) is None or near.waiting):
            return MISSED
        if not later:
            log.busy = seen.thread
        seq, ordinal = next(log.seq), 0
    else:
        seq = next(log.p2p)
        ordinal = seen.made[0] = seen.made[0] + 1
    index = ring.replay(seen.same, seq, ordinal)
    if near is not None:
        ring.publish(near.row, seq, seen.print_, index)
    if len(recorder.outstanding) > FEW:
        recorder.poll()
    if end is not None and strict is not None:
        shown = strict.messages.again(guard, seen, ordinal, index, tensors[0])
    if near is not None:
        issue = partial(method, fast, *lead, *seen.tail)
        held = _met_or_held(guard, recorder, near, seq, 1 + seq % WINDOW * 3, seen, index, later, issue)
        if held is not None:
            return held
    try:
        work = method(fast, *lead, *seen.tail)
    except BaseException as error:
        recorder.not_issued(log, end, index, error_line(error))
        raise
    if later:
        if seen.bare:
            recorder.outstanding[index] = work
            return work
        if shown is not None:
            return strict.messages.handle(work, log, index, shown, seen.owned, by_public)
        return watched(guard.later if end is None else MessageHandle, work, log, index, seen.owned)
    try:
        if shown is None:
            work.wait()
        else:
            strict.messages.wait(work.wait, *shown, index)
    except BaseException as error:
        ring.fail(index, error_line(error))
        if end is None:
            log.busy = 0
        raise
    ring.finish_as(index, seen.done if near is None else seen.done | ring.flags(index) & rings.UNCHECKED)
    if end is None:
        log.busy = 0
    return None


def _met_or_held(
    guard: Any,
    recorder: Recorder,
    near: Any,
    seq: int,
    slot: int,
    seen: CachedCall,
    index: int,
    later: bool,
    issue: Callable[[], Any],
) -> Any:
    """Wait for the members of a call at the strict level.

    Return None if all members are present and the call may be made, or the handle of a call that is held until they
    are.
    """
    try:
        met = near.meet(seq, slot, seen.print_, AT_ONCE_S if later else SPIN_S)
    except BaseException as error:  # of a signal's handler: pytest-timeout, Ctrl-C
        recorder.not_issued(guard.group_log, seen.end, index, error_line(error))
        raise
    if met:
        return None
    if not later:
        guard.strict.agree_again(guard, near, seq, seen.print_, index)
        return None
    held = guard.strict.defer_again(guard, near, seq, seen.print_, index, issue)
    held._touched = not seen.owned
    return held


def learn(
    long: Public,
    args: tuple[Any, ...],
    kind: Any,
    tensors: tuple[Any, ...],
    num_lead: int,
    options: tuple[Any, ...],
    group: Any,
    later: bool,
    up: int = 2,
) -> Any:
    """Make a call that `through` missed by torch's own function, and cache how it was recorded.

    *up* is the number of frames between this one and the caller of the public function.
    """
    world = C10D[WORLD]
    if world is not USUAL:
        return long(*args)
    guard = default_group(world) if group is None else group
    if getattr(guard, "fast", None) is None or coalescing(world) or guard.recorder is None:
        return long(*args)
    looks, caller = looks_of(tensors), frame_above(up).f_back
    if looks is None or caller is None:  # no frame of Python's calls it
        return long(*args)
    log = guard.group_log
    previous, log.last = log.last, ()
    try:
        answer = long(*args)
    finally:
        last_made, log.last = log.last, previous
    if not last_made:
        return answer
    if previous is not None:
        log.last = last_made  # `send` calls `isend`: both are asked about
    same = (*last_made.call.inputs, *last_made.call.outputs)
    if (
        may_be_kept(guard, last_made, later, caller)
        and all(any(tensor is one for one in same) for tensor in tensors)  # no view of it, as of complex numbers
    ):
        remember(log, kind, tensors, looks, last_made, num_lead, options, caller, guard.recorder.ring.words)
    return answer


class CachedCall:
    """A call as the slow path recorded it, ready to be replayed."""

    __slots__ = (
        "alike",
        "at",
        "bare",
        "code",
        "done",
        "end",
        "expires",
        "line",
        "made",
        "mark",
        "next",
        "num",
        "others",
        "owned",
        "payload",
        "print_",
        "said",
        "same",
        "steps",
        "tail",
        "thread",
        "what",
    )

    def __init__(
        self,
        log: GroupLog,
        made_call: Made,
        num_lead: int,
        kind: Any,
        options: Any,
        tensors: Sequence[Tensor],
        caller: FrameType,
        there: Standing,
        others: tuple[CachedCall, ...],
        bare: bool,
    ) -> None:
        self.thread = made_call.thread
        self.what = kind
        """Operation; for a message also its peer."""
        self.code, self.at = caller.f_code, caller.f_lasti
        """Position of the caller; the code is kept alive, because the key contains its id."""
        self.num = len(tensors)
        self.alike = _alike(tensors)
        """Function that checks whether as many other tensors look like the cached ones.

        It may return False wrongly, but not True. A nested tensor, which has no strides, would crash it.
        """
        self.next: Any = UNKNOWN
        """Call that followed this one on the group the last time; a guess for the next call."""
        self.bare = bare
        """Whether only C++ takes the future. torch's own Work has one, so no handle is needed."""
        first, second = stays(made_call.body)
        if bare:  # `get_future` of our handle would note it
            completed, flags, rest = HEAD.unpack(first)
            first = HEAD.pack(completed, flags | rings.FUTURE, rest)
        self.same = first, second
        flags = made_call.flags
        self.done = flags & ~(rings.STATE_MASK | rings.WAITING) | rings.COMPLETED
        """Flags of the record once the call has ended."""
        self.tail = made_call.args[num_lead:]
        """Arguments besides the tensors, as torch passes them to the backend."""
        self.said = options
        """The arguments besides tensors and group."""
        self.owned = made_call.owned
        """Whether a user gets the handle, and is warned if it is dropped."""
        call = made_call.call
        self.end = (call.key[0], call.peer, call.tag) if flags & rings.P2P_CALL else None
        self.made: list[int] = log.ordinals[self.end] if self.end is not None else []
        self.line: Any = None
        """For a message at the strict level: shared memory in which both ends show their calls."""
        self.payload = 0
        """For a message at the strict level: hash of the size and dtype, which both ends must share."""
        self.print_: int = rings.RECORD_BODY.unpack(made_call.body)[8]
        """Fingerprint of the call, which ranks compare at the strict level."""
        self.expires = int.from_bytes(made_call.body[5 * 8 : 6 * 8], "little") + rings.PAYLOAD_BYTES // 2
        """Position in the payload ring after which the signature must be written again, because it may be
        overwritten.
        """
        self.steps, self.mark = there
        """Position of the caller on the stack, which `stands` checks."""
        self.others = others
        """Cached calls with the same key, from other callers or with other arguments."""


def find(log: GroupLog, kind: Any, tensors: Sequence[Any], options: Any, caller: FrameType) -> CachedCall | None:
    """Return the cached call with this kind, tensors, options and caller, or None."""
    looks = looks_of(tensors)
    if looks is not None:
        try:
            for seen in _all(log.seen.get((kind, id(caller.f_code), caller.f_lasti, *looks))):
                if (
                    seen.said == options
                    and seen.thread == get_ident()
                    and stands(caller, (seen.steps, seen.mark))
                    and transforms() is None  # else its tensors stand for others (`CachedCall.alike` sees that, too)
                ):
                    return seen
        except (TypeError, ValueError, RuntimeError):
            return None  # of something that cannot be compared, as an array
    return None


def _alike(tensors: Sequence[Tensor]) -> Any:
    if not tensors:
        return _true
    try:
        return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    except (TypeError, ValueError, RuntimeError):  # of a torch that has none, or another: `find` is quick, too
        return _false


def _true() -> bool:
    return True


def _false(*_: Tensor) -> bool:
    return False


def looks_of(tensors: Sequence[Any]) -> tuple[Any, ...] | None:
    """Return dtype and shapes of plain CPU tensors, or None if torch may treat one of them differently."""
    looks = []
    dtype = None
    for tensor in tensors:
        kind = type(tensor)
        if (
            (kind is not Tensor and kind is not Parameter)  # a subclass may see to its calls itself
            or not tensor.is_cpu
            or tensor.layout is not STRIDED
            or tensor.is_neg()
            or tensor.is_nested
        ):
            return None
        if tensor.dtype is not dtype:
            if dtype is not None:
                return None
            dtype = tensor.dtype
            looks.append(dtype)
        looks.append(tensor.shape)
    return tuple(looks)


def may_be_kept(guard: Any, made_call: Made, later: bool, caller: Any) -> bool:
    user = calling(caller)
    return (
        made_call.thread == get_ident()
        and made_call.flags & ~rings.STATE_MASK in LEARNT
        and bool(made_call.flags & rings.ASYNC) == later
        and not getattr(made_call.call.key[3], "is_complex", False)
        and guard.recorder is not None
        and user is not None
        and guard.recorder.sites.knows(way_to(user))
    )


def remember(
    log: GroupLog,
    kind: Any,
    tensors: Sequence[Tensor],
    looks: tuple[Any, ...],
    made_call: Made,
    num_lead: int,
    options: Any,
    caller: FrameType,
    words: memoryview,
) -> None:
    """Cache a call for `find`. The first call of its kind only leaves marks on the stack.

    *looks* is the result of `looks_of` for *tensors*.
    """
    key = (kind, id(caller.f_code), caller.f_lasti, *looks)
    if len(log.marked) > MOST:
        log.marked.clear()
    before = log.marked.pop(key, None)
    if before is None:  # the next call finds marks on the frames that are still there
        log.marked[key] = made_call.record
        leave_marks(caller)
        return
    known = log.seen.get(key)
    # Where the callers stood alike and were not told again, the mark was on a frame that is made anew for each call.
    alike = [one for one in _all(known) if one.said == options and after(caller, one.steps) is not None]
    there = standing(caller, max((len(one.steps) + 1 for one in alike if one.thread == get_ident()), default=0))
    if there is None:
        return
    if len(log.seen) > MOST:
        log.forget_all()
        known = None
    others = _all(known)[:OTHERS]
    log.forget(_all(known)[OTHERS:])
    bare = caller.f_code is BACKWARD and not made_call.owned and _only_its_future(words, before)
    log.seen[key] = CachedCall(log, made_call, num_lead, kind, options, tensors, caller, there, others, bare)
    if known is not None:
        known.others = ()


def _all(seen: CachedCall | None) -> tuple[CachedCall, ...]:
    return () if seen is None else (seen, *seen.others)


def _only_its_future(words: memoryview, index: int) -> bool:
    """Return whether the program took the future of a call and never waited for its handle."""
    word = FIRST + index % RECORDS * EACH
    flags = words[word + rings.WORD_FLAGS] if words[word] == index + 1 else 0
    return bool(flags & rings.FUTURE) and not flags & (rings.WAITED | rings.WAITING)
