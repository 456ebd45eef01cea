"""File with the facts of one rank of a real job: one record for each finished step.

A record is a fixed header, JSON, and the vectors as raw numbers; the JSON refers to vectors by their index. If a
rank is killed, only its last record can be incomplete, and the reader drops it. Reading executes nothing.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import math
import os
import struct
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from distsim.debug.diagnosis.silent.facts import ParameterFact, RankFacts, StepFact, Vector, Window
from distsim.debug.records import Site
from distsim.debug.rings.files import create_private
from distsim.text.untrusted_input import load_json, printable, read_bytes

__all__ = ["MOST_BYTES", "FactsFull", "FactsWriter", "SavedFacts", "read_facts"]

MOST_BYTES = 16 << 20
"""Largest size of one rank's file, which is in memory (/dev/shm) on most systems. The recording ends when the file
is full.
"""
LARGEST = 2 * MOST_BYTES
HEAD = struct.Struct("<4sII")
"""Header of a record: magic bytes, length of the JSON in bytes, number of vectors."""
MARK = b"dsf1"
NUMBERS = 16
"""Numbers in a vector."""
NOT_FINITE = ("inf", "-inf", "nan")


class FactsFull(Exception):
    """Raised when the file has reached `MOST_BYTES`; the rank is then no longer recorded."""


@dataclasses.dataclass
class SavedFacts:
    """Content of a facts file: the facts, and notes of the rank about its recording."""

    facts: RankFacts
    notes: list[str] = dataclasses.field(default_factory=list)
    saw_gpu: bool = False
    """Whether the program had GPU tensors, which are not checked."""


class FactsWriter:
    """Writer of one rank's file, which is created with the first record."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._size = 0
        self._written: list[tuple[Any, ...]] = []
        """Parameters as last written to the file."""

    def add(self, parameters: Sequence[ParameterFact], step: StepFact) -> None:
        """Append one step, and the parameters that are new or have changed.

        Raises:
            FactsFull: The file has reached its largest size.
            OSError: The file cannot be written.
        """
        if self._size > MOST_BYTES:
            raise FactsFull
        vectors: list[Vector] = []
        self._append({"parameters": self._changed(parameters), "step": _encode_step(step, vectors)}, vectors)

    def add_rest(self, window: Window) -> None:
        """Append the events after the last step."""
        vectors: list[Vector] = []
        self._append({"rest": _encode(window, vectors)}, vectors)

    def add_note(self, note: str, saw_gpu: bool = False) -> None:
        """Append a note about the recording itself."""
        self._append({"note": note, "gpu": saw_gpu}, [])

    def close(self) -> None:
        """Close the file; no further record is written."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _changed(self, parameters: Sequence[ParameterFact]) -> list[Any]:
        changed = []
        for number, fact in enumerate(parameters):
            values = _values(fact)
            if number == len(self._written):
                self._written.append(())
            if self._written[number] != values:
                self._written[number] = values
                changed.append([number, list(values)])
        return changed

    def _append(self, record: dict[str, Any], vectors: Sequence[Vector]) -> None:
        if self._descriptor is None:
            self._descriptor = create_private(self._path)
        text = json.dumps(record, separators=(",", ":")).encode()
        numbers = np.array(vectors, dtype="<f4").tobytes()
        data = memoryview(HEAD.pack(MARK, len(text), len(vectors)) + text + numbers)
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
        mark, length, count = HEAD.unpack_from(data, at)
        if mark != MARK:
            raise ValueError(f"{path.name}: expected a record of facts at byte {at}, got something else")
        begin = at + HEAD.size
        at = begin + length + count * NUMBERS * 4
        if at > len(data):
            break  # the rank ended while it wrote
        if most < 0:
            saved.notes.append(f"is searched up to step {saved.facts.steps[-1].number}: the rest is too large")
            break
        vectors = np.frombuffer(data[begin + length : at], dtype="<f4").reshape(count, NUMBERS)
        try:
            most -= _take(saved, load_json(bytes(data[begin : begin + length])), vectors)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError) as error:
            raise ValueError(f"{path.name}: no record of facts at byte {begin} ({type(error).__name__})") from None
    return saved


def _take(saved: SavedFacts, record: dict[str, Any], vectors: Any) -> int:
    """Add a decoded record to *saved*, and return the number of parameters in its step."""
    size = 0
    for number, values in record.get("parameters", ()):
        fact = _decoder(ParameterFact)(values, vectors)
        if number == len(saved.facts.parameters):
            saved.facts.parameters.append(fact)
        else:
            saved.facts.parameters[number] = fact
    if "step" in record:
        step = _decode_step(record["step"], vectors)
        if step.parameters and not 0 <= min(step.parameters) <= max(step.parameters) < len(saved.facts.parameters):
            raise IndexError
        saved.facts.steps.append(step)
        size = len(step.parameters)
    if "rest" in record:
        saved.facts.rest = _decoder(Window)(record["rest"], vectors)
    if record.get("note"):
        saved.notes.append(printable(str(record["note"])[:400]))
    saved.saw_gpu = saved.saw_gpu or record.get("gpu") is True
    return size


# -- to JSON


@functools.cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def _values(fact: Any) -> tuple[Any, ...]:
    return tuple([getattr(fact, name) for name in _names(fact.__class__)])


def _encode_step(step: StepFact, vectors: list[Vector]) -> list[Any]:
    """Encode a step like `_encode`, but store hyperparameters that parameters share only once."""
    groups: dict[int, tuple[Any, list[int]]] = {}
    for number, settings in step.hyperparameters.items():
        groups.setdefault(id(settings), (settings, []))[1].append(number)
    encoded = [
        None if name == "hyperparameters" else _encode(getattr(step, name), vectors) for name in _names(StepFact)
    ]
    return [*encoded, list(groups.values())]


def _encode(value: Any, vectors: list[Vector]) -> Any:
    if isinstance(value, np.ndarray):
        vectors.append(value)
        return len(vectors) - 1
    if isinstance(value, Site):
        return value.to_json()
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, dict):
        return [[_encode(key, vectors), _encode(one, vectors)] for key, one in value.items()]
    if isinstance(value, list | tuple | set):
        return [one if type(one) is int else _encode(one, vectors) for one in value]
    if dataclasses.is_dataclass(value):
        return [_encode(one, vectors) for one in _values(value)]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)  # JSON has no such number
    return value


# -- from JSON, as the types of the facts say


Decoder = Callable[[Any, Any], Any]


def _decode_step(values: Any, vectors: Any) -> StepFact:
    *encoded, groups = values
    settings = _decoder(tuple[tuple[str, float], ...])
    hyperparameters: dict[int, Any] = {}
    for of_group, numbers in groups:
        shared = settings(of_group, vectors)
        hyperparameters.update((_whole(number, vectors), shared) for number in numbers)
    fields: list[Any] = [
        hyperparameters if name == "hyperparameters" else decode(value, vectors)
        for (name, decode), value in zip(_fields(StepFact), encoded, strict=True)
    ]
    return StepFact(*fields)


@functools.cache
def _fields(kind: Any) -> tuple[tuple[str, Decoder], ...]:
    hints = typing.get_type_hints(kind)
    return tuple((name, _decoder(hints[name])) for name in _names(kind))


@functools.cache
def _decoder(hint: Any) -> Decoder:
    """Return the decoder for values of type *hint*; it raises TypeError for other JSON."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint == Vector:
        return lambda value, vectors: vectors[_whole(value, vectors)]
    if hint is Site:
        return _site
    if origin is types.UnionType:
        inner = _decoder(next(one for one in arguments if one is not types.NoneType))
        return lambda value, vectors: None if value is None else inner(value, vectors)
    if origin is dict:
        key, one = map(_decoder, arguments)
        return lambda value, vectors: {key(a, vectors): one(b, vectors) for a, b in value}
    if origin is tuple and arguments[-1] is not ...:
        parts = [_decoder(argument) for argument in arguments]
        return lambda value, vectors: tuple([part(a, vectors) for part, a in zip(parts, value, strict=True)])
    if origin in (tuple, list, set):
        element = _decoder(arguments[0])
        return lambda value, vectors: origin([element(one, vectors) for one in value])
    if dataclasses.is_dataclass(hint):
        kind: Any = hint
        return lambda value, vectors: kind(*[d(a, vectors) for (_, d), a in zip(_fields(kind), value, strict=True)])
    if issubclass(hint, enum.Enum):
        return lambda value, vectors: hint(value)
    return {int: _whole, float: _number, str: _text, bool: _flag}[hint]


def _site(value: Any, vectors: Any) -> Site:
    file, line, function, *below = value
    return Site(
        _text(file, vectors),
        _whole(line, vectors),
        _text(function, vectors),
        _site(below[0], vectors) if below else None,
    )


def _whole(value: Any, vectors: Any) -> int:
    if type(value) is not int:
        raise TypeError
    return value


def _number(value: Any, vectors: Any) -> float:
    if type(value) not in (int, float) and value not in NOT_FINITE:
        raise TypeError
    return float(value)


def _text(value: Any, vectors: Any) -> str:
    if type(value) is not str:
        raise TypeError
    return printable(value)


def _flag(value: Any, vectors: Any) -> bool:
    if type(value) is not bool:
        raise TypeError
    return value
