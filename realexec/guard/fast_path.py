"""A call that the same line has made before with the same arguments takes a short way to gloo.

Training loops do little else. Between two calls a rank waits, its caches grow cold, and then every line of
Python costs ten times what a benchmark says. torch's own function spends more of it than the guard does: it
checks its arguments, makes an options object, asks for the default group, and passes torch's dispatcher. All of
that came out well the last time and depends only on what is compared here, so it is not done again; what that
saves pays for the record. The record itself is copied from the one before, and is in the ring before gloo
hears of the call.

There are two ways in: torch's public functions (`api_wrappers` has what each passes on), and methods of a group
(`method_path`). A call is remembered when it is made the second time: the first one leaves marks on the stack
(`callsite`), so only the frames between the call and the loop that it is in are compared later. All that is compared is
written out in one function: where the caches are cold, one more costs as much as half of what it does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from sys import _getframe as frame_above
from sys import exception as exception_on_its_way
from threading import get_ident
from time import monotonic_ns
from typing import Any

import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from distsim.debug.messages.error_text import error_line
from distsim.debug.rings import layout as rings
from distsim.realexec.guard.handle import MessageHandle, watched
from distsim.realexec.guard.known import CachedCall, find, looks_of, may_be_kept, remember
from distsim.realexec.guard.recorder import GroupLog
from distsim.torch_compat import groups, works

__all__ = ["MISSED", "Public", "learn", "through"]

C10D = vars(c10d)
WORLD, USUAL = groups.WORLD.attribute, groups.WORLD.get()
"""torch's table of groups. Another may stand there: torch's own tests run ranks as threads, each with its own."""
default_group, coalescing = groups.DEFAULT_GROUP.getter(), groups.COALESCING.getter()
dispatch_modes, function_modes = works.DISPATCH_MODES.get(works.unknown), works.FUNCTION_MODES.get(works.unknown)
profiler_enabled = works.PROFILES.get(works.unknown)
FIRST, RECORDS, EACH = rings.RECORDS_AT // 8, rings.RECORDS, rings.RECORD_WORDS
FLAGS, ENDED = rings.WORD_FLAGS, rings.WORD_COMPLETED
WINDOW = rings.MEETING_WINDOW
COUNT = rings.WORDS_AT // 8 + rings.W_COUNT
pack = rings.AGAIN.pack_into
FEW = 4
"""So many asynchronous calls may have ended before a new one looks at them. The heartbeat looks, too, and where the
caches are cold, as they are in a backward pass, a look takes 20 us."""
SPIN_S, AT_ONCE_S = 300e-6, 50e-6
"""Strict level: how long a synchronous call looks for its members without a pause (a sleep and its end cost 25 us of
CPU here, which is about what the members of a group are apart), and an asynchronous one before it is held: holding one
costs as much, and the thread that lets it out more."""

is_nested: Any = Tensor.is_nested.__get__
MISSED: Any = object()
"""The answer of `again` where the call must take the long way."""

Public = Callable[..., Any]


def through(
    method: Any,
    what: Any,
    tensors: Sequence[Any],
    lead: tuple[Any, ...],
    said: tuple[Any, ...],
    group: Any,
    later: bool,
    caller: Any = None,
) -> Any:
    """Make a call the short way: its answer, or MISSED where the call must take the long way; a synchronous call has
    ended then.

    *method* of the backend is called with *lead* and what torch makes of the other arguments, *said*. *what* tells
    calls of one line apart besides the shapes of *tensors*, all there are; the caller goes on if *later*. *caller*: who
    called a method of *group*; None: a public function was called, and who did is to be found.
    """
    if caller is None:
        world = C10D[WORLD]
        if world is not USUAL or coalescing(world):
            return MISSED
        guard = default_group(world) if group is None else group
        try:
            caller = frame_above(3)  # who called the public function: the entrance and torch's decorator are between
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
            seen.what == what
            and seen.at == caller.f_lasti
            and seen.code is caller.f_code
            and seen.num == len(tensors)
            and not (tensors and (tensors[0].is_nested or tensors[-1].is_nested))
            and (seen.num < 3 or True not in map(is_nested, tensors))
            and seen.alike(*tensors)
            and seen.said == said
            and seen.thread == get_ident()
        )
    except (AttributeError, TypeError, ValueError, RuntimeError):  # one is no tensor, or cannot be compared
        return MISSED
    if again:
        frame: Any = caller
        for code, position in seen.steps:
            frame = frame.f_back
            if frame is None or frame.f_code is not code or frame.f_lasti != position:
                seen = find(log, what, tensors, said, caller)
                break
        else:
            if frame.f_trace is not seen.mark:
                seen = find(log, what, tensors, said, caller)
    else:
        seen = find(log, what, tensors, said, caller)
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
    end, near = seen.end, None
    if guard.strict is not None:
        if end is not None:
            return _message(guard, log, seen, later, tensors[0], method, lead, caller is None)
        near = log.near
        if near is None or near.waiting:
            return MISSED
    if end is None:
        if not later:
            log.busy = seen.thread
        seq, ordinal = next(log.seq), 0
    else:
        made = seen.made
        ordinal = made[0] = made[0] + 1
        seq = next(log.p2p)
    # `ring.replay`, written out.
    index = next(ring.numbers)
    word, words = FIRST + index % RECORDS * EACH, ring.words
    if near is not None:  # `ring.publish`, written out, and before all else: the others wait for it
        slot = 1 + seq % WINDOW * 3
        row = near.row + slot
        words[row] = 0
        words[row + 1] = seen.print_
        words[row + 2] = index + 1
        words[row] = seq
    first, second = seen.same
    pack(ring.buffer, word * 8, 0, monotonic_ns(), first, seq, second, ordinal)
    words[word] = words[COUNT] = index + 1
    if len(recorder.outstanding) > FEW:
        recorder.poll()
    if near is not None:
        try:
            met = near.meet(seq, slot, seen.print_, AT_ONCE_S if later else SPIN_S)
        except BaseException as error:  # of a signal's handler: pytest-timeout, Ctrl-C
            recorder.not_issued(log, end, index, error_line(error))
            raise
        if not met:
            strict = guard.strict
            if later:
                issue = partial(method, fast, *lead, *seen.tail)
                held = strict.defer_again(guard, near, seq, seen.print_, index, issue)
                held._touched = not seen.owned
                return held
            strict.agree_again(guard, near, seq, seen.print_, index)
    try:
        work = method(fast, *lead, *seen.tail)
    except BaseException as error:
        recorder.not_issued(log, end, index, error_line(error))
        raise
    if later:  # `watched`, written out
        if seen.bare:
            recorder.outstanding[index] = work
            return work
        if end is None:
            handle = guard.later()
            recorder.outstanding[index] = work
        else:
            handle = MessageHandle()
        handle._inner = work
        handle._group_log = log
        handle._index = index
        handle._word = word
        handle._touched = not seen.owned
        return handle
    try:
        work.wait()
    except BaseException as error:
        ring.fail(index, error_line(error))
        if end is None:
            log.busy = 0
        raise
    if words[word] == index + 1:  # `ring.finish_as`, written out
        words[word + ENDED] = monotonic_ns()
        words[word + FLAGS] = seen.done if near is None else seen.done | words[word + FLAGS] & rings.UNCHECKED
    if end is None:
        log.busy = 0
    return None


def _message(
    guard: Any,
    log: GroupLog,
    seen: CachedCall,
    later: bool,
    tensor: Any,
    method: Any,
    lead: tuple[Any, ...],
    by_public: bool,
) -> Any:
    """The rest of `through` for a message where its two ends are compared."""
    messages, recorder, end = guard.strict.messages, guard.recorder, seen.end
    made = seen.made
    ordinal = made[0] = made[0] + 1
    index = recorder.ring.replay(seen.same, next(log.p2p), ordinal)
    if len(recorder.outstanding) > FEW:
        recorder.poll()
    shown = messages.again(guard, seen, ordinal, index, tensor)
    try:
        work = method(guard.fast, *lead, *seen.tail)
    except BaseException as error:
        recorder.not_issued(log, end, index, error_line(error))
        raise
    if later:
        if shown is None:
            return watched(MessageHandle, work, log, index, seen.owned)
        if not by_public:
            handle = messages.watched(work, log, index, shown)
        else:
            handle = messages.handle(shown)
            handle._inner, handle._group_log, handle._index = work, log, index
        handle._touched = not seen.owned
        return handle
    try:
        if shown is None:
            work.wait()
        else:
            messages.wait(work.wait, *shown, index)
    except BaseException as error:
        recorder.ring.fail(index, error_line(error))
        raise
    recorder.ring.finish(index, rings.COMPLETED)
    return None


def learn(
    long: Public,
    args: tuple[Any, ...],
    what: Any,
    tensors: tuple[Any, ...],
    num_lead: int,
    said: tuple[Any, ...],
    group: Any,
    later: bool,
    up: int = 2,
) -> Any:
    """Make a call that `through` missed by torch's own function, and remember how it was recorded. *up*: how many
    frames above this one the public function's is."""
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
        may_be_kept(guard, made, later, caller)
        and all(any(tensor is one for one in same) for tensor in tensors)  # no view of it, as of complex numbers
    ):
        remember(log, what, tensors, looks, made, num_lead, said, caller, guard.recorder.ring.words)
    return answer
