"""Run a script under the guard, as one rank: `python -m distsim.debug train.py ...` (or `-m package.module ...`).

Use it with a launcher of your own: `torchrun --no-python python -m distsim.debug train.py`, or under srun. The
settings come from the environment (`DISTSIM_LEVEL`, `DISTSIM_ON_HANG`, `DISTSIM_DIR`, ...). With `--verbose`, every
rank prints at its start where its flight records and the report are.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import io
import os
import runpy
import sys
import types
from collections.abc import Callable
from types import TracebackType
from typing import Any

from distsim.debug.settings import say_once_a_job
from distsim.errors import UsageError


def main(argv: list[str]) -> None:
    """Install the guard, then run the script as `__main__` with its own arguments."""
    if argv[:1] == ["--verbose"]:
        os.environ["DISTSIM_VERBOSE"] = "1"
        argv = argv[1:]
    module = bool(argv) and argv[0] == "-m"
    words = argv[1:] if module else argv
    if argv[:1] in (["-h"], ["--help"]):
        print(f"usage: python -m distsim.debug [--verbose] [-m] SCRIPT [ARGS ...]\n\n{(__doc__ or '').strip()}")
        return
    if not words or words[0].startswith("-"):
        raise UsageError(
            f"expected a script or -m MODULE, got {' '.join(argv) or 'nothing'}; {__doc__.splitlines()[0]}"
        )
    if module and importlib.util.find_spec(words[0].partition(".")[0] or "nothing") is None:
        raise UsageError(f"no module {words[0]}: not in {os.getcwd()}, and not installed")
    source = b"" if module else _source(words[0])
    guard = _installed_guard()
    sys.argv[:] = words
    try:
        if module:
            runpy._run_module_as_main(words[0], alter_argv=True)  # type: ignore[attr-defined]
        else:
            _run_script(words[0], source)
    except BaseException as error:
        error = error.with_traceback(_from_script(error.__traceback__))
        session = None if guard is None else guard.current_session()
        if session is not None:
            _leave_word(session, error)
        if isinstance(error, (SystemExit, KeyboardInterrupt)):
            sys.excepthook = functools.partial(_print_from_script, sys.excepthook)
            raise
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


def _installed_guard() -> Any:
    """Install the guard and return its module; None, after a line, if torch cannot be imported.

    The script runs in any case: it may not need torch, or may report the problem itself.
    """
    try:
        guard = importlib.import_module("distsim.realexec.install")
    except Exception as error:
        from distsim.torch_compat.names import GUARD
        from distsim.torch_compat.releases import torch_refusal

        refusal = torch_refusal(error, GUARD)
        if refusal is None:
            raise
        say_once_a_job(f"the job runs without a guard: {refusal}")
        return None
    guard.install()
    return guard


def _source(path: str) -> bytes:
    """Return the text of a script, which may be missing on this host: that is no fault of a rank."""
    try:
        with io.open_code(path) as file:
            return file.read()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from None


def _run_script(path: str, source: bytes) -> None:
    """Run a script like `python path`, in a `__main__` that lives as long as the process."""
    from distsim.debug.evidence.watched_source import compiled

    script = types.ModuleType("__main__")
    script.__dict__.update(__file__=path, __builtins__=__builtins__)
    sys.modules["__main__"] = script
    sys.path[0] = os.path.dirname(os.path.abspath(path))
    exec(compiled(source, path), script.__dict__)


def _leave_word(session: Any, error: BaseException) -> None:
    """Write the exception down; a signal handler (a data loader's, for a worker that died) may raise meanwhile."""
    for _ in range(3):
        try:
            session.raised(error)
            return
        except Exception:
            continue


def _print_from_script(
    hook: Callable[..., Any], kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Call the exception hook without the frames above the script, which raising the error again has added."""
    trace = _from_script(trace)
    hook(kind, error.with_traceback(trace), trace)


def _from_script(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback, starting at the script's first frame."""
    ours = (f"{os.path.dirname(__file__)}{os.sep}", "<frozen runpy>")
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(ours):
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UsageError as error:
        print(f"distsim: error: {error}", file=sys.stderr)
        sys.exit(2)
