"""`distsim diagnose DIR`: which rank hung a job, and where, from its flight records."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distsim.cli.attach import add_report_flags, check_no_process, complain
from distsim.text.output_files import page_file, write_json
from distsim.text.untrusted_input import printable

if TYPE_CHECKING:
    from distsim.debug.postmortem import Found

DESCRIPTION = """\
Find the rank that hung or broke a job, after the job has ended or while it hangs.

DIR holds the rings of a guarded job (distsim run --on gloo --rings DIR, or DISTSIM_DIR), or
PyTorch Flight Recorder dumps, one file per rank (pickle or JSON; nothing in them is executed).
Dumps with times on the device (TORCH_NCCL_ENABLE_TIMING=1) also show which rank is slow, and so do
the records of NCCL's Inspector.
Several jobs in one DIR are diagnosed one after the other, the newest first; the exit code is that of
the first one that went wrong.

exit codes: 0 healthy, 1 a rank raised, 2 nothing to diagnose, or inconclusive (nothing is wrong in
the records that are there, but some rank's are missing or unreadable), 3 hang, 4 inconsistent
collectives
"""


def add_parser(subparsers: Any) -> None:
    """Add `diagnose`."""
    parser = subparsers.add_parser("diagnose", description=DESCRIPTION)
    parser.add_argument("directory", metavar="DIR", type=Path)
    add_report_flags(parser)
    parser.add_argument(
        "--html", metavar="FILE", type=page_file, help="write an HTML page of the first job (extra: html)"
    )
    parser.add_argument(
        "--sources",
        metavar="DIR",
        action="append",
        type=Path,
        help="a folder whose files' lines may be read and shown, again for more (default: the working folder; records "
        "may name any file of yours)",
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Diagnose and print; each faulty file is reported in one line."""
    from distsim.debug.postmortem import examine, examine_jobs
    from distsim.debug.records.diagnosis import diagnoses_to_json, exit_code
    from distsim.debug.report.console import Console, piped_width
    from distsim.debug.report.render import render_diagnoses
    from distsim.debug.report.shown import with_evidence
    from distsim.debug.report.silent import SilentReport

    check_no_process(args.directory)
    judged, complaints = examine_jobs(args.directory, args.sources)
    complain(complaints if judged else [])
    several = len(judged) > 1
    stream = sys.stderr if args.report == "-" else sys.stdout
    console = Console(file=stream, width=None if stream.isatty() else piped_width(110))
    results = [result for _, result in judged] or [examine(args.directory, args.sources)]
    for number, result in enumerate(results):
        if several:
            console.print(("\n" if number else "") + f"{judged[number][0].text}:")
        complain(result.complaints)
        if result.diagnoses or result.evidence.records or result.inconclusive:  # else times on the device alone
            console.print(render_diagnoses(result.diagnoses, result.evidence, result.inconclusive), crop=False)
        for line in result.pace:
            console.print(printable(line), soft_wrap=True)
        if result.silent:
            console.print(SilentReport(result.silent), crop=False)
    codes = [int(exit_code(result.diagnoses)) or (2 if result.inconclusive else 0) for result in results]
    code = next((code for code in codes if code), 0)
    if args.report:
        shown = [with_evidence(result.diagnoses, result.evidence) for result in results]
        everything = [diagnosis for diagnoses in shown for diagnosis in diagnoses]
        report = diagnoses_to_json(everything) | {"exit_code": code}
        if any(result.silent is not None for result in results):
            report["silent"] = [finding.to_json() for result in results for finding in result.silent or ()]
        if unsure := [str(result.inconclusive) for result in results if result.inconclusive]:
            report["inconclusive"] = " ".join(unsure)
        if several:
            report["jobs"] = [
                {
                    "job": job.name,
                    "world_size": result.evidence.world_size,
                    "began_unix_s": job.began_ns / 1e9,
                    "diagnoses": [diagnosis.to_json() for diagnosis in diagnoses],
                    "exit_code": own,
                    **({"inconclusive": str(result.inconclusive)} if result.inconclusive else {}),
                }
                for (job, result), diagnoses, own in zip(judged, shown, codes, strict=True)
            ]
        write_json("--report", args.report, report)
    if args.html:
        _write_page(results, args)
    return code


def _write_page(results: Sequence[Found], args: argparse.Namespace) -> None:
    """Write the page of the job that decides the exit code: the first that went wrong, or else the newest."""
    from distsim.report.html.reports import write_records

    shown = next((result for result in results if result.diagnoses or result.inconclusive), results[0])
    write_records(
        shown.diagnoses, shown.evidence, args, str(args.directory), shown.inconclusive, silent=shown.silent or ()
    )
