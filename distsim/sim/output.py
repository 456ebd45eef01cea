"""What ranks print: every line once, whole, behind its rank; or one file per rank."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from distsim.sim.task import current_process

__all__ = ["RankStream", "StreamProxy", "open_streams"]


class RankStream(io.TextIOBase):
    """The stdout or stderr of one process."""

    def __init__(self, write_line: Callable[[str], None], path: Path | None = None, raw: Any = None) -> None:
        self._write_line = write_line
        self._partial = ""
        self._file = None if path is None else path.open("w", encoding="utf-8")
        self._raw = raw
        self.muted = False

    encoding = "utf-8"
    errors = "replace"

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        if self.muted:
            return len(text)
        if self._file is not None:
            self._file.write(text)
            return len(text)
        whole = self._partial + text
        lines = whole.split("\n")
        self._partial = lines.pop()
        for line in lines:
            self._write_line(line.rsplit("\r", 1)[-1])
        if len(self._partial) > 1 << 16:
            self._write_line(self._partial)
            self._partial = ""
        return len(text)

    def writable(self) -> bool:
        return True

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return int(self._raw.fileno())

    @property
    def buffer(self) -> Any:
        return _Bytes(self)

    def finish(self) -> None:
        """Print the last unfinished line and close the rank's file."""
        if self._partial and not self.muted:
            self._write_line(self._partial)
            self._partial = ""
        if self._file is not None:
            self._file.close()


class _Bytes:
    """`sys.stdout.buffer` of a rank."""

    def __init__(self, stream: RankStream) -> None:
        self._stream = stream

    def write(self, data: bytes) -> int:
        self._stream.write(bytes(data).decode("utf-8", "replace"))
        return len(data)

    def flush(self) -> None:
        self._stream.flush()


class StreamProxy(io.TextIOBase):
    """Stands as `sys.stdout` (or stderr) and leads each write to the stream of the process that runs."""

    def __init__(self, real: TextIO, which: str) -> None:
        self._real = real
        self._which = which

    def _target(self) -> Any:
        process = current_process()
        stream = None if process is None else getattr(process, self._which)
        return self._real if stream is None else stream

    def write(self, text: str) -> int:
        return int(self._target().write(text))

    def flush(self) -> None:
        self._target().flush()

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return bool(self._target().isatty())

    def fileno(self) -> int:
        return int(self._real.fileno())

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return str(getattr(self._target(), "encoding", "utf-8"))

    @property
    def errors(self) -> str:  # type: ignore[override]
        return "replace"

    @property
    def buffer(self) -> Any:
        return self._target().buffer


def open_streams(label: str, width: int, log_dir: str | None, stdout: TextIO, stderr: TextIO) -> tuple[RankStream, RankStream]:
    """The two streams of a process: lines behind `[label]`, or files `LOG_DIR/<label>/stdout.log`
    as torchrun names them."""
    if log_dir is not None:
        folder = Path(log_dir) / label
        folder.mkdir(parents=True, exist_ok=True)
        return (
            RankStream(_drop, folder / "stdout.log", stdout),
            RankStream(_drop, folder / "stderr.log", stderr),
        )
    prefix = f"[{label:>{width}}] "
    return (
        RankStream(lambda line: _put(stdout, prefix + line), raw=stdout),
        RankStream(lambda line: _put(stderr, prefix + line), raw=stderr),
    )


def _drop(line: str) -> None:
    pass


def _put(stream: TextIO, line: str) -> None:
    try:
        stream.write(line + os.linesep if os.linesep == "\n" else line + "\n")
    except ValueError:  # the stream was closed under us
        sys.__stderr__ and sys.__stderr__.write(line + "\n")
