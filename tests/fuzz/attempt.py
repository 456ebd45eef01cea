"""One input to one reader, within bounds: what came of it."""

from __future__ import annotations

import contextlib
import os
import random
import re
import resource
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import distsim
from distsim.errors import UsageError
from distsim.text.untrusted_input import printable
from tests.fuzz.commands import InternalError
from tests.fuzz.mutate import SPOILED, mutated
from tests.fuzz.readers import Reader, fuzzed_names

__all__ = ["Break", "Files", "attempt", "bounded_memory", "made", "tried"]

CPU_S = 8.0
"""Of one input: a hundred times what a good file takes."""
BLOCKED_S = 600
"""Wall time after which a reader waits for what never comes, however busy the machine is."""
Files = dict[str, bytes | Callable[[Path], Any]]
"""Content by name, or what makes something else of that name."""
MEMORY_BYTES = 2 << 30
MOST_LINES = 32
LONGEST_LINE = 1000
PACKAGE = f"{Path(distsim.__file__).parent}{os.sep}"


@dataclass(frozen=True)
class Break:
    """What should not have come out."""

    reader: str
    seed: int | str
    why: str
    where: str
    """Where it was raised."""
    trace: str = ""

    def __str__(self) -> str:
        return f"{self.reader} [{self.seed}]: {self.why} at {self.where}"


class TooLong(BaseException):
    """The input took too much CPU time."""


@contextlib.contextmanager
def bounded_memory(most: int = MEMORY_BYTES) -> Iterator[None]:
    """Above what the process has by now; MemoryError beyond."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def made(reader: Reader, seed: int) -> Files:
    """The files of one input, of which one is wrong."""
    chance = random.Random(f"{reader.name}/{seed}")
    files: Files = dict(reader.seeds())
    name = chance.choice(fuzzed_names(reader))
    if reader.spoils and chance.random() < 0.03:
        files[name] = chance.choice([*SPOILED.values()])
    else:
        files[name] = mutated(reader.seeds()[name], chance)
    return files


def attempt(reader: Reader, seed: int) -> Break | None:
    """A mutated input, made anew from its number."""
    return tried(reader, made(reader, seed), seed)


def tried(reader: Reader, files: Files, seed: int | str) -> Break | None:
    """What is wrong with how *reader* took *files*; None: it answered, or refused them as it should."""
    folder = Path(tempfile.mkdtemp(prefix="distsim-fuzz-"))
    for name, content in files.items():
        (folder / name).write_bytes(content) if isinstance(content, bytes) else content(folder / name)
    most_s = max(CPU_S, reader.cpu_s)

    def stop(number: int, frame: FrameType | None) -> None:
        raise TooLong

    before = signal.signal(signal.SIGPROF, stop)
    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_PROF, most_s)
    signal.alarm(BLOCKED_S)
    began = time.process_time()
    found: BaseException | None = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            reader.act(folder)
    except UsageError as error:
        return _untold(reader, seed, str(error))
    except BaseException as error:
        found = error
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
        signal.signal(signal.SIGPROF, before)
        shutil.rmtree(folder, ignore_errors=True)
    if isinstance(found, KeyboardInterrupt):
        raise found
    if found is None:
        took = time.process_time() - began
        return Break(reader.name, seed, f"{took:.0f} s of CPU time", "") if took > 1.5 * most_s else None
    last = traceback.extract_tb(found.__traceback__)[-1]
    ours = [frame for frame in traceback.extract_tb(found.__traceback__) if "/tests/" not in frame.filename]
    where = ours[-1] if ours else last
    deepest = next((frame for frame in reversed(ours) if frame.filename.startswith(PACKAGE)), where)
    text = "".join(traceback.format_exception(found))[-6000:]
    place = f"{Path(deepest.filename).name}:{deepest.lineno}"
    said = str(found).strip().splitlines()
    if isinstance(found, InternalError) and (places := re.findall(r'File "[^"]*?([^/"]*)", line (\d+)', str(found))):
        place = ":".join(places[-1])
    return Break(reader.name, seed, f"{type(found).__name__}: {said[-1] if said else ''}"[:200], place, text)


def _untold(reader: Reader, seed: int | str, text: str) -> Break | None:
    """A refusal that a person could not read."""
    lines = text.splitlines()
    if not text.strip() or len(lines) > MOST_LINES:
        return Break(reader.name, seed, f"a refusal of {len(lines)} lines", "")
    if len(longest := max(lines, key=len)) > LONGEST_LINE:
        return Break(reader.name, seed, f"a refusal of {len(longest)} letters: {printable(longest)[:300]}", "")
    return None
