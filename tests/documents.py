"""JSON reports in tests, held to their published types."""

from __future__ import annotations

import functools
import json
from typing import Any

from pydantic import ConfigDict, TypeAdapter

from distsim.cli.agents.schema import report_type


@functools.cache
def _adapter(name: str) -> TypeAdapter[Any]:
    described = report_type(name)
    described.__pydantic_config__ = ConfigDict(extra="forbid", use_attribute_docstrings=True)
    try:
        return TypeAdapter(described)
    finally:
        del described.__pydantic_config__


def checked(text: str | bytes | dict[str, Any]) -> dict[str, Any]:
    """The report in *text*. It has every key that its type requires, and none that its type does not know."""
    document: dict[str, Any] = text if isinstance(text, dict) else json.loads(text)
    name, _, number = document["schema"].removeprefix("distsim.").partition("/")
    assert number == "1"
    _adapter(name).validate_python(document)
    return document
