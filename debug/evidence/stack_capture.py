"""Stacks of ranks that cannot speak: faulthandler answers a signal, py-spy reads a stopped process."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from distsim.debug.records import Site
from distsim.debug.records.frames import Owner, absolute, is_ours, owner, program_frames, shown
from distsim.debug.rings import layout as rings
from distsim.debug.rings.files import stack_path
from distsim.debug.rings.reader import RingReader
from distsim.text.untrusted_input import open_regular

__all__ = ["collect", "is_library", "parse_faulthandler", "user_part"]

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$')
_THREAD = re.compile(r"^(?:Current t|T)hread 0x(?P<ident>[0-9a-f]+)")
_PYSPY = re.compile(r"^\s+(?P<function>\S.*) \((?P<file>.*):(?P<line>\d+)\)$")

WAIT_S = 0.4
"""faulthandler answers within milliseconds, unless the process is stopped."""


def parse_faulthandler(text: str, main_thread: int) -> tuple[Site, ...]:
    """Return the main thread's frames, innermost first, of the last dump in *text*."""
    stacks: dict[int, list[Site]] = {}
    current: list[Site] | None = None
    for line in text.splitlines():
        if thread := _THREAD.match(line):
            current = stacks[int(thread["ident"], 16)] = []
        elif (frame := _FRAME.match(line)) and current is not None:
            number = int(frame["line"]) if frame["line"].isdigit() else 0
            current.append(Site(shown(frame["file"]), number, frame["function"]))
    return tuple(stacks.get(main_thread, ()))


def collect(
    readers: Iterable[RingReader],
    frozen: Iterable[int] = (),
    notes: list[str] | None = None,
    silent: Iterable[int] = (),
) -> dict[int, tuple[Site, ...]]:
    """Return the main-thread stacks of live ranks, innermost frame first.

    *frozen* ranks do not answer signals: py-spy reads them if it is installed, and *notes* gets the reason if it
    cannot. py-spy is also tried first for *silent* ranks, which are inside a C call that a signal might interrupt.
    """
    pending: dict[int, tuple[RingReader, int]] = {}
    stacks: dict[int, tuple[Site, ...]] = {}
    stopped = set(frozen)
    readers = list(readers)
    for reader in readers:
        if reader.number in set(silent) and (stack := without_launcher(_py_spy(reader.header.pid)[0])):
            stacks[reader.number] = stack
    for reader in readers:
        number = reader.word(rings.W_STACK_SIGNAL)
        rank = reader.number
        if rank in stopped or rank in stacks or not number:
            continue
        path = stack_path(reader.path)
        try:
            before = path.stat().st_size
            os.kill(reader.header.pid, number)
        except OSError:
            continue
        pending[rank] = (reader, before)
    deadline = time.monotonic() + WAIT_S
    while pending and time.monotonic() < deadline:
        time.sleep(0.01)
        for rank, (reader, before) in list(pending.items()):
            text = _tail(stack_path(reader.path), before)
            if not text or not text.endswith("\n"):
                continue
            stack = without_launcher(parse_faulthandler(text, reader.word(rings.W_MAIN_THREAD)))
            if stack:
                stacks[rank] = stack
                del pending[rank]
    for reader in readers:
        if reader.number in stopped:
            frames, why = _py_spy(reader.header.pid)
            if stack := without_launcher(frames):
                stacks[reader.number] = stack
            elif notes is not None:
                notes.append(f"no stack of rank {reader.number}, which answers no signal: {why}")
    return stacks


def crash_stack(reader: RingReader) -> tuple[Site, ...]:
    """Return what faulthandler wrote while the process died of a signal such as SIGABRT."""
    text = _tail(stack_path(reader.path), 0)
    at = text.rfind("Fatal Python error")
    return without_launcher(parse_faulthandler(text[at:], reader.word(rings.W_MAIN_THREAD))) if at >= 0 else ()


def _tail(path: Path, start: int) -> str:
    try:
        with open_regular(path) as file:
            file.seek(start)
            return file.read(1 << 20).decode(errors="replace")
    except OSError:
        return ""


def _py_spy(pid: int) -> tuple[tuple[Site, ...], str]:
    """Return frames of the main thread by py-spy, without stopping the process; empty if it is not permitted, and
    why.
    """
    beside = Path(sys.executable).parent / "py-spy"
    tool = str(beside) if beside.exists() else shutil.which("py-spy")
    if tool is None:
        return (), "py-spy, which could read it, is not installed"
    try:
        done = subprocess.run(
            [tool, "dump", "--nonblocking", "--full-filenames", "--pid", str(pid)],
            capture_output=True,
            text=True,
            timeout=3,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return (), f"py-spy could not be run ({type(error).__name__})"
    sites: list[Site] = []
    inside = False
    for line in done.stdout.splitlines():
        if line.startswith("Thread "):
            if inside:
                break
            inside = "MainThread" in line
        elif inside and (frame := _PYSPY.match(line)):
            sites.append(Site(shown(frame["file"]), int(frame["line"]), frame["function"]))
    errors = done.stderr.strip().splitlines() or ["it says nothing"]
    return tuple(sites), f"py-spy failed ({errors[0]})"


def is_library(site: Site) -> bool:
    """Return whether a frame is of no interest to the user: torch's, distsim's, or the interpreter's."""
    return owner(site.file) is Owner.MACHINERY


def without_launcher(stack: tuple[Site, ...]) -> tuple[Site, ...]:
    """Return a stack without the outermost frames of `python -m distsim.debug`."""
    for depth, site in enumerate(stack):
        if site.file.endswith("debug/__main__.py") and is_ours(absolute(site.file)):
            return stack[:depth]
    return stack


def user_part(stack: tuple[Site, ...]) -> tuple[Site, ...]:
    """Return the user's frames of a stack, innermost first."""
    return program_frames((site.file, site.line, site.function) for site in stack)


def as_text(stacks: Mapping[int, tuple[Site, ...]]) -> str:
    """Return stacks for a file, a rank after the other."""
    parts = []
    for rank in sorted(stacks):
        frames = "\n".join(f"  {site.function} ({site})" for site in stacks[rank])
        parts.append(f"rank {rank}\n{frames}\n")
    return "\n".join(parts)
