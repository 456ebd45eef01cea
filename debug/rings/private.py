"""Folders and files that no other user of the machine can enter, fill beforehand, or lead astray.

Folders of jobs have names that anybody can guess (`/dev/shm/distsim-UID/JOB`). Another user who makes one first
could put links into it, and what a rank then writes would end up in a file of its user's choosing. So a folder that
is not ours alone is refused, and files are made anew (`O_EXCL`), never opened where somebody may have put them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

__all__ = ["append_private", "create_private", "private_folder", "write_private"]

OTHERS = stat.S_IRWXG | stat.S_IRWXO
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def private_folder(path: Path, *, chosen: bool = False) -> None:
    """Make *path* if it is not there, with mode 0700; else see whether it is ours alone.

    PermissionError with one line in `strerror` where it is not. A folder that its user has *chosen* may be a link of
    his own and may be readable by others (what we put into it is not), but nobody else may write there.
    """
    if _make(path):
        return
    if chosen and stat.S_ISLNK((link := path.lstat()).st_mode):
        _ours(path, link)
        path = path.resolve()
    # One folder is judged and closed, by its descriptor: another may be put under its name meanwhile.
    folder = _open(path)
    try:
        _close_to_others(folder, path, chosen)
        found, now = os.fstat(folder), path.lstat()
    finally:
        os.close(folder)
    if (found.st_dev, found.st_ino) != (now.st_dev, now.st_ino):
        raise PermissionError(errno.EPERM, "somebody has put something else in its place just now", str(path))


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        kind = "a link" if path.is_symlink() else "no folder"
        raise PermissionError(errno.EPERM, f"expected a folder of your own, got {kind}", str(path)) from None


def _close_to_others(folder: int, path: Path, chosen: bool) -> None:
    found = os.fstat(folder)
    _ours(path, found)
    mode = stat.S_IMODE(found.st_mode)
    if not mode & OTHERS or (chosen and not mode & OTHERS_WRITE and os.listdir(folder)):
        return
    if mode & OTHERS_WRITE and os.listdir(folder):
        raise PermissionError(
            errno.EPERM, f"others may write there (mode {mode:04o}), and may have; empty it, or chmod 700", str(path)
        )
    os.fchmod(folder, 0o700)  # of an earlier release, or just made by hand
    if mode & OTHERS_WRITE and os.listdir(folder):
        raise PermissionError(errno.EPERM, f"somebody else writes there (mode {mode:04o})", str(path))


def _make(path: Path) -> bool:
    """Whether *path* was not there; the ranks of a job make it at the same moment."""
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        return False
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        return _make(path)
    return True


def _ours(path: Path, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        said = f"it belongs to user {found.st_uid}, and you are {os.geteuid()}"
        raise PermissionError(errno.EPERM, said, str(path))


def create_private(path: Path, mode: int = 0o600) -> int:
    """A descriptor of a new, empty file for writing; what was there under this name is gone, not changed."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    return os.open(path, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_RDWR | os.O_CLOEXEC, mode)


def write_private(path: Path, text: str, mode: int = 0o600) -> None:
    """Put a file with *text* in the place of *path*, whole or not at all."""
    scratch = path.with_name(f"{path.name}.{os.getpid()}.new")
    with open(create_private(scratch, mode), "w", encoding="utf-8", errors="backslashreplace") as file:
        try:
            file.write(text)
            file.flush()
        except OSError:
            scratch.unlink(missing_ok=True)
            raise
    try:
        os.replace(scratch, path)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise


def append_private(path: Path, text: str) -> None:
    """Add to a file, which is made if need be, but never through a link."""
    flags = os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_WRONLY | os.O_CLOEXEC
    with open(os.open(path, flags, 0o600), "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)
