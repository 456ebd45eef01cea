"""Makes a replacement look like the original, and the traceback of a user's exception."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

from distsim.debug.records.frames import is_ours, raised_at
from distsim.sim.isolation.process import SimProcess, current_task
from distsim.text.tracebacks import error_line, error_traceback, message, origins

# -- Makes a replacement look like the function of Python or torch that it replaces (`inspect.signature`, pickle).

_NAMES = ("__name__", "__qualname__", "__module__", "__doc__")


def resembling(real: Any, replacement: Any) -> Any:
    """Return *replacement* with the name, module, docstring and signature of the function or class *real*.

    Values that are not callable (a flag, a tuple of defaults) are returned unchanged. If a compiled function has no
    signature, the replacement keeps its own.
    """
    shown, looks = _function(replacement), _function(real)
    if shown is looks or not callable(looks) or not hasattr(shown, "__qualname__"):
        return replacement
    if getattr(shown, "__wrapped__", None) is looks:  # functools.wraps has done it, and inspect follows it
        return replacement
    for name in _NAMES:
        setattr(shown, name, getattr(looks, name, None))
    if isinstance(shown, FunctionType) and not isinstance(looks, type):
        shown.__wrapped__ = looks  # type: ignore[attr-defined]  # torch._dynamo unwraps torch.cuda.use_mem_pool
    signature = _signature(looks)
    if signature is not None:
        shown.__signature__ = signature
    return replacement


def class_for_ranks(real: type, *simulated: type) -> type:
    """Create a replacement of class *real* whose instances are *simulated* in a rank and real elsewhere.

    A program may subclass it, and name it in an annotation; subclasses are simulated.
    """

    def __new__(cls: type, *args: Any, **kwargs: Any) -> Any:
        return real(*args, **kwargs) if cls is stand_in and current_task() is None else object.__new__(cls)

    stand_in = type(real.__name__, simulated, {"__new__": __new__})
    return stand_in


def refusing_class(real: type, error: Callable[[], Exception]) -> type:
    """Create a replacement of class *real* that raises *error* when a rank creates an instance."""

    def __new__(cls: type, *args: Any, **kwargs: Any) -> Any:
        if current_task() is not None:
            raise error()
        return real(*args, **kwargs)

    return type(real.__name__, (real,), {"__new__": __new__})


_signatures: dict[int, tuple[Any, inspect.Signature | None]] = {}
"""Signatures by the function's id, with the function; computing that of a compiled function takes most of a
millisecond.
"""
_MOST = 2_000


def _signature(function: Any) -> inspect.Signature | None:
    known = _signatures.get(id(function))
    if known is None:
        if len(_signatures) >= _MOST:  # a program that makes functions anew
            _signatures.clear()
        try:
            known = function, inspect.signature(function)
        except (TypeError, ValueError):
            known = function, None
        _signatures[id(function)] = known
    return known[1]


def _function(value: Any) -> Any:
    return value.__func__ if isinstance(value, staticmethod | classmethod) else value


# -- What an exception of the user's program looks like.


class _Folding(traceback.StackSummary):
    """A formatted stack in which equal frames are formatted once, because Python parses the source for each frame of a
    recursion."""

    def __init__(self, frames: Iterable[traceback.FrameSummary]) -> None:
        super().__init__(frames)
        self._texts: dict[tuple[object, ...], str] = {}

    def format_frame_summary(self, frame_summary: traceback.FrameSummary, **how: Any) -> str:
        key = (frame_summary.filename, frame_summary.lineno, frame_summary.name, frame_summary.colno)
        if key not in self._texts:
            self._texts[key] = super().format_frame_summary(frame_summary, **how)  # colorize, from Python 3.14 on
        return self._texts[key]


def format_user_traceback(exc: BaseException) -> str:
    """Return the traceback as the program would have printed it for real: whole, without the simulator's frames."""
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


def _note_placeholder(process: SimProcess, exc: BaseException) -> None:
    """Note the placeholder that the program has read for the first time last, which may be the cause of *exc*."""
    reads = {} if process.accelerators is None else process.accelerators.values.reads
    last: Any = next(reversed(reads.items()), ((None, None), 0))
    (reader, newest), count = last
    causes = ValueError | IndexError | ArithmeticError | AssertionError
    if count == 1 and (isinstance(exc, causes) or type(exc) is RuntimeError):  # not out of memory, no lost rank
        process.port.note(
            f"rank {process.rank} had read {newest.expression or reader} at {newest.where}, whose value is unknown: if "
            "the error follows from its placeholder (--placeholder), --data real computes the value"
        )


def keep_failure(process: SimProcess, exc: BaseException) -> None:
    """Record the exception that ended *process*.

    This runs in the process's own thread, because formatting runs the user's code.
    """
    process.ending.exception = exc
    process.ending.error_text = message(exc)
    process.last_stack = raised_at(exc.__traceback__)
    process.ending.traceback_text = format_user_traceback(exc)
    process.ending.origins = origins(exc)
    _note_placeholder(process, exc)
    plain, left_out = process.ending.error_text.lower().replace("-", "_"), process.port.shared.libraries_left_out
    named = [library for library in left_out if library in plain]  # "xFormers is required"
    for library in named or (left_out if "install" in plain else ()):  # "amp not installed!", which is in apex
        process.port.note(
            f"{library} is not installed, and the program catches the ImportError: --gpu-libraries {library} gives "
            "the simulated machine a replacement"
        )
