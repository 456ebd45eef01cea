"""What of a report cannot be as it stands: somebody edited it, or another program wrote it.

A key says by its last word what its figure is (`end_s`, `peak_memory_bytes`), wherever it stands: so there is no list
of all keys here that a new one would have to be added to.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from distsim.debug.records.diagnosis import SCHEMA
from distsim.text.untrusted_input import brief

__all__ = ["damage"]

_FIGURE = re.compile(r"(?:^|_)(?:s|bytes|count|alike|size|events|seed|rank|code|utilisation|flops|gpus|mfu|hfu|share)$")
_WHOLE = re.compile(r"^(?:world_size|events|seed|rank|exit_code)$")
_TEXT = ("program", "cluster", "backend", "software", "version", "inconclusive")
_FLAGS = ("interrupted", "snapshot")
_SIGNED = {"seed", "exit_code", "gpu_saved_s", "host_saved_s"}
"""A killed process has a negative exit code; what fusing saves may be a loss."""
_OTHER_CLOCKS = ("picture", "diagnoses", "jobs")
"""Their times are moments, which another host's clock may put before the beginning."""
_ROUNDING_S = 1e-6


def damage(document: Mapping[str, Any]) -> str | None:
    """The first thing that is wrong, with its place; None where nothing is, and of what is no report at all."""
    return next(_wrong(document), None) if document.get("schema") == SCHEMA else None


def _wrong(document: Mapping[str, Any]) -> Iterator[str]:
    for name in _TEXT:
        if not isinstance(document.get(name), str | None):
            yield f"{name}: expected a text, got {_said(document[name])}"
    for name in _FLAGS:
        if not isinstance(document.get(name, False), bool):
            yield f"{name}: expected true or false, got {_said(document[name])}"
    notes = document.get("notes")
    if notes is not None and not (isinstance(notes, list) and all(isinstance(note, str) for note in notes)):
        yield f"notes: expected a list of texts, got {_said(notes)}"
    for name, value in document.items():
        yield from _figures(value, name, name, name not in _OTHER_CLOCKS)


def _figures(value: Any, place: str, name: str, from_zero: bool) -> Iterator[str]:
    """What is wrong in *value*, which stands at *place* under the key *name*."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _figures(one, f"{place}.{brief(key)}", key, from_zero)
    elif isinstance(value, list) and not _WHOLE.match(name):
        for number, one in enumerate(value):
            yield from _figures(one, f"{place}[{number}]", name, from_zero)
    elif value is not None and _FIGURE.search(name):
        yield from _figure(value, place, name, from_zero)


def _figure(value: Any, place: str, name: str, from_zero: bool) -> Iterator[str]:
    kind = "a whole number" if _WHOLE.match(name) else "a number"
    least = from_zero and name not in _SIGNED
    if least:
        kind += " of 0 or more"
    right = isinstance(value, int if _WHOLE.match(name) else int | float) and not isinstance(value, bool)
    if not right or not math.isfinite(value) or (least and value < -_ROUNDING_S):
        yield f"{place}: expected {kind}, got {_said(value)}"


def _said(value: Any) -> str:
    """As it stands in the JSON, nearly; of a list or an object only that it is one."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    return brief(repr(value))
