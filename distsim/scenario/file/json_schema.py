"""JSON schema of scenario files for editors (taplo, VS Code) and other tools.

pydantic's schema is rewritten so that an editor reports a mistake in one line: a fault is compared only with the table
of its `what`, not with all seventeen; TOML has no null; references are resolved, so that every property keeps its own
description. TOML editors support draft 7.
"""

from __future__ import annotations

import json
from typing import Any

from distsim.scenario.file.schema import ScenarioSpec

__all__ = ["ID", "json_schema"]

ID = "urn:distsim:schema:scenario:1"
"""Absolute, and no address: nothing is loaded from anywhere."""


def json_schema() -> str:
    """The schema as JSON."""
    model_schema = ScenarioSpec.model_json_schema()
    schema = _plain(model_schema, model_schema["$defs"])
    schema |= {"$schema": "http://json-schema.org/draft-07/schema#", "$id": ID, "title": "A scenario of distsim"}
    return json.dumps(schema, indent=1, sort_keys=True)


def _plain(node: Any, tables: dict[str, Any]) -> Any:
    """*node* without references, titles and null."""
    if isinstance(node, list):
        return [_plain(one, tables) for one in node]
    if not isinstance(node, dict):
        return node
    if "discriminator" in node:
        return _fault(node["discriminator"], tables)
    node = dict(node)
    if "$ref" in node:
        node = {**tables[node.pop("$ref").rpartition("/")[2]], **node}
    choices = [choice for choice in node.get("anyOf", ()) if choice != {"type": "null"}]
    if len(choices) == 1:
        del node["anyOf"]
        return _plain({**choices[0], **node}, tables)
    if choices:
        node["anyOf"] = choices
    table = node.get("type") == "object" and "properties" in node
    if node.get("default", ...) is None or table:  # a table's default is those of its keys
        node.pop("default", None)
    if isinstance(node.get("description"), str):
        node["description"] = " ".join(node["description"].split())
    plain = {}
    for key, value in node.items():
        if key in ("properties", "patternProperties"):
            plain[key] = {name: _plain(one, tables) for name, one in value.items()}
        elif key != "$defs" and not (key == "title" and isinstance(value, str)):
            plain[key] = value if key in ("default", "examples", "required", "enum") else _plain(value, tables)
    return plain


def _fault(discriminator: dict[str, Any], tables: dict[str, Any]) -> dict[str, Any]:
    """A fault: its `what` says by which table it goes."""
    whats = {name: _plain({"$ref": ref}, tables) for name, ref in discriminator["mapping"].items()}
    name_schema = {"description": "what goes wrong", "enum": list(whats), "type": "string"}
    then = []
    for name, table in whats.items():
        table["properties"]["what"]["description"] = table["description"]
        condition = {"type": "object", "properties": {"what": {"const": name}}, "required": ["what"]}
        then.append({"if": condition, "then": table})
    return {"type": "object", "properties": {"what": name_schema}, "required": ["what"], "allOf": then}
