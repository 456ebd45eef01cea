"""From a run to its report with a picture, and to its page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from distsim.debug.records import Evidence
from distsim.debug.records.diagnosis import Diagnosis, diagnoses_to_json, exit_code
from distsim.report.document import clean, report_document
from distsim.report.html.collect import Material, of_outcome, of_records, picture
from distsim.report.html.page import write_page
from distsim.report.html.pages import run_page

if TYPE_CHECKING:
    from distsim.report.html.collect.material import Fault
    from distsim.sim.outcome import Outcome

__all__ = ["outcome_document", "records_document", "write_outcome", "write_records"]


def outcome_document(outcome: Outcome, replay: str = "", faults: Sequence[Fault] = ()) -> dict[str, Any]:
    """The report of a simulated run, with its picture."""
    return report_document(outcome) | _picture(of_outcome(outcome, faults), replay)


def records_document(
    diagnoses: Sequence[Diagnosis], evidence: Evidence, replay: str = "", snapshot: bool = False
) -> dict[str, Any]:
    """The report of a real run, from its flight records, with its picture; a *snapshot* is of one that runs."""
    document = diagnoses_to_json(diagnoses)
    document |= {
        "world_size": evidence.world_size,
        "exit_code": int(exit_code(diagnoses)),
        "notes": list(evidence.notes),
        **({"snapshot": True} if snapshot else {}),
    }
    return dict(clean(document)) | _picture(of_records(diagnoses, evidence, snapshot), replay)


def write_outcome(outcome: Outcome, path: str, replay: str = "", faults: Sequence[Fault] = ()) -> None:
    """The page of a simulated run."""
    write_page(run_page(outcome_document(outcome, replay, faults)), path)


def write_records(
    diagnoses: Sequence[Diagnosis],
    evidence: Evidence,
    path: str,
    replay: str = "",
    snapshot: bool = False,
    **more: Any,
) -> None:
    """The page of a real run; *more* goes into its report (`inconclusive`, `program`)."""
    write_page(run_page(records_document(diagnoses, evidence, replay, snapshot) | more), path)


def _picture(material: Material, replay: str) -> dict[str, Any]:
    return {"picture": clean(picture(material, replay))}
