"""What an exception of the user's program looks like."""

from __future__ import annotations

import traceback

from distsim.debug.frames import is_ours

__all__ = ["format_user_traceback"]


def format_user_traceback(exc: BaseException) -> str:
    """The traceback as the program would have printed it for real: whole, without the simulator's frames."""
    shown = traceback.TracebackException.from_exception(exc)
    part: traceback.TracebackException | None = shown
    while part is not None:
        kept = [frame for frame in part.stack if not is_ours(frame.filename)]
        part.stack = traceback.StackSummary.from_list(kept)
        part = part.__cause__ or part.__context__
    return "".join(shown.format())
