"""Files that a command writes: refused before the work, readable by their user alone, named after it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from distsim.errors import UsageError

STDOUT = "-"
TO_STDOUT = ("--report", "--events")
"""Flags of a file that may be standard output."""


def open_output(path: str | os.PathLike[str], mode: str = "w") -> IO[Any]:
    """Open a file of results, as `open` does; a new one has mode 600, because it holds paths, lines and messages of the
    program.
    """
    text: dict[str, Any] = {} if "b" in mode else {"encoding": "utf-8", "errors": "backslashreplace", "newline": "\n"}
    return open(path, mode, opener=lambda name, flags: os.open(name, flags, 0o600), **text)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write *text* to a file of results, or to standard output for `-`."""
    if path == STDOUT:
        print(text, end="", flush=True)
        return
    with open_output(path) as file:
        file.write(text)


def check_writable(path: str | None, flag: str, example: str = "report.json") -> None:
    """Raise UsageError if *path* cannot be written as a file. The error suggests *example* as a name if *path* is a
    folder.
    """
    if path is None or (path == STDOUT and flag in TO_STDOUT):
        return
    target = Path(path)
    if path == STDOUT:
        raise UsageError(f"{flag} -: expected a file, got standard output; try {flag} {example}")
    if target.is_dir() or path.endswith(os.sep):
        raise UsageError(f"{flag} {path}: expected a file, got a folder; try {flag} {target / example}")
    _probe(target, path, flag)


def check_folder(path: str, flag: str) -> None:
    """Refuse a path that cannot be a folder of files: it may be missing, the folder that it is in may not."""
    target = Path(path)
    if target.exists() and not target.is_dir():
        raise UsageError(f"{flag} {path}: expected a folder, got a file")
    if target.exists():
        _probe(target / ".distsim-probe", path, flag)
    elif not target.absolute().parent.is_dir():
        raise UsageError(f"{flag} {path}: no folder {target.parent}; create it first")


def no_folder(path: Path) -> str:
    """Return why *path* is not a folder."""
    return "it is a file" if path.exists() else "no such folder"


def output_file(flag: str, example: str = "report.json") -> Callable[[str], str]:
    """Return the type of a flag that names a file to write, for argparse; it refuses what `check_writable` refuses."""

    def checked(path: str) -> str:
        check_writable(path, flag, example)
        return path

    return checked


def file_or_folder(path: str) -> str:
    """Check the value of `--trace`: a path that ends in a slash, or is a folder, is one of a folder."""
    if path.endswith(os.sep) or Path(path).is_dir():
        check_folder(path, "--trace")
    else:
        check_writable(path, "--trace", "trace.json")
    return path


def page_file(path: str, flag: str = "--html") -> str:
    """Check the file of an HTML page, and that the extra `html` is installed."""
    check_writable(path, flag, "report.html")
    needed(flag)
    return path


def needed(flag: str) -> None:
    """Raise UsageError if the extra `html` is not installed."""
    missing = [name for name in ("jinja2", "plotly") if find_spec(name) is None]
    if missing:
        packages = " and ".join(missing)
        verb = "is" if len(missing) == 1 else "are"
        raise UsageError(f"{flag}: {packages} {verb} not installed; pip install -e '.[html]' in a clone of distsim")


STILL = ("jpeg", "jpg", "pdf", "png", "svg", "webp")
"""Image formats that plotly exports with kaleido, which starts Chrome."""


def image_file(path: str) -> str:
    """Check the file of `--plot`; one without an extension is a .png.

    Raises:
        UsageError: The extension is unknown, the folder does not exist, or a package is not installed.
    """
    check_writable(path, "--plot", "plot.html")
    kind = image_kind(path)
    if kind not in ("html", *STILL):
        raise UsageError(f"--plot {path}: expected a file ending in .html, .{', .'.join(STILL)}, got .{kind}")
    for package in ("plotly",) if kind == "html" else ("plotly", "kaleido"):
        if find_spec(package) is None:
            raise UsageError(f"--plot: {package} is not installed; pip install -e '.[plot]' in a clone of distsim")
    return path


def image_kind(path: str) -> str:
    """Return the format that the name of a picture's file asks for."""
    return Path(path).suffix[1:].lower() or "png"


@contextmanager
def written(flag: str, path: object, say: bool = True) -> Iterator[None]:
    """Say that the block has written the file *path*, or raise a UsageError that names *flag*."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{flag} {path}: cannot be written ({error.strerror or error})") from None
    if say:
        say_written(path)


def write_json(flag: str, path: str | None, document: Any, sort_keys: bool = False) -> None:
    """Write *document* as JSON to the file *path*, the value of *flag*; nothing if that was not given."""
    if path is not None:
        with written(flag, path):
            write_text(path, json.dumps(document, indent=1, sort_keys=sort_keys) + "\n")


def _probe(target: Path, path: str, flag: str) -> None:
    if not target.absolute().parent.is_dir():
        raise UsageError(f"{flag} {path}: no folder {target.parent}; create it first")
    existed = target.exists()
    try:
        with target.open("ab"):
            pass
        if not existed:
            target.unlink(missing_ok=True)  # another rank under mpirun may have tried it at the same time
    except OSError as error:
        raise UsageError(f"{flag} {path}: cannot be written ({error.strerror})") from None


def say_written(path: object) -> None:
    """Print to stderr that a file was written. stdout may be read by a program."""
    if path != STDOUT and not str(path).startswith("/dev/"):
        print(f"wrote {path}", file=sys.stderr)
