"""Compiles the user's files so that each `except` block reports the exception that it handles.

Python has no hook for this before 3.12, and that of 3.12 (`sys.monitoring`) cannot tell a handler that matched from
a `finally` block. A changed syntax tree can: the first statement of each handler is a call, which costs nothing until
an exception is handled. Line numbers and tracebacks stay; nothing is written to `__pycache__`.

An installed library is left as it is, for parsing all of them takes seconds, but for files that speak of running out
of memory (accelerate's `find_executable_batch_size`, Lightning's batch size finder): what they handle is reported if it
has crossed a frame of the user's.
"""

from __future__ import annotations

import ast
import contextlib
import re
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import lru_cache
from importlib.machinery import SourceFileLoader
from traceback import walk_tb
from types import CodeType, FrameType
from typing import Any, Protocol

from distsim.debug.records import Caught, Site
from distsim.debug.records.frames import Owner, owner, raised_at, shown
from distsim.text.tracebacks import last_line

CAUGHT, LEFT = "__distsim_caught__", "__distsim_left__"
OUT_OF_MEMORY = re.compile(rb"out of memory|OutOfMemory", re.IGNORECASE)
MOST_KEPT = 10
"""Largest number of different handlers that are stored for a rank; the latest are kept."""
LONGEST = 300
"""Largest number of characters that are stored of an exception."""


class Report(Protocol):
    """Takes an exception, the code that handles it, and the line of its `except`; or those that raised it, and the name
    of the thread that it ended.
    """

    def __call__(self, error: BaseException, code: CodeType, line: int, thread: str = "") -> None: ...


_reports: list[Report] = []


class Change(Protocol):
    """A change of a syntax tree, and the function that the changed tree calls."""

    module: str
    function: str
    name: str
    """Name of the attribute in the changed tree."""

    def apply(self, tree: ast.Module) -> bool:
        """Change the tree in place. Return whether something was changed."""
        ...


class _Handlers:
    """Puts a call at the head of each handler."""

    module, function, name = __name__, "caught_here", CAUGHT

    def apply(self, tree: ast.Module) -> bool:
        handlers = [node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)]
        for handler in handlers:
            call = ast.Call(ast.Name(CAUGHT, ast.Load()), [ast.Constant(handler.lineno)], [])
            statement = ast.copy_location(ast.Expr(call), handler)
            for node in ast.walk(statement):  # one line, or a tracer would see the whole handler run
                if isinstance(node, ast.expr | ast.stmt):
                    ast.copy_location(node, handler)
                    node.end_lineno, node.end_col_offset = handler.lineno, handler.col_offset
            handler.body.insert(0, statement)
        return bool(handlers)


HANDLERS: Change = _Handlers()


class _Exits:
    """Passes what each `__exit__` returns through a function: if that is true, the exception ends there."""

    module, function, name = __name__, "left_here", LEFT

    def apply(self, tree: ast.Module) -> bool:
        methods = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "__exit__"]
        answers = [n for m in methods for n in ast.walk(m) if isinstance(n, ast.Return) and n.value is not None]
        for answer in answers:
            assert answer.value is not None
            passed = ast.Call(ast.copy_location(ast.Name(LEFT, ast.Load()), answer), [answer.value], [])
            answer.value = ast.copy_location(passed, answer)
        return bool(answers)


EXITS: Change = _Exits()


def left_here(answer: Any) -> Any:
    """Report the exception that the `__exit__` around this call hides, at the line of its `with`; return *answer*."""
    error, method = sys.exception(), sys._getframe(1)
    if error is not None and _reports and method.f_code.co_name == "__exit__" and answer:
        with contextlib.suppress(Exception):
            values = method.f_locals.values()
            given = (v for value in values for v in (value if isinstance(value, tuple) else (value,)))
            if any(value is error for value in given):
                _hidden(error, method.f_back)
    return answer


def _hidden(error: BaseException, frame: FrameType | None) -> None:
    """Report an exception that a `with` of the user's hides; *frame* has its line, or an `ExitStack` is between."""
    while frame is not None and frame.f_code.co_filename == contextlib.__file__:
        frame = frame.f_back
    if frame is not None and owner(frame.f_code.co_filename) is Owner.USER:
        _reports[-1](error, frame.f_code, frame.f_lineno)


def caught_here(line: int) -> None:
    """Report the exception that the current handler handles. Called at the start of each handler."""
    error = sys.exception()
    if error is not None and _reports:
        with contextlib.suppress(Exception):  # nothing of ours may end the user's handler
            code = sys._getframe(1).f_code
            if owner(code.co_filename) is not Owner.LIBRARY or _crossed(error):
                _reports[-1](error, code, line)


def ended_thread(error: BaseException, thread: str) -> None:
    """Report the exception that ended a thread of the program, at the last line of the program that it crossed."""
    crossed = _crossed(error)
    if crossed and _reports and not isinstance(error, SystemExit):
        frame, line = crossed[-1]
        _reports[-1](error, frame.f_code, line, thread)


def _crossed(error: BaseException) -> list[tuple[FrameType, int]]:
    """Return the frames of the user that *error* crossed, outermost first, with their lines."""
    steps = walk_tb(error.__traceback__)
    return [(frame, line) for frame, line in steps if owner(frame.f_code.co_filename) is Owner.USER]


@contextlib.contextmanager
def report_to(report: Report) -> Iterator[None]:
    """Return a context that receives the reports; the innermost one gets them."""
    _reports.append(report)
    try:
        yield
    finally:
        _reports.remove(report)


@lru_cache(maxsize=256)
def compiled(source: bytes, path: str, *more: Change) -> CodeType:
    """Return the code of a file, changed by `HANDLERS`, `EXITS` and *more*; unchanged if its tree cannot be changed."""
    try:
        tree = ast.parse(source, path)
        used = [change for change in (HANDLERS, EXITS, *more) if change.apply(tree)]
        if used:
            at = _after_docstring(tree)
            first = tree.body[at - 1] if at else None
            for change in used:
                names = [ast.alias(change.function, change.name)]
                statement = ast.ImportFrom(change.module, names, 0)
                line = 1 if first is None else first.end_lineno or 1
                statement.lineno = statement.end_lineno = line
                statement.col_offset = statement.end_col_offset = 0
                names[0].lineno = names[0].end_lineno = line
                names[0].col_offset = names[0].end_col_offset = 0
                tree.body.insert(at, statement)
            return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        pass
    return compile(source, path, "exec", dont_inherit=True)


def _after_docstring(tree: ast.Module) -> int:
    """Return the position after the docstring and the imports from `__future__`."""
    at = int(ast.get_docstring(tree, clean=False) is not None)
    while at < len(tree.body):
        statement = tree.body[at]
        if not (isinstance(statement, ast.ImportFrom) and statement.module == "__future__"):
            break
        at += 1
    return at


@contextlib.contextmanager
def _in_place_of(holder: Any, name: str, replacement: Any) -> Iterator[None]:
    """Return a context in which *holder* has this attribute; what replaces it in turn stays."""
    before = vars(holder).get(name)
    setattr(holder, name, replacement)
    try:
        yield
    finally:
        if getattr(holder, name) is replacement and before is not None:
            setattr(holder, name, before)
        elif getattr(holder, name) is replacement:
            delattr(holder, name)  # it is inherited


def watch_imports() -> contextlib.AbstractContextManager[None]:
    """Compile the user's modules that are imported from now on with `compiled`.

    So are modules of installed libraries that mention running out of memory.
    """
    original = SourceFileLoader.get_code

    def get_code(self: SourceFileLoader, fullname: str) -> CodeType | None:
        path = str(self.get_filename(fullname))
        if type(self) is SourceFileLoader and (whose := owner(path)) in (Owner.USER, Owner.LIBRARY):
            source = self.get_data(path)
            if whose is Owner.USER or OUT_OF_MEMORY.search(source):
                return compiled(source, path)
        return original(self, fullname)

    return _in_place_of(SourceFileLoader, "get_code", get_code)


def watch_threads() -> contextlib.AbstractContextManager[None]:
    """Report the exceptions that end threads from now on."""
    original = threading.excepthook

    def excepthook(args: threading.ExceptHookArgs) -> None:
        with contextlib.suppress(Exception):  # nothing of ours may hide the exception
            if args.exc_value is not None:
                ended_thread(args.exc_value, "" if args.thread is None else args.thread.name)
        original(args)

    return _in_place_of(threading, "excepthook", excepthook)


def watch_tasks() -> contextlib.AbstractContextManager[None]:
    """Report the exceptions that end tasks of a pool from now on: nobody hears of them who does not ask the future."""
    original = Future.set_exception

    def set_exception(self: Future[Any], exception: BaseException | None) -> None:
        with contextlib.suppress(Exception):
            if exception is not None:
                ended_thread(exception, f"{threading.current_thread().name}'s task")
        original(self, exception)

    return _in_place_of(Future, "set_exception", set_exception)


def watch_suppress() -> contextlib.AbstractContextManager[None]:
    """Report the exceptions that `contextlib.suppress` of the program hides from now on, at the line of its `with`."""
    leave = contextlib.suppress.__exit__

    def suppressed(self: contextlib.suppress, kind: Any, error: Any, trace: Any) -> bool:
        hidden = leave(self, kind, error, trace)
        if hidden and _reports:
            _hidden(error, sys._getframe(1))
        return bool(hidden)

    return _in_place_of(contextlib.suppress, "__exit__", suppressed)


class CaughtLog:
    """The last exceptions that one rank handled, by handler and type."""

    def __init__(self, write: Callable[[int, Caught], None] | None = None) -> None:
        """Create the log. *write* is called with the slot (of `MOST_KEPT`) and its new content."""
        self._kept: dict[tuple[type[BaseException], CodeType, int], tuple[int, Caught]] = {}
        self._write = write

    def add(self, error: BaseException, code: CodeType, line: int, calls: int, thread: str = "") -> None:
        """Record that the rank has handled *error* after *calls* calls, or that it ended *thread*."""
        key = (type(error), code, line)
        slot, before = self._kept.pop(key, (len(self._kept), None))
        if before is None:
            if slot == MOST_KEPT:
                slot, _ = self._kept.pop(next(iter(self._kept)))
            site = Site(shown(code.co_filename), line, code.co_qualname)
            now = Caught(last_line(error)[:LONGEST], site, 1, calls, thread, raised_at(error.__traceback__))
        else:
            times, error_text, crossed = before.times + 1, before.error, before.crossed
            if not times & (times - 1):  # seldom: it takes long
                error_text, crossed = last_line(error)[:LONGEST], raised_at(error.__traceback__)
            now = Caught(error_text, before.site, times, calls, thread, crossed)
        self._kept[key] = slot, now  # the last one is the newest
        if self._write is not None:
            self._write(slot, now)

    def kept(self) -> tuple[Caught, ...]:
        """Return the stored reports, the newest last."""
        return tuple(one for _, one in self._kept.values())
