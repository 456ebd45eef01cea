"""Calls that were made before, as they were recorded: what `fast_path` tells a call again by, and does not do again."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from threading import get_ident
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from distsim.debug.rings import layout as rings
from distsim.debug.rings.callsite import Standing, after, calling, leave_marks, standing, stands, way_to
from distsim.debug.rings.writer import stays
from distsim.realexec.guard.recorder import UNKNOWN, GroupLog, Made
from distsim.torch_compat import compiler, works

__all__ = ["BACKWARD", "CachedCall", "find", "looks_of", "may_be_kept", "remember"]

MOST = 4096
"""Calls that are remembered for a group."""
OTHERS = 7
"""Of one key that are looked through: a helper is seldom called from more lines in turn."""
STRIDED = torch.strided
FIRST, RECORDS, EACH = rings.RECORDS_AT // 8, rings.RECORDS, rings.RECORD_WORDS
transforms = works.TRANSFORMS.get(works.unknown)
HEAD = struct.Struct("<QQQ")
BACKWARD = getattr(works.RUN_BACKWARD.get(None), "__code__", None)
"""Whatever calls a group from here without a frame of Python's between is C++: DDP's reducer."""
LEARNT = frozenset({rings.WAITING, rings.ASYNC, rings.WAITING | rings.P2P_CALL, rings.ASYNC | rings.P2P_CALL})
"""What a record may say besides that the call is made: no race, no exception on its way, nothing found in its data."""
TensorGuards: Any = compiler.TENSOR_GUARDS.get(None)
"""torch.compile's own look at tensors: type, dispatch keys (device, layout, sign), dtype, shape and strides at once."""


class CachedCall:
    """A call as it was recorded the long way."""

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
        made: Made,
        num_lead: int,
        what: Any,
        said: Any,
        tensors: Sequence[Tensor],
        caller: FrameType,
        there: Standing,
        others: tuple[CachedCall, ...],
        bare: bool,
    ) -> None:
        self.thread = made.thread
        self.what = what
        """Which operation; of a message, with whom, too."""
        self.code, self.at = caller.f_code, caller.f_lasti
        """Where the caller was; kept alive, as the key has the id of the code."""
        self.num = len(tensors)
        self.alike = _alike(tensors)
        """Whether so many others are as its tensors. It may answer False wrongly, but not True. Asked of a nested
        one, which has no strides, it would end the process."""
        self.next: Any = UNKNOWN
        """What the group called after it the last time."""
        self.bare = bare
        """Nobody wants the handle: C++ takes the future, and torch's own Work has that."""
        first, second = stays(made.body)
        if bare:  # `get_future` of our handle would note it
            completed, flags, rest = HEAD.unpack(first)
            first = HEAD.pack(completed, flags | rings.FUTURE, rest)
        self.same = first, second
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
        self.made: list[int] = log.ordinals[self.end] if self.end is not None else []
        self.line: Any = None
        """Of a message at the strict level: where both ends show theirs."""
        self.payload = 0
        """And what they have in common."""
        self.print_: int = rings.RECORD_BODY.unpack(made.body)[8]
        """Fingerprint, by which strict ranks compare their calls."""
        self.expires = int.from_bytes(made.body[5 * 8 : 6 * 8], "little") + rings.PAYLOAD_BYTES // 2
        """Position of the payload ring from which on the signature must be written anew."""
        self.steps, self.mark = there
        """Where the caller stood, as `stands` tells it again."""
        self.others = others
        """Of the same key, where the caller was called from elsewhere, or said something else."""


def find(log: GroupLog, what: Any, tensors: Sequence[Any], said: Any, caller: FrameType) -> CachedCall | None:
    """The call that was made like this."""
    looks = looks_of(tensors)
    if looks is not None:
        try:
            for seen in _all(log.seen.get((what, id(caller.f_code), caller.f_lasti, *looks))):
                if (
                    seen.said == said
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


def may_be_kept(guard: Any, made: Made, later: bool, caller: Any) -> bool:
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


def remember(
    log: GroupLog,
    what: Any,
    tensors: Sequence[Tensor],
    looks: tuple[Any, ...],
    made: Made,
    num_lead: int,
    said: Any,
    caller: FrameType,
    words: memoryview,
) -> None:
    """Keep a call for `find`; if it is the first of its kind, leave marks on the way to it. *looks*: of *tensors*."""
    key = (what, id(caller.f_code), caller.f_lasti, *looks)
    if len(log.marked) > MOST:
        log.marked.clear()
    before = log.marked.pop(key, None)
    if before is None:  # the next call finds marks on the frames that are still there
        log.marked[key] = made.record
        leave_marks(caller)
        return
    known = log.seen.get(key)
    # Where the callers stood alike and were not told again, the mark was on a frame that is made anew for each call.
    alike = [one for one in _all(known) if one.said == said and after(caller, one.steps) is not None]
    there = standing(caller, max((len(one.steps) + 1 for one in alike if one.thread == get_ident()), default=0))
    if there is None:
        return
    if len(log.seen) > MOST:
        log.forget_all()
        known = None
    others = _all(known)[:OTHERS]
    log.forget(_all(known)[OTHERS:])
    bare = caller.f_code is BACKWARD and not made.owned and _only_its_future(words, before)
    log.seen[key] = CachedCall(log, made, num_lead, what, said, tensors, caller, there, others, bare)
    if known is not None:
        known.others = ()


def _all(seen: CachedCall | None) -> tuple[CachedCall, ...]:
    return () if seen is None else (seen, *seen.others)


def _only_its_future(words: memoryview, index: int) -> bool:
    """Whether somebody took the future of a call, and nobody waited for its handle."""
    word = FIRST + index % RECORDS * EACH
    flags = words[word + rings.WORD_FLAGS] if words[word] == index + 1 else 0
    return bool(flags & rings.FUTURE) and not flags & (rings.WAITED | rings.WAITING)
