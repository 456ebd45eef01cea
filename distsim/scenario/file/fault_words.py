"""Reads a fault in words: `link_slow n3/nic0 0.25`, `straggler 3 factor=1.2`."""

from __future__ import annotations

import re
import shlex
from typing import Any

from pydantic import ValidationError

from distsim.errors import UsageError
from distsim.scenario.file.schema import FAULT_TABLES
from distsim.sim.faults.fault import When
from distsim.text.file_tables import complaints, near
from distsim.text.untrusted_input import brief, toml_value

_MOMENT = tuple(When.__dataclass_fields__)
_EXAMPLES = {"rank": "3", "ranks": "3", "link": "n3/nic0", "gpu": "n2/gpu5", "nic": "n0/nic0", "switch": "leaf0"}
_EXAMPLES |= {name: f"{name}={value}" for name, value in (("delay_s", 0.1), ("period_s", 2), ("pause_s", 0.1))}
_EXAMPLES |= {"down_s": "down_s=0.5", "loss": "loss=0.01", "factor": "0.25"}
"""Word for each key that a fault has to have."""


def fault_of(text: str) -> dict[str, Any]:
    """Return the table of a scenario file's `[[faults]]` that *text* means.

    The first word is the kind of fault; further words are the values of its keys in the order of the reference
    (docs/reference/scenario.md), or `key=value`, also for its moment (`at_s=2`, `for_s=1`, `call=all_reduce#3`).

    Raises:
        UsageError: The kind is unknown, or the words do not fit it; the message has an example that would.
    """
    try:
        kind, *words = shlex.split(text)
    except ValueError:
        kind, words = "", []
    if kind not in FAULT_TABLES:
        known = f"{', '.join(FAULT_TABLES)}{near(kind, FAULT_TABLES)}"
        raise UsageError(f"--fault {brief(text)!r}: expected a fault such as 'link_slow n3/nic0 0.25'; kinds: {known}")
    keys = [name for name in FAULT_TABLES[kind].model_fields if name not in ("what", *_MOMENT)]
    table: dict[str, Any] = {"what": kind}
    form = f"expected a fault such as '{_example(kind)}'"
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier():
            if not keys:
                raise UsageError(f"--fault {brief(text)!r}: {kind} has no further key for {brief(word)!r}; {form}")
            name, value = keys[0], word
        keys = [key for key in keys if key != name]
        table[name] = _ranks(value) if name == "ranks" else toml_value(value)
    try:
        FAULT_TABLES[kind].model_validate(table)
    except ValidationError as error:
        wrong = "; ".join(complaints(error, FAULT_TABLES[kind])).removeprefix(": ")
        raise UsageError(f"--fault {brief(text)!r}: {wrong}; {form}") from None
    return table


def _example(kind: str) -> str:
    """Return words that are a fault of this kind: its keys up to the last one it has to have, or its factor."""
    fields = FAULT_TABLES[kind].model_fields
    needed = {name for name, field in fields.items() if field.is_required() or name == "factor"}
    examples = _EXAMPLES | ({"factor": "1.5"} if kind == "straggler" else {})  # the only one that makes longer
    words = [word for name, word in examples.items() if name in needed]
    return " ".join([kind, *words, "at_s=2"])


def _ranks(text: str) -> list[Any]:
    """Return the ranks of a text such as `3` or `0,2,4-7`; what is no rank is left for the check of the table."""
    ranks: list[Any] = []
    for part in text.strip("[]").split(","):
        match = re.fullmatch(r"\s*(\d{1,7})(?:-(\d{1,7}))?\s*", part)
        ranks += [part] if match is None else range(int(match[1]), int(match[2] or match[1]) + 1)
    return ranks
