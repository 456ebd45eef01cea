"""Where in the user's program a call was made: a short walk up the stack, cached by code position.

Frames of torch, distsim and the standard library are skipped. The cache key is the position of the
innermost user frame and of its caller, so a helper called from two places has two sites.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from types import CodeType, FrameType
from zlib import crc32

from distsim.debug.ring import TABLE_SITE, RingWriter

__all__ = ["CallSites", "is_library_file", "is_user_code", "user_frame", "user_frames"]

Place = tuple[int, int, str]

DEPTH = 8
"""Frames of the user's that are kept with a site."""


def _library_prefixes() -> tuple[str, ...]:
    """Folders whose code is not the user's: torch, distsim, the standard library."""
    package = Path(__file__).resolve().parent
    prefixes = {str(package), str(package.parent / "realexec"), str(package.parent / "distsim")}
    # Under the links of a checkout the same files have a second name.
    distsim = sys.modules.get("distsim")
    if distsim is not None and distsim.__file__:
        prefixes.add(str(Path(distsim.__file__).parent))
    paths = sysconfig.get_paths()
    for place in ("purelib", "platlib"):
        prefixes.add(str(Path(paths[place]) / "torch"))
        prefixes.add(str(Path(paths[place]) / "distsim"))
    torch = sys.modules.get("torch")
    if torch is not None and torch.__file__:
        prefixes.add(str(Path(torch.__file__).parent))
    return tuple(prefix + "/" for prefix in sorted(prefixes))


_prefixes: tuple[str, ...] = ()
_stdlib = sysconfig.get_paths()["stdlib"] + "/"
_user: dict[int, bool] = {}
"""By id of the code: hashing a code object hashes all its constants. The codes are kept, so ids stay theirs."""
_kept: list[CodeType] = []


def is_user_code(code: CodeType) -> bool:
    """Whether a frame of this code is the user's own (third-party libraries other than torch included)."""
    known = _user.get(id(code))
    if known is None:
        _kept.append(code)
        known = _user[id(code)] = not is_library_file(code.co_filename)
    return known


def is_library_file(file: str) -> bool:
    """Whether code of this file is torch's, distsim's or the interpreter's own."""
    global _prefixes
    if not _prefixes:
        _prefixes = _library_prefixes()
    if file.startswith((*_prefixes, "<frozen")) or file.endswith("/typing_extensions.py"):
        return True
    return file.startswith(_stdlib) and "/site-packages/" not in file


def user_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the user's own code."""
    user = _user
    while frame is not None:
        code = frame.f_code
        known = user.get(id(code))
        if known is None:
            known = is_user_code(code)
        if known:
            return frame
        frame = frame.f_back
    return None


def user_frames(frame: FrameType | None, depth: int = DEPTH) -> list[tuple[str, int, str]]:
    """(file, line, function) of the user's frames, innermost first."""
    found: list[tuple[str, int, str]] = []
    while frame is not None and len(found) < depth:
        code = frame.f_code
        if is_user_code(code):
            found.append((code.co_filename, frame.f_lineno, code.co_qualname))
        frame = frame.f_back
    return found


def _called_by(user: FrameType, innermost: FrameType | None) -> str:
    """Name of the library function that the frame *user* called; torch's decorators are looked through."""
    name = ""
    while innermost is not None and innermost is not user:
        if innermost.f_code.co_name not in ("wrapper", "inner", "_fn", "decorate_context"):
            name = innermost.f_code.co_name
        innermost = innermost.f_back
    return name


class CallSites:
    """Call sites of one process, interned in its ring."""

    def __init__(self, ring: RingWriter) -> None:
        self._ring = ring
        self._known: dict[tuple[int, int, int, int], Place] = {}

    def here(self, skip: int = 2) -> Place:
        """The user's call *skip* frames up: its offset in the table, its hash (of file and line), and
        the library function that the user called there (`send`, `isend`, `backward`)."""
        frame = user_frame(sys._getframe(skip))
        if frame is None:
            return self._elsewhere()
        code, caller = frame.f_code, frame.f_back
        if caller is None:
            key = (id(code), frame.f_lasti, 0, 0)
        else:
            key = (id(code), frame.f_lasti, id(caller.f_code), caller.f_lasti)
        found = self._known.get(key)
        if found is None:
            if caller is not None:
                _kept.append(caller.f_code)
            found = self._known[key] = self.intern(user_frames(frame), _called_by(frame, sys._getframe(skip)))
        return found

    def intern(self, frames: list[tuple[str, int, str]], called: str = "") -> Place:
        """Table offset and hash of these frames."""
        if not frames:
            return 0, 0, called
        offset = self._ring.entry(TABLE_SITE, tuple(frames), frames)
        file, line, _ = frames[0]
        return offset, crc32(f"{file}:{line}".encode()) or 1, called

    def _elsewhere(self) -> Place:
        """A thread without user code (autograd's on an accelerator): where the main thread stands."""
        import threading

        main = threading.main_thread().ident
        frame = sys._current_frames().get(main) if main is not None else None
        return self.intern(user_frames(frame))
