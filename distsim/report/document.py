"""The JSON report, `"schema": "distsim.report/1"`.

The same content as the terminal's summary, for programs. Two runs with the same seed give the same
bytes: nothing of it is measured on the machine that simulates. Fields are only ever added; what
takes one away or changes its meaning changes the schema's number.

`distsim.report.schema.RunReport` describes its keys (`distsim schema report`).
"""

from __future__ import annotations

import json
import math
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from distsim import __version__
from distsim.debug.records.diagnosis import SCHEMA
from distsim.debug.report.stack_tree import blank_addresses
from distsim.report.failures import merge_failures
from distsim.report.training.entry import training_section
from distsim.text.output_files import write_text
from distsim.text.ranks import ranges_of

if TYPE_CHECKING:
    from distsim.sim.outcome import Outcome, RankSummary


def report_document(outcome: Outcome) -> dict[str, Any]:
    """Return the report as JSON data."""
    document = {
        "schema": SCHEMA,
        "version": __version__,
        "program": outcome.program,
        "cluster": outcome.cluster,
        "backend": outcome.backend,
        "seed": outcome.seed,
        "software": outcome.software or None,
        "world_size": outcome.world_size,
        "exit_code": outcome.exit_code,
        "interrupted": outcome.interrupted,
        "proof": outcome.proof,
        "not_traced": ranges_of(outcome.not_traced) if outcome.world_size >= MANY_RANKS else outcome.not_traced,
        "unseen": outcome.unseen,
        "virtual_time_s": outcome.virtual_time_s,
        "events": outcome.events,
        "ranks": [_rank(rank) for rank in outcome.ranks],
        "collectives": outcome.collectives,
        "links": [link for link in outcome.links if link.bytes > 0],
        "diagnoses": _diagnoses(outcome),
        "failures": merge_failures(outcome.failures),
        "silent": [finding.to_json() for finding in outcome.silent],
        "notes": outcome.notes,
    }
    if outcome.training is not None:
        document["training"] = training_section(outcome.training)
    cleaned: dict[str, Any] = clean(document)
    return cleaned


MANY_RANKS = 4_096
"""World size from which ranks that were not traced are ranges."""


def write_report(outcome: Outcome, path: str) -> None:
    """Write the JSON report to *path*; `-` is standard output."""
    text = json.dumps(report_document(outcome), indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False)
    write_text(path, text + "\n")


def _diagnoses(outcome: Outcome) -> list[dict[str, Any]]:
    if not outcome.diagnoses:
        return []
    from distsim.debug.report.shown import with_evidence

    return [diagnosis.to_json() for diagnosis in with_evidence(outcome.diagnoses, outcome.evidence)]


def _rank(rank: RankSummary) -> dict[str, Any]:
    return {name: value for name, value in fields_of(rank).items() if (name, value) != ("peak_memory_bytes", None)}


def fields_of(item: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, whose values are not copied."""
    return {field.name: getattr(item, field.name) for field in fields(item)}


def clean(value: Any) -> Any:
    """Return *value* as JSON data: an object for a dataclass, and null for infinity (such as a loopback link's
    bandwidth) and NaN, which JSON does not have.

    Addresses of objects in messages are blanked, because they differ from run to run.
    """
    if is_dataclass(value):
        value = fields_of(value)
    if isinstance(value, str):
        return blank_addresses(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean(item) for item in value]
    return value
