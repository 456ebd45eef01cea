"""The JSON schema that editors get: it takes what the loader takes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from distsim.scenario import find_scenarios
from distsim.scenario.file.new import new_scenario
from distsim.scenario.file.schema import FAULT_TABLES, json_schema
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


def wrong(value: Any, schema: dict[str, Any], path: str = "") -> Iterator[str]:
    """Where *value* is not what *schema* allows: as much of JSON schema as we write."""
    for rule in schema.get("allOf", ()):
        if not list(wrong(value, rule["if"], path)):
            yield from wrong(value, rule["then"], path)
    choices = schema.get("anyOf")
    if choices and all(list(wrong(value, choice, path)) for choice in choices):
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
            yield from wrong(one, schema.get("items", {}), f"{path}[{i}]")
    if isinstance(value, dict):
        yield from (f"{path}: no {key}" for key in schema.get("required", ()) if key not in value)
        for key, one in value.items():
            fits = [s for pattern, s in schema.get("patternProperties", {}).items() if re.search(pattern, key)]
            found = schema.get("properties", {}).get(key, fits[0] if fits else schema.get("additionalProperties", {}))
            if found is False:
                yield f"{path}.{key}: unknown"
            elif found is not True:
                yield from wrong(one, found, f"{path}.{key}")


def complaints(text: str) -> list[str]:
    """What an editor would underline."""
    return list(wrong(tomllib.loads(text), json.loads(json_schema())))


@pytest.mark.parametrize("path", one_in(6, find_scenarios([LIBRARY])), ids=lambda path: path.stem)
def test_the_schema_takes_every_scenario_of_the_library(path: Path) -> None:
    """No file of ours is underlined in an editor."""
    assert not complaints(path.read_text(encoding="utf-8"))


def properties(node: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every property with its schema, whatever it is in; those that an `if` asks for are no properties of anything."""
    if isinstance(node, dict):
        yield from node.get("properties", {}).items()
        for key, value in node.items():
            if key != "if":
                yield from properties(value)
    elif isinstance(node, list):
        for value in node:
            yield from properties(value)


def test_every_property_is_described_and_the_schema_has_an_absolute_name() -> None:
    """Editors show a description where the mouse is; nothing refers to a place that they would have to load."""
    text = json_schema()
    schema = json.loads(text)
    described = list(properties(schema))
    assert len(described) > 60
    assert [name for name, said in described if not said.get("description") or "\n" in said["description"]] == []
    assert urlsplit(schema["$id"]).scheme
    assert "$ref" not in text
    assert "null" not in text


@pytest.mark.parametrize("what", FAULT_TABLES)
def test_a_wrong_key_of_a_fault_is_one_line(what: str) -> None:
    """A fault is held against its own table, and not against all others."""
    table = next(t["then"] for t in json.loads(json_schema())["properties"]["faults"]["items"]["allOf"]
                 if t["then"]["properties"]["what"]["const"] == what)  # fmt: skip
    needed = {
        "what": what,
        "link": "a->b",
        "nic": "n0/nic0",
        "switch": "leaf0",
        "ranks": [1],
        "rank": 1,
        "loss": 0.5,
        "gpu": "n0/gpu0",
        "factor": 0.5,
    }
    values = {key: needed.get(key, "5ms") for key in table["required"]}
    assert list(wrong({"program": "x.py", "faults": [values]}, json.loads(json_schema()))) == []
    (told,) = wrong({"program": "x.py", "faults": [{**values, "at": 1}]}, json.loads(json_schema()))
    assert told == ".faults[0].at: unknown"


BAD = """\
program = "made.py"
[[faults]]
what = "link_flap"
link = "a->b"
period_s = "20ms"
down_s = "1ms"
facktor = 2
"""


def npm(folder: Path, *packages: str) -> Path:
    """Their folder of programs; skipped where npm, or its registry, is not there."""
    if shutil.which("npm") is None:
        pytest.skip("no npm here")
    words = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), *packages]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)
    if done.returncode:
        pytest.skip(f"npm could not install {packages}: {done.stderr[-200:]}")
    return folder / "node_modules" / ".bin"


@pytest.mark.soak
@pytest.mark.slow
def test_taplo_takes_what_we_write_and_says_in_one_line_what_is_wrong(tmp_path: Path) -> None:
    """The language server of editors for TOML finds the schema by the first line of a new scenario."""
    taplo = npm(tmp_path, "@taplo/cli@0.7.0") / "taplo"
    new_scenario(tmp_path / "hang.toml")
    (tmp_path / "bad.toml").write_text((tmp_path / "hang.toml").read_text().partition("\n")[0] + "\n" + BAD)

    def checked(name: str) -> subprocess.CompletedProcess[str]:
        words = [taplo, "check", "--colors", "never", name]
        return subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)

    good, bad = checked("hang.toml"), checked("bad.toml")
    assert good.returncode == 0, good.stderr
    assert bad.returncode != 0
    (told,) = {line for line in bad.stderr.splitlines() if line.startswith("error: ")}  # at each key of the table
    assert "'facktor' was unexpected" in told


@pytest.mark.soak
@pytest.mark.slow
def test_ajv_in_strict_mode_takes_the_schema(tmp_path: Path) -> None:
    """No keyword that it does not know, no type left out; and it says of a wrong fault what is wrong with it."""
    npm(tmp_path, "ajv@8")
    (tmp_path / "schema.json").write_text(json_schema())
    (tmp_path / "data.json").write_text(json.dumps([tomllib.loads(QUANTITIES), tomllib.loads(BAD)]))
    (tmp_path / "check.js").write_text("""
const Ajv = require("ajv"), fs = require("fs");
const check = new Ajv({strict: true, allErrors: true}).compile(JSON.parse(fs.readFileSync("schema.json")));
const told = JSON.parse(fs.readFileSync("data.json")).map(d => check(d) ? [] : check.errors);
console.log(JSON.stringify(told));
""")
    words = ["node", "check.js"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    good, bad = json.loads(done.stdout)
    assert good == []
    assert [error["params"] for error in bad if error["keyword"] != "if"] == [{"additionalProperty": "facktor"}]


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
