"""The JSON report, `"schema": "distsim.report/1"`.

The same content as the terminal's summary, for programs. Two runs with the same seed give the same
bytes: nothing of it is measured on the machine that simulates. Fields are only ever added; what
takes one away or changes its meaning changes the schema's number.

- `schema`, `version`: of this document; of distsim
- `program`, `cluster`, `backend`, `seed`, `world_size`: what ran; `software`: whose collectives were assumed (NCCL's
  version, plugin, settings, the cluster's variant), null where none but gloo's or MPI's were used
- `exit_code`: 0 finished, 1 raised, 3 hang, 4 inconsistent collectives, 5 the ranks that were traced finished and
  these are not all, or with `--silent strict` all finished and `silent` has an error; `interrupted`: by Ctrl-C
- `proof`: what the verdict rests on, `all` ranks or a `sample` of them; `not_traced[]`: ranks that did not run, or not
  to their end, of which nothing is known; `unseen`: the line that says so, with what running all would take
- `virtual_time_s`, `events`: how long the program took on the cluster; simulated events
- `ranks[]`: `rank, host, device, phase, exit_code`, and `end_s, compute_s, communication_s,
  exposed_s, idle_s`; `peak_memory_bytes` of its tensors where it was asked for
- `collectives[]`: `group, op, dtype, num_ranks, count, bytes, time_s, algbw_bytes_per_s,
  busbw_bytes_per_s`, and `low_s, high_s`: where a measured time_s would lie in eight cases of ten, null where nobody
  has measured such calls
- `links[]`: the used ones: `name, kind, bandwidth_bytes_per_s, bytes, busy_s, mean_utilisation,
  peak_utilisation`
- `diagnoses[]`: `distsim.debug.diagnosis.diagnose.Diagnosis.to_json`, the root cause first; empty for a
  healthy run. `see` is the kind's section in the documentation
- `silent[]`: silent wrong results: `kind, level` (error, warning, notice), `ranks, tensors, step, site, evidence,
  distance, explanation, suggestion, see`; empty where nobody looked (`--silent off`, more than 64 ranks, no values)
- `failures[]`: `ranks, type, message, traceback`, equal ones merged
- `notes[]`: one sentence each
- `training`, where ranks used GPUs: what their optimizers' steps were, see `distsim.report.training`

`exposed_s` is the part of `communication_s` during which the rank did nothing else. Bandwidths have
nccl-tests' meaning. A figure that is not finite is null.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distsim import __version__
from distsim.debug.report.stack_tree import blank_addresses
from distsim.report.failures import merge_failures
from distsim.report.training.section import training_section

if TYPE_CHECKING:
    from distsim.sim.outcome import Outcome, RankSummary

__all__ = ["SCHEMA", "clean", "report_document", "write_report"]

SCHEMA = "distsim.report/1"

_RANK_FIELDS = (
    "rank",
    "host",
    "device",
    "phase",
    "exit_code",
    "end_s",
    "compute_s",
    "communication_s",
    "exposed_s",
    "idle_s",
)
_COLLECTIVE_FIELDS = (
    "group",
    "op",
    "dtype",
    "num_ranks",
    "count",
    "bytes",
    "time_s",
    "algbw_bytes_per_s",
    "busbw_bytes_per_s",
    "low_s",
    "high_s",
)
_LINK_FIELDS = (
    "name",
    "kind",
    "bandwidth_bytes_per_s",
    "bytes",
    "busy_s",
    "mean_utilisation",
    "peak_utilisation",
)


def report_document(outcome: Outcome) -> dict[str, Any]:
    """The report as plain JSON data."""
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
        "not_traced": list(outcome.not_traced),
        "unseen": outcome.unseen,
        "virtual_time_s": outcome.virtual_time_s,
        "events": outcome.events,
        "ranks": [_rank(rank) for rank in outcome.ranks],
        "collectives": [_pick(total, _COLLECTIVE_FIELDS) for total in outcome.collectives],
        "links": [_pick(link, _LINK_FIELDS) for link in outcome.links if link.bytes > 0],
        "diagnoses": [diagnosis.to_json() for diagnosis in outcome.diagnoses],
        "failures": [
            {
                "ranks": list(failure.ranks),
                "type": failure.type,
                "message": failure.message,
                "traceback": failure.traceback,
            }
            for failure in merge_failures(outcome.failures)
        ],
        "silent": [finding.to_json() for finding in outcome.silent],
        "notes": list(outcome.notes),
    }
    if outcome.training is not None:
        document["training"] = training_section(outcome.training)
    cleaned = clean(document)
    assert isinstance(cleaned, dict)
    return cleaned


def write_report(outcome: Outcome, path: str) -> None:
    """Write the JSON report to *path*."""
    text = json.dumps(report_document(outcome), indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False)
    Path(path).write_text(text + "\n", encoding="utf-8")


def _rank(rank: RankSummary) -> dict[str, Any]:
    peak = {} if rank.peak_memory_bytes is None else {"peak_memory_bytes": rank.peak_memory_bytes}
    return _pick(rank, _RANK_FIELDS) | peak


def _pick(item: object, fields: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(item, name) for name in fields}


def clean(value: Any) -> Any:
    """Return *value* with null for infinity (such as a loopback link's bandwidth) and NaN, which JSON does not have.

    Addresses of objects in messages are blanked, because they differ from run to run.
    """
    if isinstance(value, str):
        return blank_addresses(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean(item) for item in value]
    return value
