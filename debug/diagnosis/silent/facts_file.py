"""File with the facts of one rank of a real job: one record for each finished step.

A record is a fixed header and MessagePack, in which a vector is 16 raw numbers. If a rank is killed, only its last
record can be incomplete, and the reader drops it. Reading executes nothing.
"""

from __future__ import annotations

import copy
import math
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct, field

from distsim.debug.diagnosis.silent.facts import ParameterFact, RankFacts, StepFact, Window
from distsim.debug.rings.files import create_private
from distsim.text.codec import Whole, pack, unpack
from distsim.text.untrusted_input import read_bytes

MOST_BYTES = 16 << 20
"""Largest size of one rank's file, which is in memory (/dev/shm) on most systems. The recording ends when the file
is full.
"""
LARGEST = 2 * MOST_BYTES
HEAD = struct.Struct("<4sI")
"""Header of a record: magic bytes, length of the rest in bytes."""
MARK = b"dsf2"
NUMBERS = 16
"""Numbers in a vector."""


class FactsFull(Exception):
    """Raised when the file has reached `MOST_BYTES`; the rank is then no longer recorded."""


class SavedFacts(Struct):
    """Content of a facts file: the facts, and notes of the rank about its recording."""

    facts: RankFacts
    notes: list[str] = field(default_factory=list)
    saw_gpu: bool = False
    """Whether the program had GPU tensors, which are not checked."""


class Record(Struct, omit_defaults=True):
    """One record of the file."""

    parameters: list[tuple[Whole, ParameterFact]] = field(default_factory=list)
    """Parameters that are new or have changed, with their indices."""
    step: StepFact | None = None
    """A step without its hyperparameters."""
    hyperparameters: list[tuple[tuple[tuple[str, float], ...], list[Whole]]] = field(default_factory=list)
    """Hyperparameters of the step, and the indices of the parameters that share them."""
    rest: Window | None = None
    """Events after the last step."""
    note: str = ""
    gpu: bool = False


class FactsWriter:
    """Writer of one rank's file, which is created with the first record."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._size = 0
        self._written: list[ParameterFact] = []
        """Parameters as last written to the file."""

    def add(self, parameters: Sequence[ParameterFact], step: StepFact) -> None:
        """Append one step, and the parameters that are new or have changed.

        Raises:
            FactsFull: The file has reached its largest size.
            OSError: The file cannot be written.
        """
        if self._size > MOST_BYTES:
            raise FactsFull
        changed = [
            (number, copy.copy(fact))
            for number, fact in enumerate(parameters)
            if number >= len(self._written) or self._written[number] != fact
        ]
        for number, fact in changed:
            self._written[number : number + 1] = [fact]
        shared: dict[int, tuple[tuple[tuple[str, float], ...], list[int]]] = {}
        for number, settings in step.hyperparameters.items():
            shared.setdefault(id(settings), (settings, []))[1].append(number)
        bare = copy.copy(step)
        bare.hyperparameters = {}
        self._append(Record(changed, bare, list(shared.values())))

    def add_rest(self, window: Window) -> None:
        """Append the events after the last step."""
        self._append(Record(rest=window))

    def add_note(self, note: str, saw_gpu: bool = False) -> None:
        """Append a note about the recording itself."""
        self._append(Record(note=note, gpu=saw_gpu))

    def close(self) -> None:
        """Close the file; no further record is written."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _append(self, record: Record) -> None:
        if self._descriptor is None:
            self._descriptor = create_private(self._path)
        content = pack(record, vector_bytes)
        data = memoryview(HEAD.pack(MARK, len(content)) + content)
        self._size += len(data)
        while data:
            data = data[os.write(self._descriptor, data) :]


def read_facts(path: Path, most: float = math.inf) -> SavedFacts:
    """Read the facts in a file. Nothing in the file is executed.

    Args:
        path: The file.
        most: Largest number of parameters, summed over steps, to read. If there are more, a note says so.

    Raises:
        OSError: The file cannot be read.
        ValueError: The content is not a facts file.
    """
    data = memoryview(read_bytes(path, LARGEST))
    saved = SavedFacts(RankFacts(0))
    at = 0
    while at + HEAD.size <= len(data):
        mark, length = HEAD.unpack_from(data, at)
        if mark != MARK:
            raise ValueError(f"{path.name}: expected a record of facts at byte {at}, got something else")
        begin = at + HEAD.size
        at = begin + length
        if at > len(data):
            break  # the rank ended while it wrote
        if most < 0:
            saved.notes.append(f"is searched up to step {saved.facts.steps[-1].number}: the rest is too large")
            break
        try:
            most -= _take(saved, unpack(data[begin:at], Record, _vector))
        except ValueError as error:
            raise ValueError(f"{path.name}: not a record of facts at byte {begin} ({error})") from None
    return saved


def _take(saved: SavedFacts, record: Record) -> int:
    """Add a record to *saved*, and return the number of parameters in its step."""
    facts, step = saved.facts, record.step
    for number, fact in record.parameters:
        if number > len(facts.parameters):
            raise ValueError(f"parameter {number} after {len(facts.parameters)}")
        facts.parameters[number : number + 1] = [fact]
    if step is not None:
        if step.parameters and not 0 <= min(step.parameters) <= max(step.parameters) < len(facts.parameters):
            raise ValueError("a step of a parameter that is not in the file")
        step.hyperparameters = {number: shared for shared, numbers in record.hyperparameters for number in numbers}
        facts.steps.append(step)
    facts.rest = record.rest or facts.rest
    saved.notes += [record.note] if record.note else []
    saved.saw_gpu |= record.gpu
    return 0 if step is None else len(step.parameters)


def vector_bytes(value: Any) -> Any:
    """Return a vector as it is in the file, and a number of NumPy as one of Python."""
    return value.item() if isinstance(value, np.generic) else np.asarray(value, "<f4").tobytes()


def _vector(kind: type, content: Any) -> Any:
    if not isinstance(content, bytes) or len(content) != 4 * NUMBERS:
        raise ValueError(f"expected a vector of {NUMBERS} numbers")
    return np.frombuffer(content, "<f4")
