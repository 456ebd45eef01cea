"""What an exception of the user's program looks like."""

from __future__ import annotations

import traceback

from distsim.debug.error_text import error_line, error_traceback
from distsim.debug.frames import is_ours

__all__ = ["format_user_traceback"]


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
        kept = [frame for frame in part.stack if not is_ours(frame.filename)]
        part.stack = traceback.StackSummary.from_list(kept)
        todo += [part.__cause__, part.__context__, *(part.exceptions or ())]
    return error_traceback(shown)
