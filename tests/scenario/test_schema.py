"""The JSON schema that editors get: it takes what the loader takes."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distsim.scenario import find_scenarios
from distsim.scenario.file.schema import json_schema
from tests.kin import one_in

LIBRARY = Path(__file__).parents[2] / "scenarios"
TYPES: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "number": (int, float),
    "integer": int,
    "boolean": bool,
    "null": type(None),
}
QUANTITIES = """
program = "made.py"
faults = [
  { what = "link_flap", link = "a->b", at_s = "2ms", period_s = "20ms", down_s = "1ms" },
  { what = "link_slow", link = ["a->b"], at_s = 1, for_s = 0.5, extra_latency_s = "5us" },
  { what = "nic_down", nic = "n0/nic0", failover_s = "1s" },
]
limits = { virtual_time_s = "1s" }
[expect]
memory_below = "300KiB"
busbw_above = { all_reduce = "900GB/s", barrier = 1 }
virtual_time_below_s = "3ms"
"""


def wrong(value: Any, schema: dict[str, Any], root: dict[str, Any], path: str = "") -> Iterator[str]:
    """Where *value* is not what *schema* allows: as much of JSON schema as pydantic writes for us."""
    if "$ref" in schema:
        yield from wrong(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root, path)
    for choices in (schema.get("anyOf"), schema.get("oneOf")):
        if choices and all(list(wrong(value, choice, root, path)) for choice in choices):
            yield f"{path}: {value!r} fits none of {len(choices)}"
    if "type" in schema:
        number = isinstance(value, bool) and schema["type"] in ("number", "integer")
        if number or not isinstance(value, TYPES[schema["type"]]):
            yield f"{path}: {value!r} is no {schema['type']}"
            return
    if value not in schema.get("enum", [value]) or value != schema.get("const", value):
        yield f"{path}: {value!r}"
    if isinstance(value, int | float) and not isinstance(value, bool):
        if value < schema.get("minimum", value) or value <= schema.get("exclusiveMinimum", value - 1):
            yield f"{path}: {value!r} is too small"
    if isinstance(value, list):
        for i, one in enumerate(value):
            yield from wrong(one, schema.get("items", {}), root, f"{path}[{i}]")
    if isinstance(value, dict):
        yield from (f"{path}: no {key}" for key in schema.get("required", ()) if key not in value)
        for key, one in value.items():
            fits = [s for pattern, s in schema.get("patternProperties", {}).items() if re.search(pattern, key)]
            found = schema.get("properties", {}).get(key, fits[0] if fits else schema.get("additionalProperties", {}))
            if found is False:
                yield f"{path}.{key}: unknown"
            elif found is not True:
                yield from wrong(one, found, root, f"{path}.{key}")


def complaints(text: str) -> list[str]:
    """What an editor would underline."""
    schema = json.loads(json_schema())
    return list(wrong(tomllib.loads(text), schema, schema))


@pytest.mark.parametrize("path", one_in(6, find_scenarios([LIBRARY])), ids=lambda path: path.stem)
def test_the_schema_takes_every_scenario_of_the_library(path: Path) -> None:
    """No file of ours is underlined in an editor."""
    assert not complaints(path.read_text(encoding="utf-8"))


def test_quantities_may_have_units() -> None:
    """Times, memory and bandwidths: a number, or text with a unit."""
    assert not complaints(QUANTITIES)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('at_s = "2ms"', "at_s = true"),
        ('at_s = "2ms"', "at_s = -1"),
        ('period_s = "20ms"', "period_s = 0"),
        ('"300KiB"', "[3]"),
        ('"900GB/s"', "false"),
        ("link_flap", "link_flop"),
    ],
)
def test_what_is_no_quantity_is_underlined(old: str, new: str) -> None:
    """A number or text, and nothing else."""
    assert complaints(QUANTITIES.replace(old, new, 1))
