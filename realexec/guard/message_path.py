"""Wraps torch.distributed's functions for messages, so that repeated calls take the fast path.

It is `fast_path.through` for one tensor and one peer, written out in one function: a message of a few bytes costs gloo
a third of what a collective does, so every call and every list of Python's is felt. What public functions run in place
of their own code is here, too.
"""

from __future__ import annotations

from collections.abc import Callable
from sys import _getframe as frame_above
from sys import exception as exception_on_its_way
from threading import get_ident
from time import monotonic_ns
from typing import Any

import torch.distributed.distributed_c10d as c10d

from distsim.debug.messages.error_text import error_line
from distsim.debug.rings import layout as rings
from distsim.realexec.guard.fast_path import COUNT, FEW, USUAL, WORLD, Public, coalescing, default_group, learn, pack
from distsim.realexec.guard.handle import MessageHandle
from distsim.realexec.guard.known import find
from distsim.torch_compat import groups, works

__all__ = ["BARE", "HIDDEN", "posts"]

Backend = groups.BACKEND.get(None)
SEND: Any = getattr(Backend, "send", None)
RECV: Any = getattr(Backend, "recv", None)
dispatch_modes, function_modes = works.DISPATCH_MODES.get(works.unknown), works.FUNCTION_MODES.get(works.unknown)
profiler_enabled = works.PROFILES.get(works.unknown)
C10D = vars(c10d)
FIRST, RECORDS, EACH = rings.RECORDS_AT // 8, rings.RECORDS, rings.RECORD_WORDS
FLAGS, ENDED = rings.WORD_FLAGS, rings.WORD_COMPLETED
HIDDEN = "_distsim_"


def posts(name: str, up: int = 1) -> Callable[[Public], Public]:
    """`send`, `recv`, `isend` or `irecv`. *up*: how many frames above the entrance the public function's is."""
    later, receives = name.startswith("i"), name.endswith("recv")
    method, above = RECV if receives else SEND, up + 1
    by_group = name != "recv"
    """The backend is told of the group's own rank as it was given; `recv` answers with the global one."""

    def way(long: Public) -> Public:
        def post(tensor: Any, peer: Any, group: Any, tag: Any, group_peer: Any) -> Any:
            if type(tag) is not int or not (type(peer) is int or (by_group and type(group_peer) is int)):
                return long(tensor, peer, group, tag, group_peer)
            world = C10D[WORLD]
            if world is not USUAL:
                return long(tensor, peer, group, tag, group_peer)
            guard = default_group(world) if group is None else group
            fast = getattr(guard, "fast", None)
            what = (name, peer, group_peer, tag)
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
                    seen.what == what
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
                            seen = find(log, what, (tensor,), (), caller)
                            break
                    else:
                        if frame.f_trace is not seen.mark:
                            seen = find(log, what, (tensor,), (), caller)
                else:
                    seen = find(log, what, (tensor,), (), caller)
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
                return learn(long, args, what, (tensor,), 1, (), group, later, above)
            before.next = log.before = seen
            made = seen.made
            ordinal = made[0] = made[0] + 1
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


BARE: dict[str, tuple[Any, Callable[[Public], Public]]] = {
    "isend": (isend, posts("isend")),
    "irecv": (irecv, posts("irecv")),
}
"""Without decorator: code that calls what it finds in torch's module under `HIDDEN`, and the entrance put there."""
