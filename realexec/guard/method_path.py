"""Methods of a group, as entrances to the short way (`fast_path`): by them C++ comes (DDP's reducer, functional
collectives), and so do coalesced calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch.distributed.distributed_c10d as c10d

from distsim.debug.records.arguments import FIELDS, Reader
from distsim.realexec.guard.fast_path import MISSED, through
from distsim.realexec.guard.handle import KEEPS_ALIVE, Handle, MessageHandle, MessageWork, keep_alive
from distsim.realexec.guard.known import BACKWARD, looks_of, may_be_kept, remember
from distsim.realexec.guard.recorder import Made

__all__ = ["Words", "again", "keep", "words_of"]

C10D = vars(c10d)

Words = Callable[[tuple[int, ...], tuple[Any, ...], bool], tuple[Sequence[Any], bool, Any]]
"""Of a group's ranks and a method's arguments: the tensors, whether the caller goes on, what else is said.
The caller is C++ of which it is known that it goes on, if so.
TypeError, ValueError or the like where they are none of the method's, or no backend takes them as they are."""


def words_of(op: str, read: Reader) -> Words:
    """What reads the arguments of a method of *op*: C++ calls the first two kinds at every step, so they are read
    without a `Call`."""
    fields = FIELDS[op]
    reduces, rooted = fields.reduces, fields.rooted

    def in_place(ranks: tuple[int, ...], args: tuple[Any, ...], goes_on: bool) -> tuple[Sequence[Any], bool, Any]:
        tensors, opts = args
        if type(tensors) is not list:
            raise TypeError
        later = goes_on or opts.asyncOp is not False
        return tensors, later, (later, hash(opts.reduceOp) if reduces else 0, opts.rootRank if rooted else 0)

    def out_in(ranks: tuple[int, ...], args: tuple[Any, ...], goes_on: bool) -> tuple[Sequence[Any], bool, Any]:
        output, source, opts = args
        tensors = (*output, *source) if type(output) is list is type(source) else (output, source)
        later = goes_on or opts.asyncOp is not False
        return tensors, later, (later, hash(opts.reduceOp) if reduces else 0, opts.rootRank if rooted else 0)

    def other(ranks: tuple[int, ...], args: tuple[Any, ...], goes_on: bool) -> tuple[Sequence[Any], bool, Any]:
        call = read(ranks, args, {})
        if not call.direct:
            raise TypeError
        return (*call.inputs, *call.outputs), call.is_async, (call.key, call.is_async, call.peer, call.tag)

    if fields.in_place:
        return in_place
    return out_in if "tensor" in op else other


class _Ended:
    """The handle of a synchronous call that has ended: torch's own function waits for it at once."""

    def wait(self, timeout: Any = None) -> bool:
        return True


ENDED = _Ended()


def again(
    guard: Any, method: Any, name: str, words: Words, args: tuple[Any, ...], caller: FrameType
) -> tuple[Any, Any]:
    """Make a call of a group's method by the short way: its handle, or MISSED; and what to `keep` it by. Synchronous
    ones are torch's own."""
    try:
        tensors, later, said = words(guard.group_log.ranks, args, caller.f_code is BACKWARD)
    except (TypeError, ValueError, AttributeError, LookupError):
        return MISSED, None
    if not (later or caller.f_globals is C10D):
        return MISSED, None
    answer = through(method, name, tensors, args, said, guard, later, caller)
    if answer is MISSED:
        return MISSED, (name, tensors, said)
    if answer is None:
        return ENDED, None
    if type(answer) is MessageHandle and caller.f_globals is not C10D:
        answer = MessageWork.of(answer)
    if KEEPS_ALIVE and isinstance(answer, Handle):
        keep_alive(answer)
    return answer, None


def keep(guard: Any, by: tuple[str, Sequence[Any], Any], made: Made, caller: FrameType) -> None:
    """Remember a call of a method, which has just been made the long way."""
    name, tensors, said = by
    looks = looks_of(tensors)
    if looks is not None and may_be_kept(guard, made, made.call.is_async, caller):
        words = guard.recorder.ring.words
        remember(guard.group_log, name, tensors, looks, made, len(made.args), said, caller, words)
