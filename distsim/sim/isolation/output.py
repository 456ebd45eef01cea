"""What ranks print: every line once, whole, behind its rank; or one file per rank."""

from __future__ import annotations

import codecs
import functools
import io
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from distsim.errors import UsageError
from distsim.sim.kernel.task import current_process

__all__ = ["Held", "RankStream", "StreamProxy", "open_streams"]

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
            path.write_bytes(b"")
        self._file = None if path is None else path.open("a", encoding="utf-8", buffering=1)
        self._raw = raw
        self.muted = False
        self.said: set[str] = set()
        """What was written to it, without numbers."""

    @functools.cached_property
    def buffer(self) -> _Bytes:
        """What takes bytes; most programs only print."""
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
        """Of the file the lines go to; None where there is none."""
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


class Held:
    """Stands for *stream* in a run that may have to begin anew: what is written is shown once `release` is called."""

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
        """The run begins anew: nothing of this one is shown."""
        self._kept = None


Shown = TextIO | Held
"""Where the lines of ranks go."""


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
    """Stands as `sys.stdout` (or stderr) and leads each write to the stream of the process that runs."""

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
        """A rank that closes its stdout does not close everybody's."""

    def reconfigure(self, **settings: object) -> None:
        """Lines are whole and UTF-8 whatever a program asks for."""

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
    """The two streams of a process: lines behind `[label]`, or files `LOG_DIR/<label>/stdout.log` and
    `stderr.log`, as torchrun names them; *fresh* ones, or those that a process of that label has begun.
    A process may be found to be the launcher later: its *label* is asked for with every line."""
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
        return lambda line: _put(stream, f"[{label():>{width}}] {line}")

    return RankStream(put(stdout), raw=stdout), RankStream(put(stderr), raw=stderr)


def _descriptor(stream: Any) -> int:
    """For faulthandler and subprocesses; the process's own stderr where *stream* is only in memory."""
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
