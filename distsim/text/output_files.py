"""Files that a command writes: refused before the work, named after it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from distsim.errors import UsageError

__all__ = ["check_file_or_folder", "check_folder", "check_writable", "no_folder", "say_written"]


def check_writable(path: str | None, flag: str, example: str = "report.json") -> None:
    """Raise UsageError if *path* cannot be written as a file. The error suggests *example* as a name if *path* is a
    folder.
    """
    if path is None:
        return
    target = Path(path)
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


def check_file_or_folder(path: str | None, flag: str) -> None:
    """Check a path like `check_file`; a path that ends in a slash, or is a folder, is checked as a folder."""
    if path is not None and (path.endswith(os.sep) or Path(path).is_dir()):
        check_folder(path, flag)
    else:
        check_writable(path, flag)


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
    print(f"wrote {path}", file=sys.stderr)
