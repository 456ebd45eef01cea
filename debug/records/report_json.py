"""The diagnoses' part of the JSON report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distsim.debug.records.diagnosis import Diagnosis

__all__ = ["SCHEMA", "diagnoses_from_json", "diagnoses_to_json", "exit_code"]

SCHEMA = "distsim.report/1"
"""Grows by new keys only; a key that changes its meaning makes it `/2`."""


def diagnoses_to_json(diagnoses: Sequence[Diagnosis]) -> dict[str, Any]:
    """`{"schema": ..., "diagnoses": [...]}`, ready for `json.dumps`; a healthy run has an empty list."""
    return {"schema": SCHEMA, "diagnoses": [d.to_json() for d in diagnoses]}


def diagnoses_from_json(report: Mapping[str, Any]) -> list[Diagnosis]:
    """The diagnoses of a report of this schema."""
    schema = report.get("schema")
    if schema != SCHEMA:
        got = repr(schema[:60]) if isinstance(schema, str) else type(schema).__name__
        raise ValueError(f"expected schema {SCHEMA!r}, got {got}")
    return [Diagnosis.from_json(d) for d in report["diagnoses"]]


def exit_code(diagnoses: Sequence[Diagnosis]) -> int:
    """The root cause's exit code; 0 where nothing but warnings is left."""
    return next((code for d in diagnoses if (code := d.exit_code)), 0)
