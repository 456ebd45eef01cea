"""A traceback of the user's program is the user's: the guard's own frames stay out of it."""

from __future__ import annotations

from types import TracebackType

from distsim.debug.records.frames import is_ours

__all__ = ["hide_own_frames"]


def hide_own_frames(error: BaseException) -> None:
    """Take the guard's frames out of the tracebacks of *error* and of what it came from. What looks like a fault
    of the guard's own (a TypeError, say, raised in one of its frames) keeps them."""
    todo: list[BaseException | None] = [error]
    seen: set[int] = set()
    while todo:
        one = todo.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        todo += [one.__cause__, one.__context__]
        steps = _steps(one.__traceback__)
        theirs = [step for step in steps if not _ours(step)]
        if theirs and (theirs[-1] is steps[-1] or isinstance(one, (RuntimeError, ValueError))):
            for step, following in zip(theirs, [*theirs[1:], None], strict=True):
                step.tb_next = following
            one.__traceback__ = theirs[0]


def _steps(trace: TracebackType | None) -> list[TracebackType]:
    steps = []
    while trace is not None:
        steps.append(trace)
        trace = trace.tb_next
    return steps


def _ours(step: TracebackType) -> bool:
    return is_ours(step.tb_frame.f_code.co_filename)
