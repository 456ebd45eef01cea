"""What an exception of the user's program looks like."""

from __future__ import annotations

import traceback
from collections.abc import Iterable

from distsim.debug.messages.error_text import error_line, error_traceback, message, origins
from distsim.debug.records.frames import is_ours, raised_at
from distsim.sim.isolation.process import SimProcess

__all__ = ["format_user_traceback", "keep_failure"]


class _Folding(traceback.StackSummary):
    """A stack whose equal frames are put into words once: Python parses the source for each of a recursion's."""

    def __init__(self, frames: Iterable[traceback.FrameSummary]) -> None:
        super().__init__(frames)
        self._texts: dict[tuple[object, ...], str] = {}

    def format_frame_summary(self, frame_summary: traceback.FrameSummary) -> str:
        place = (frame_summary.filename, frame_summary.lineno, frame_summary.name, frame_summary.colno)
        if place not in self._texts:
            self._texts[place] = super().format_frame_summary(frame_summary)
        return self._texts[place]


def format_user_traceback(exc: BaseException) -> str:
    """The traceback as the program would have printed it for real: whole, without the simulator's frames."""
    try:
        shown = traceback.TracebackException.from_exception(exc)
    except Exception:  # what hangs on it is none of Python's: `__cause__` may be a property that raises
        return f"{error_line(exc)}\n"
    todo: list[traceback.TracebackException | None] = [shown]
    while todo:
        part = todo.pop()
        if part is None:
            continue
        part.stack = _Folding(frame for frame in part.stack if not is_ours(frame.filename))
        todo += [part.__cause__, part.__context__, *(part.exceptions or ())]
    return error_traceback(shown)


def keep_failure(process: SimProcess, exc: BaseException) -> None:
    """What *process* died of, asked for in its own thread: words of an exception are the user's code."""
    process.exception = exc
    process.error_text = message(exc)
    process.last_stack = raised_at(exc.__traceback__)
    process.traceback_text = format_user_traceback(exc)
    process.origins = origins(exc)
