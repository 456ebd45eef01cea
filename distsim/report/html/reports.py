"""From a run to its report with a picture, and to its page: simulated runs, real runs, and failed tests.

The report of a real run comes from its flight records; `pytest --distsim-html DIR` writes one file for each failed
test. A report that is read from a file may have been edited or written by another program: `damage` finds impossible
values. The last word of a key says what its value is (`end_s`, `peak_memory_bytes`), so there is no list of all keys
to maintain.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distsim.debug.postmortem import examine
from distsim.debug.records import Evidence
from distsim.debug.records.diagnosis import SCHEMA, Diagnosis, diagnoses_to_json, exit_code
from distsim.debug.rings.files import default_directory, private_folder
from distsim.errors import UsageError
from distsim.report.document import clean, report_document
from distsim.report.html.collect import Material, of_outcome, of_records, picture
from distsim.report.html.page import html, run_page, write_page
from distsim.text.output_files import check_folder, needed, write_text
from distsim.text.untrusted_input import brief

if TYPE_CHECKING:
    from distsim.debug.diagnosis.silent.facts import SilentFinding
    from distsim.report.html.collect import Fault
    from distsim.sim.outcome import Outcome

FLAG = "--distsim-html"
LONGEST = 120
"""Largest number of characters of a test's name in a file name."""
_FIGURE = re.compile(r"(?:^|_)(?:s|bytes|count|alike|size|events|seed|rank|code|utilisation|flops|gpus|mfu|hfu|share)$")
_WHOLE = re.compile(r"^(?:world_size|events|seed|rank|exit_code)$")
_TEXT = ("program", "cluster", "backend", "software", "version", "inconclusive")
_FLAGS = ("interrupted", "snapshot")
_SIGNED = {"seed", "exit_code", "gpu_saved_s", "host_saved_s"}
"""Keys whose value may be negative: the exit code of a killed process, and savings by fusion, which may be losses."""
_OTHER_CLOCKS = ("picture", "diagnoses", "jobs")
"""Keys whose times may be negative, because another host's clock may be behind."""
_ROUNDING_S = 1e-6


def outcome_document(outcome: Outcome, replay: str = "", faults: Sequence[Fault] = ()) -> dict[str, Any]:
    """Return the report of a simulated run, with its picture."""
    return report_document(outcome) | _picture(of_outcome(outcome, faults), replay)


def records_document(
    diagnoses: Sequence[Diagnosis], evidence: Evidence, replay: str = "", snapshot: bool = False
) -> dict[str, Any]:
    """Return the report of a real run from its flight records, with its picture. A *snapshot* is taken while it
    runs.
    """
    document = diagnoses_to_json(diagnoses)
    document |= {
        "world_size": evidence.world_size,
        "exit_code": int(exit_code(diagnoses)),
        "notes": list(evidence.notes),
        **({"snapshot": True} if snapshot else {}),
    }
    return dict(clean(document)) | _picture(of_records(diagnoses, evidence, snapshot), replay)


def write_records(
    diagnoses: Sequence[Diagnosis],
    evidence: Evidence,
    args: argparse.Namespace,
    program: str,
    inconclusive: object = None,
    silent: Sequence[SilentFinding] | None = None,
    snapshot: bool = False,
) -> None:
    """Write the page of a real run.

    Args:
        diagnoses: Faults of the run.
        evidence: What they rest on.
        args: Arguments of the command: `html` is the file, and `argv` its words.
        program: What ran.
        inconclusive: Why nothing could be said, if so.
        silent: Silent findings, if the command looks for them.
        snapshot: Whether the run still goes on.
    """
    document = records_document(diagnoses, evidence, shlex.join(["distsim", *args.argv]), snapshot)
    document["program"] = program
    if inconclusive:
        document["inconclusive"] = str(inconclusive)
    if silent is not None:
        document["silent"] = [finding.to_json() for finding in silent]
    write_page(run_page(document), args.html)


def _picture(material: Material, replay: str) -> dict[str, Any]:
    return {"picture": clean(picture(material, replay))}


def launch_with_page(launch: Callable[[], int], args: Any) -> int:
    """Run *launch* and write the page. Return its exit code, or 2 if only the page failed. The records of a successful
    run are kept until the page is written."""
    chosen = getattr(args, "rings", None) or os.environ.get("DISTSIM_DIR")
    if not chosen:
        try:
            base = default_directory("x").parent
            private_folder(base)
            args.rings = tempfile.mkdtemp(prefix="run-", dir=base)
        except OSError as error:
            raise UsageError(f"cannot write flight records ({error}); choose another folder with --rings DIR") from None
    directory = Path(chosen or args.rings)
    code = launch()
    try:
        result = examine(directory)
        write_records(
            result.diagnoses, result.evidence, args, args.training_script, result.inconclusive, result.silent or ()
        )
    except UsageError as mistake:
        print(f"distsim: --html {args.html}: no page: {mistake}", file=sys.stderr)
        code = code or 2
    if not chosen and not code:
        shutil.rmtree(directory, ignore_errors=True)
    return code


def check_pages(folder: str | None) -> None:
    """Raise UsageError, before any test runs, if the folder or the pages cannot be created."""
    if folder:
        check_folder(folder, FLAG)
        needed(FLAG)


def page_of_outcome(folder: str, test: str, outcome: Outcome) -> str:
    """Write the page of a simulated test, and return the line about it in the test's failure."""

    return page_of_report(folder, test, outcome_document(outcome, _replay(test)))


def page_of_records(folder: str, test: str, directory: Path) -> str:
    """Return the page of a real run from the rings in *directory*; empty if they show no fault."""

    try:
        result = examine(directory)
    except UsageError:  # no rank came to init_process_group
        return ""
    if not result.diagnoses:
        return ""
    return page_of_report(folder, test, records_document(result.diagnoses, result.evidence, _replay(test)))


def page_of_report(folder: str, test: str, document: Mapping[str, Any]) -> str:
    """Write the page of a report, and return the line about it in the test's failure.

    A full disk does not hide the failure.
    """
    # The checksum: names that differ only in what no file may be called.
    name = f"{re.sub(r'[^A-Za-z0-9.]+', '-', test).strip('-')[-LONGEST:]}-{zlib.crc32(test.encode()):08x}.html"
    path = Path(folder) / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, html(run_page({**document, "program": test})))
    except OSError as error:
        return f"no page of this run: {FLAG} {folder} cannot be written ({error.strerror})"
    return f"this run as a page: {path}"


def _replay(test: str) -> str:
    return f"pytest '{test}'"


def damage(document: Mapping[str, Any]) -> str | None:
    """Return the first thing that is wrong in a report, with its path; None if nothing is, or if it is not a report at
    all.
    """
    return next(_wrong(document), None) if document.get("schema") == SCHEMA else None


def _wrong(document: Mapping[str, Any]) -> Iterator[str]:
    for name in _TEXT:
        if not isinstance(document.get(name), str | None):
            yield f"{name}: expected a text, got {_said(document[name])}"
    for name in _FLAGS:
        if not isinstance(document.get(name, False), bool):
            yield f"{name}: expected true or false, got {_said(document[name])}"
    notes = document.get("notes")
    if notes is not None and not (isinstance(notes, list) and all(isinstance(note, str) for note in notes)):
        yield f"notes: expected a list of texts, got {_said(notes)}"
    for name, value in document.items():
        yield from _figures(value, name, name, name not in _OTHER_CLOCKS)


def _figures(value: Any, path: str, name: str, from_zero: bool) -> Iterator[str]:
    """Yield what is wrong in *value*, which is at *path* under the key *name*."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _figures(one, f"{path}.{brief(key)}", key, from_zero)
    elif isinstance(value, list) and not _WHOLE.match(name):
        for number, one in enumerate(value):
            yield from _figures(one, f"{path}[{number}]", name, from_zero)
    elif value is not None and _FIGURE.search(name):
        yield from _figure(value, path, name, from_zero)


def _figure(value: Any, path: str, name: str, from_zero: bool) -> Iterator[str]:
    kind = "a whole number" if _WHOLE.match(name) else "a number"
    least = from_zero and name not in _SIGNED
    if least:
        kind += " of 0 or more"
    right = isinstance(value, int if _WHOLE.match(name) else int | float) and not isinstance(value, bool)
    if not right or not math.isfinite(value) or (least and value < -_ROUNDING_S):
        yield f"{path}: expected {kind}, got {_said(value)}"


def _said(value: Any) -> str:
    """Return a short form of a JSON value; a list or object is only named."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    return brief(repr(value))
