"""`distsim schema`: the JSON Schema of each report and of scenario files.

A report's `schema` is a name and a number, such as `distsim.report/1`. Later versions add keys, and values of
enumerations; a key that goes away or changes its meaning makes it `/2`, and then both are written for one release.
"""

from __future__ import annotations

import argparse
import importlib
import json
from typing import Any

from distsim.errors import UsageError
from distsim.text.untrusted_input import load_json

REPORTS = {
    "report": ("distsim.report.schema", "RunReport"),
    "events": ("distsim.report.schema", "EventLine"),
    "fits": ("distsim.planning.schema", "FitsReport"),
    "tune": ("distsim.planning.schema", "TuneReport"),
    "sweep": ("distsim.planning.schema", "SweepReport"),
    "buy": ("distsim.planning.schema", "BuyReport"),
    "equal": ("distsim.planning.schema", "EqualReport"),
    "trace": ("distsim.calibration.schema", "TraceReport"),
    "health": ("distsim.calibration.schema", "HealthReport"),
    "validation": ("distsim.calibration.schema", "ValidationReport"),
    "topo": ("distsim.cluster.show", "ClusterReport"),
    "scenario": ("distsim.scenario.file.schema", "ScenarioSpec"),
}
"""Module and type of each document."""


def add_parser(subparsers: Any) -> None:
    """Declare `distsim schema`."""
    parser = subparsers.add_parser(
        "schema",
        description="Print the JSON Schema of a JSON report, or of a scenario file. Later versions only add keys; "
        "another meaning of a key changes the number in `schema`.",
    )
    parser.add_argument("name", nargs="?", help=f"one of {', '.join(REPORTS)} (default: all, a line each)")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Print the schema, or the names of all."""
    if args.name is None:
        for name in REPORTS:
            print(f"{name:<11} {(report_type(name).__doc__ or '').splitlines()[0]}")
        return 0
    print(json.dumps(json_schema(args.name), indent=1))
    return 0


def report_type(name: str) -> Any:
    """Return the type of the document *name*, a key of `REPORTS`."""
    module, kind = REPORTS[name]
    return getattr(importlib.import_module(module), kind)


def json_schema(name: str) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of the document *name*, a key of `REPORTS` with or without `distsim.` in
    front and a version behind.

    Raises:
        UsageError: There is no such document, or not in this version.
    """
    from pydantic import ConfigDict, TypeAdapter

    short, _, number = name.removeprefix("distsim.").partition("/")
    if short not in REPORTS:
        raise UsageError(f"expected one of {', '.join(REPORTS)}, got {name!r}")
    if number not in ("", "1"):
        raise UsageError(f"expected {short} or {short}/1, the version that this distsim writes, got {name!r}")
    if short == "scenario":  # which editors know by its own command, too
        from distsim.scenario.file.schema import json_schema as of_scenarios

        written: dict[str, Any] = load_json(of_scenarios().encode())
        return written
    described = report_type(short)
    described.__pydantic_config__ = ConfigDict(use_attribute_docstrings=True)
    schema = TypeAdapter(described).json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": f"distsim.{short}/1", **schema}
