"""Output of ranks: each line once, complete, with its rank in front; or one file per rank."""

from __future__ import annotations

import codecs
import contextlib
import functools
import io
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from distsim.errors import UsageError
from distsim.sim.isolation.for_ranks import patch_for_ranks
from distsim.sim.kernel.task import current_process
from distsim.text.output_files import open_output

# -- What ranks print: every line once, whole, behind its rank; or one file per rank.

_LONGEST_LINE = 1 << 16
_NUMBER = re.compile(r"\d+")
_MOST_SAID = 1_000


class RankStream(io.TextIOBase):
    """The stdout or stderr of one process."""

    encoding = "utf-8"
    errors = "replace"

    def __init__(
        self, write_line: Callable[[str], None], path: Path | None = None, raw: Any = None, fresh: bool = True
    ) -> None:
        self._write_line = write_line
        self._partial = ""
        if path is not None and fresh:
            open_output(path).close()
        self._file = None if path is None else path.open("a", encoding="utf-8", buffering=1)
        self._raw = raw
        self.muted = False
        self.said: set[str] = set()
        """Lines that were written, without their numbers."""

    @functools.cached_property
    def buffer(self) -> _Bytes:
        """Return the binary stream below the text stream. Most programs only print."""
        return _Bytes(self)

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        if self.muted:
            return len(text)
        if len(self.said) < _MOST_SAID and not text.isspace():
            self.said.add(_NUMBER.sub("#", text))
        if self._file is not None:
            self._file.write(text)
            return len(text)
        if "\n" not in text and len(self._partial) < _LONGEST_LINE:
            self._partial += text
            return len(text)
        whole = self._partial + text
        lines = whole.split("\n")
        self._partial = lines.pop()
        for line in lines:
            self._write_line(line.removesuffix("\r").rsplit("\r", 1)[-1])  # a progress bar's last state
        if len(self._partial) >= _LONGEST_LINE:
            self._write_line(self._partial)
            self._partial = ""
        return len(text)

    def writable(self) -> bool:
        return True

    def flush(self) -> None:
        if self._file is not None and not self._file.closed:
            self._file.flush()

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return _descriptor(self._raw)

    @property
    def log_descriptor(self) -> int | None:
        """Return the descriptor of the file for the lines; None without one."""
        return None if self._file is None or self._file.closed else self._file.fileno()

    def finish(self) -> None:
        """Print the last unfinished line and close the rank's file; later writes go nowhere."""
        if "buffer" in vars(self):
            self.buffer.finish()
        if self._partial and not self.muted:
            self._write_line(self._partial)
            self._partial = ""
        if self._file is not None:
            self._file.close()
        self.muted = True


class HeldOutput:
    """Replacement for *stream* in a run that may restart: output appears once `release` is called."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._kept: list[str] | None = []

    @property
    def encoding(self) -> str:
        return self._stream.encoding

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str) -> None:
        if self._kept is None:
            self._stream.write(text)
        else:
            self._kept.append(text)

    @property
    def is_shown(self) -> bool:
        return self._kept is None

    def release(self) -> None:
        kept, self._kept = self._kept, None
        for text in kept or ():
            _put(self._stream, text.removesuffix("\n"))

    def drop(self) -> None:
        """Discard the held output, because the run restarts."""
        self._kept = None


Shown = TextIO | HeldOutput
"""Destination of the ranks' lines."""


class _Bytes(io.RawIOBase):
    """`sys.stdout.buffer` of a rank."""

    def __init__(self, stream: RankStream) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, data: Any) -> int:
        self._stream.write(self._decoder.decode(bytes(data)))
        return len(data)

    def writable(self) -> bool:
        return True

    def flush(self) -> None:
        self._stream.flush()

    def finish(self) -> None:
        self._stream.write(self._decoder.decode(b"", final=True))


class StreamProxy(io.TextIOBase):
    """Replacement for `sys.stdout` or stderr that sends each write to the stream of the running process."""

    errors = "replace"
    mode = "w"
    line_buffering = True
    write_through = False

    def __init__(self, real: TextIO, which: str) -> None:
        self._real = real
        self._which = which
        self.name = f"<{which}>"

    def _target(self) -> Any:
        process = current_process()
        stream = None if process is None else getattr(process, self._which)
        return self._real if stream is None else stream

    def write(self, text: str) -> int:
        return int(self._target().write(text))

    def flush(self) -> None:
        self._target().flush()

    def close(self) -> None:
        """Do nothing: a rank that closes its stdout must not close that of the others."""

    def reconfigure(self, **settings: object) -> None:
        """Do nothing: output is line-buffered UTF-8."""

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return bool(self._target().isatty())

    def fileno(self) -> int:
        return _descriptor(self._real)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return str(getattr(self._target(), "encoding", "utf-8"))

    @property
    def buffer(self) -> Any:
        return self._target().buffer


def open_streams(
    label: Callable[[], str], fresh: bool, width: int, log_dir: str | None, stdout: Shown, stderr: Shown
) -> tuple[RankStream, RankStream]:
    """Return the two output streams of a process.

    They print lines with `[label]` in front, or write the files `LOG_DIR/<label>/stdout.log` and `stderr.log`, as
    torchrun names them: *fresh* ones, or those that a process with that label has begun. *label* is called for every
    line, because a process may turn out to be a launcher later; an empty label adds nothing.
    """
    if log_dir is not None:
        folder = Path(log_dir) / label()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--log-dir {log_dir}: the folder {folder} cannot be made ({error.strerror})") from None
        return (
            RankStream(_drop, folder / "stdout.log", stdout, fresh),
            RankStream(_drop, folder / "stderr.log", stderr, fresh),
        )

    def put(stream: Shown) -> Callable[[str], None]:
        return lambda line: _put(stream, f"[{name:>{width}}] {line}" if (name := label()) else line)

    return RankStream(put(stdout), raw=stdout), RankStream(put(stderr), raw=stderr)


def _descriptor(stream: Any) -> int:
    """Return a descriptor for faulthandler and subprocesses; the process's own stderr if *stream* is only in memory."""
    try:
        return int(stream.fileno())
    except (AttributeError, OSError):
        return 2


def _drop(line: str) -> None:
    pass


def _put(stream: Shown, line: str) -> None:
    try:
        stream.write(line + "\n")
    except UnicodeEncodeError:  # the terminal is not UTF-8
        stream.write(line.encode(stream.encoding or "ascii", "replace").decode(stream.encoding or "ascii") + "\n")
    except ValueError:  # the stream was closed under us
        if sys.__stderr__ is not None:
            sys.__stderr__.write(line + "\n")


# -- `logging` per simulated process: the root logger, the loggers it makes, its handlers.
#
# Loggers of the packages that all processes share are shared like these, whether they were imported before the
# simulation or by one of its processes; one that configures such a logger gives it a state of its own.

_manager = logging.Logger.manager
_module: dict[str, Any] = vars(logging)
"""Past `__setattr__`, which shared modules have while a simulation runs."""
_real_shutdown = logging.shutdown


class SharedCache(dict[int, bool]):
    """The cache of a shared logger's `isEnabledFor`: its answer depends on the process, so it keeps none."""

    def __setitem__(self, level: int, enabled: bool) -> None:
        pass


class _Importing(threading.local):
    shared = False
    """The thread imports a module that all processes share."""


_importing = _Importing()


@contextlib.contextmanager
def made_for_all(shared: bool) -> Iterator[None]:
    """Return a context in which loggers that the calling thread creates are shared by all ranks, or not if not
    *shared*.
    """
    before, _importing.shared = _importing.shared, shared
    try:
        yield
    finally:
        _importing.shared = before


def is_made_for_all() -> bool:
    """Return whether the calling thread imports a module that all processes share."""
    return _importing.shared


_LOST_AT_MOST = 10_000
"""Upper bound of the number of ranks that end while another thread counts references of the same object."""
_kept: list[object] = []


def outlive_threads() -> None:
    """Keep references to objects that torch's C++ releases when a thread ends. Called before the first rank begins.

    `dtensor_dispatch_logger` and `logging_DEBUG` are `thread_local py::object`s (torch 2.13,
    torch/csrc/autograd/python_variable.cpp), destroyed after the thread has left Python: their reference counts fall
    without the interpreter lock, concurrently with the running rank. If that were the last reference, or if a count
    were lost, an object would be freed without the lock, and the process would crash.
    """
    if not _kept:
        _kept.extend([logging.getLogger("torch.distributed.tensor._dispatch"), logging.DEBUG] * _LOST_AT_MOST)


_forgetful: list[Any] = []
"""All loggers at the last time when none of them had a cached level."""


def forget_levels() -> None:
    """Clear the cached levels of all existing loggers at the start of a simulation."""
    loggers = list(_manager.loggerDict.values())
    if loggers == _forgetful:  # as objects: no step of Python's for each
        return
    for logger in loggers:
        if isinstance(logger, logging.Logger) and type(logger._cache) is not SharedCache:  # type: ignore[attr-defined]
            logger._cache = SharedCache()  # type: ignore[attr-defined]
    _forgetful[:] = loggers


def log_patches() -> list[tuple[Any, str, Any]]:
    """Return patches (holder, attribute, replacement) for code that configures a logger."""

    def shutdown(task: Any, *handlers: Any) -> None:
        if task.process.interpreter.logs is None or handlers:
            _real_shutdown(*handlers)
        else:
            task.process.interpreter.logs.shut_down()

    patches: list[tuple[Any, str, Any]] = [
        (holder, name, _configuring(getattr(holder, name)))
        for holder, name in (
            (logging.Logger, "setLevel"),
            (logging.Logger, "addHandler"),
            (logging.Logger, "removeHandler"),
            (logging.Filterer, "addFilter"),
            (logging.Filterer, "removeFilter"),
        )
    ]
    return [*patches, patch_for_ranks(logging, "shutdown", shutdown)]


def _configuring(real: Any) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        process = current_process()
        if process is not None and process.interpreter.logs is not None:
            process.interpreter.logs.configure(self)
        return real(self, *args, **kwargs)

    return call
