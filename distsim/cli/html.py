"""`distsim html REPORT.json`: makes an HTML page from an existing JSON report."""

from __future__ import annotations

import argparse
import json
import os
import re
from typing import Any

from distsim.errors import UsageError
from distsim.text.output_files import page_file

LARGEST = 256 << 20
MAKE = "write it with --report FILE"
_ENDS = re.compile(r"[\w.+-]*\s*")
"""Pattern of a partial number or word at the end of a truncated text."""
DESCRIPTION = """\
Write an HTML page from a JSON report: from any --report FILE, or from the JSON of such a page.

  distsim html report.json               writes report.html
  distsim html report.json -o page.html

A --report FILE has the verdict, the times and the links; lanes, stacks and messages need the records, which only
--html takes along (distsim run --html, diagnose --html).
"""


def add_parser(subparsers: Any) -> None:
    """Add `html`."""
    parser = subparsers.add_parser("html", description=DESCRIPTION)
    parser.add_argument("report", metavar="REPORT.json", help="a report (schema distsim.report/1)")
    parser.add_argument("-o", "--output", metavar="FILE", help="the page (default: REPORT.html beside it)")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Write the page. Always return exit code 0."""
    from distsim.text.untrusted_input import read_json

    output = args.output or f"{os.path.splitext(args.report)[0]}.html"
    page_file(output, "-o" if args.output else "html")
    try:
        document = read_json(args.report, LARGEST)
    except OSError as error:
        raise UsageError(f"{args.report}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        problem = _line(error)
        if isinstance(error, json.JSONDecodeError) and _is_cut(error):
            raise UsageError(f"{args.report}: cut off ({problem}): copy the report whole, or {MAKE} again") from None
        raise UsageError(f"{args.report}: no JSON ({problem}); expected a report: {MAKE}") from None
    if not isinstance(document, dict):
        got = f"expected an object, got a {type(document).__name__}"
        raise UsageError(f"{args.report}: not a report of distsim ({got}); {MAKE}")
    from distsim.debug.records.diagnosis import SCHEMA
    from distsim.report.html.page import run_page, write_page
    from distsim.report.html.reports import damage

    if _is_newer(document.get("schema"), SCHEMA):
        raise UsageError(
            f"{args.report}: expected schema {SCHEMA!r}, got {document['schema']!r}: a newer distsim wrote it; upgrade "
            "this one"
        )
    try:
        if (wrong := damage(document)) is not None:
            raise ValueError(wrong)
        page = run_page(document)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, OverflowError) as error:
        raise UsageError(f"{args.report}: not a report of distsim, or a damaged one ({_line(error)}); {MAKE}") from None
    write_page(page, output, "-o")
    return 0


def _is_newer(schema: object, known: str) -> bool:
    name, _, number = known.partition("/")
    match = re.fullmatch(rf"{name}/(\d{{1,9}})", str(schema))
    return match is not None and int(match[1]) > int(number)


def _is_cut(error: json.JSONDecodeError) -> bool:
    """Return whether the text ends too early: a report begins with a brace, and ends with its counterpart."""
    ends = _ENDS.fullmatch(error.doc, error.pos) is not None or error.msg.startswith("Unterminated string")
    return ends and error.doc.lstrip().startswith("{")


def _line(error: Exception) -> str:
    text = next(iter(str(error).strip().splitlines()), "")
    if isinstance(error, KeyError):
        return f"it has no {text}"
    return text[:200] or type(error).__name__
