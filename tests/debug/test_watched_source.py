"""Files compiled so that their handlers report what they handle."""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import CodeType

import pytest

from distsim.debug.evidence.watched_source import (
    CaughtLog,
    caught_here,
    compiled,
    report_to,
    watch_imports,
    watch_suppress,
    watch_tasks,
    watch_threads,
)
from distsim.debug.records import Caught

SOURCE = b'''"""A docstring."""
from __future__ import annotations
def step(i: Missing):
    try:
        return 1 / i
    except ZeroDivisionError as error:
        return -1
    finally:
        done.append(i)
done = []
answers = [step(i) for i in (0, 1, 0)]
'''


def run(source: bytes) -> tuple[dict[str, object], list[tuple[str, int]]]:
    """Names after a run of *source*, and what was reported: exception and line."""
    seen: list[tuple[str, int]] = []

    def report(error: BaseException, code: CodeType, line: int) -> None:
        seen.append((repr(error), line))

    names: dict[str, object] = {"__name__": "example"}
    with report_to(report):
        exec(compiled(source, "example.py"), names)
    return names, seen


def test_each_handled_exception_is_reported_with_its_line() -> None:
    """A handler that matches reports; a finally block does not. The program does what it did."""
    names, seen = run(SOURCE)
    assert seen == [("ZeroDivisionError('division by zero')", 6)] * 2
    assert names["answers"] == [-1, 1.0, -1]
    assert names["__doc__"] == "A docstring."


def test_what_no_handler_matches_is_not_reported() -> None:
    """An exception that goes past an except clause is not a handled one."""
    source = b"try:\n    try:\n        {}['x']\n    except ValueError:\n        pass\nexcept KeyError:\n    pass\n"
    assert run(source)[1] == [("KeyError('x')", 6)]


def test_lines_and_tracebacks_stay() -> None:
    """An exception raised in a handler has the line that the file has."""
    source = b"try:\n    1 / 0\nexcept ZeroDivisionError:\n    x = 1\n    raise ValueError\n"
    with pytest.raises(ValueError) as caught:
        run(source)
    trace = caught.value.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    assert trace is not None
    assert trace.tb_lineno == 5


def test_a_file_that_cannot_be_parsed_is_a_syntax_error_of_its_own() -> None:
    """The user's mistake is shown as Python shows it."""
    with pytest.raises(SyntaxError, match="invalid syntax") as caught:
        compiled(b"x = = 1\n", "mine.py")
    assert (caught.value.filename, caught.value.lineno) == ("mine.py", 1)


def test_a_report_that_fails_does_not_reach_the_program() -> None:
    """Whatever goes wrong with the report, the handler runs."""

    def report(error: BaseException, code: CodeType, line: int) -> None:
        raise OSError("no space left")

    names: dict[str, object] = {}
    with report_to(report):
        exec(compiled(SOURCE, "example.py"), names)
    assert names["answers"] == [-1, 1.0, -1]


def test_without_a_report_a_handler_costs_nothing_else() -> None:
    """Outside of a guarded job the call does nothing."""
    assert caught_here(3) is None


def test_imported_modules_are_watched_and_not_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of the user's reports, too, and what Python has cached of it stays the plain code."""
    (tmp_path / "its_module.py").write_bytes(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[int] = []
    with watch_imports(), report_to(lambda error, code, line: seen.append(line)):
        importlib.import_module("its_module")
    assert seen == [6, 6]
    assert not list(tmp_path.glob("__pycache__/*"))
    monkeypatch.delitem(sys.modules, "its_module")
    with report_to(lambda error, code, line: seen.append(line)):
        importlib.import_module("its_module")
    assert seen == [6, 6]


def handle(log: CaughtLog, error: BaseException, line: int, calls: int) -> None:
    log.add(error, handle.__code__, line, calls)


def test_the_last_handlers_are_kept_with_their_counts() -> None:
    """Of many handlers the last ones stay, each with how often, and after how many calls."""
    written: dict[int, Caught] = {}
    log = CaughtLog(written.__setitem__)
    for calls in range(5):
        handle(log, KeyError("x"), 7, calls)
    for line in range(100, 109):
        handle(log, ValueError(str(line)), line, 9)
    assert [(c.site.line, c.times, c.calls) for c in log.kept()][:2] == [(7, 5, 4), (100, 1, 9)]
    handle(log, OSError("full"), 200, 10)
    assert [c.site.line for c in log.kept()] == [*range(100, 109), 200]
    assert {c.site.line for c in written.values()} == {*range(100, 109), 200}
    assert log.kept()[-1].error == "OSError: full"
    assert log.kept()[-1].kind == "OSError"


LIBRARY = """
NOTE

def run(function):
    try:
        function()
    except ValueError:
        return None

def own():
    raise ValueError("its own")
"""


@pytest.mark.parametrize(("note", "most"), [("# CUDA out of memory", 1), ("# nothing", 0)])
def test_a_library_that_speaks_of_memory(note: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it handles counts if it crossed a frame of the user's; other libraries are left as they are."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    name = f"finder_{most}"
    (folder / f"{name}.py").write_text(LIBRARY.replace("NOTE", note))
    monkeypatch.syspath_prepend(str(folder))
    seen: list[int] = []
    names: dict[str, object] = {"__name__": "example"}
    with watch_imports(), report_to(lambda error, code, line: seen.append(line)):
        module = importlib.import_module(name)
        exec(compile("def step():\n    raise ValueError('of the user')", str(tmp_path / "user.py"), "exec"), names)
        module.run(names["step"])
        module.run(module.own)
    assert seen == [7] * most


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_exception_that_ends_a_thread_is_reported() -> None:
    """With the thread's name and the program's line that raised; one that leaves by sys.exit is not."""
    seen: list[tuple[str, int, str]] = []
    before = threading.excepthook

    def report(error: BaseException, code: CodeType, line: int, thread: str = "") -> None:
        seen.append((repr(error), line, thread))

    names: dict[str, object] = {}
    text = "def fail():\n    raise OSError(7)\ndef leave():\n    raise SystemExit(1)\n"
    exec(compile(text, "train.py", "exec"), names)
    with report_to(report), watch_threads():
        for target in ("fail", "leave"):
            thread = threading.Thread(target=names[target], name=f"to {target}")  # type: ignore[arg-type]
            thread.start()
            thread.join()
    assert seen == [("OSError(7)", 2, "to fail")]
    assert threading.excepthook is before


def test_suppress_reports_what_it_hides(tmp_path: Path) -> None:
    """At the line of the `with`; what it lets through is not reported."""
    path = tmp_path / "own.py"
    path.write_text("import contextlib\nwith contextlib.suppress(OSError):\n    raise OSError('torn')\n")
    seen: list[tuple[str, int]] = []

    def report(error: BaseException, code: CodeType, line: int, thread: str = "") -> None:
        seen.append((str(error), line))

    with report_to(report), watch_suppress():
        exec(compile(path.read_text(), str(path), "exec"), {})
        with pytest.raises(ZeroDivisionError), contextlib.suppress(KeyError):
            raise ZeroDivisionError
    assert seen == [("torn", 2)]


EXITS = b"""
from contextlib import ExitStack
class Safe:
    def __init__(self, hides):
        self.hides = hides
    def __enter__(self):
        return self
    def __exit__(self, kind, error, trace):
        for _ in range(2):
            if kind is OSError:
                return self.hides
        return None
class Any(Safe):
    def __exit__(self, *args):
        return True
def fail():
    raise OSError("torn")
with Safe(True):
    fail()
with Safe(True):
    done = 1
try:
    with Safe(False):
        fail()
except OSError:
    with Any(True):
        done = 2
with Any(True):
    {}["x"]
with ExitStack() as stack:
    stack.enter_context(Safe(True))
    fail()
"""


def test_an_exit_that_hides_an_exception_reports_it() -> None:
    """At the line of the `with`, through a stack of contexts, too; one that lets it pass, or hides none, does not."""
    names, seen = run(EXITS)
    assert seen == [("OSError('torn')", 18), ("OSError('torn')", 25), ("KeyError('x')", 28), ("OSError('torn')", 30)]
    assert names["done"] == 2


def test_what_a_library_hides_is_not_the_programs(tmp_path: Path) -> None:
    """Though the program has called it."""
    path = tmp_path / "site-packages" / "tool.py"
    text = "import contextlib\ndef close():\n    with contextlib.suppress(OSError):\n        raise OSError('torn')\n"
    library: dict[str, object] = {}
    exec(compile(text, str(path), "exec"), library)
    seen: list[int] = []
    with report_to(lambda error, code, line, thread="": seen.append(line)), watch_suppress():
        exec(compile("close()", str(tmp_path / "own.py"), "exec"), library)
    assert seen == []


def test_an_exception_that_ends_a_task_of_a_pool_is_reported() -> None:
    """Where nobody asks for the result, nobody hears of it; one that a program gives a future itself is none."""
    seen: list[tuple[str, int, str]] = []

    def report(error: BaseException, code: CodeType, line: int, thread: str = "") -> None:
        seen.append((repr(error), line, thread))

    names: dict[str, object] = {}
    exec(compile("def fail():\n    raise OSError(7)\n", "train.py", "exec"), names)
    with report_to(report), watch_tasks():
        with ThreadPoolExecutor(1, thread_name_prefix="load") as pool:
            future = pool.submit(names["fail"])  # type: ignore[arg-type]
        Future[int]().set_exception(exception=OSError("by hand"))
    assert isinstance(future.exception(), OSError)
    assert seen == [("OSError(7)", 2, "load_0's task")]
