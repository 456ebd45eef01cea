"""`distsim trace DIR`: compares the ranks of a job by their traces."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distsim.calibration.traces.answers import Answers, OpRow, Regression

SCHEMA = "distsim.trace/1"
MOST_ROWS = 12
REPEATED = 0.03
"""Smallest share of a step by which a kernel has to differ from the other traces to be shown."""


def add_parser(subparsers: Any) -> None:
    """Declare `distsim trace`."""
    parser = subparsers.add_parser(
        "trace",
        description="Read the traces of torch's profiler of all ranks of a job (Kineto's JSON, one file a rank, also "
        ".gz), or those of distsim run --trace DIR/, and compare the ranks.",
    )
    parser.add_argument("dir", metavar="DIR", help="folder with a trace of each rank")
    parser.add_argument(
        "--on", metavar="CLUSTER", help="print the bandwidths to expect on this cluster beside the measured"
    )
    parser.add_argument("--against", metavar="DIR", help="traces of another run: print which kernels take longer now")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the tables")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Read, evaluate and print the traces; return 0."""
    from distsim.calibration.traces.answers import answer, regressions
    from distsim.calibration.traces.kineto import read_folder

    cluster = None
    if args.on is not None:
        from distsim.cluster import load_cluster

        cluster = load_cluster(args.on)
    job = read_folder(Path(args.dir))
    answers = answer(job, cluster)
    changes = None if args.against is None else regressions(job, read_folder(Path(args.against)))
    if args.json:
        document: dict[str, Any] = {"schema": SCHEMA, **asdict(answers), "notes": job.notes}
        document["collectives"] = len(job.meetings)
        if changes is not None:
            document["against"] = [asdict(change) for change in changes]
        print(json.dumps(document, indent=1))
    else:
        print("\n".join(_text(answers, changes, job.notes)))
    return 0


def _text(answers: Answers, changes: Sequence[Regression] | None, notes: Sequence[str]) -> Iterator[str]:
    for row in answers.ops[:3]:
        yield from _last(row)
    yield from _table(
        ("op", "group", "calls", "waited", "exposed", "busbw", "expected", "caused by"),
        [_cells(row) for row in answers.ops[:MOST_ROWS]],
    )
    if answers.ops:
        yield "ms; busbw in GB/s from the last arrival on; exposed: mean of the ranks"
    span_s = sum(one.span_s for one in answers.ranks) or 1.0
    ranks = f"{len(answers.ranks)} rank{'s' * (len(answers.ranks) != 1)}"
    parts = {"compute": "compute_s", "exposed communication": "exposed_s", "nothing launched": "idle_s"}
    shares = {name: sum(getattr(one, key) for one in answers.ranks) / span_s for name, key in parts.items()}
    yield f"{ranks}: {', '.join(f'{name} {share:.0%}' for name, share in shares.items())}"
    where = "all" if answers.step is None else f"step {answers.step}"
    total = [f"{part.name} {part.time_s * 1e3:.1f}" for part in answers.path[:5]]
    yield from _wrapped(f"critical path of {where} ({answers.path_s * 1e3:.1f} ms): {', '.join(total)}")
    if changes is not None:
        yield from _changes(changes)
    for note in notes:
        yield from _wrapped(f"note: {note}")


def _wrapped(line: str) -> list[str]:
    return textwrap.wrap(line, 80, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _last(row: OpRow) -> Iterator[str]:
    """Yield who came last to most calls of an operation, if that cost time, and why."""
    from distsim.calibration.traces.answers import WHY

    if not row.caused_s or row.waited_s <= 0.0:
        return
    rank = next(iter(row.caused_s))
    yield (
        f"rank {rank} comes last in {row.last[rank]} of {row.calls} {row.op} of {row.group}: others wait "
        f"{row.caused_s[rank] * 1e3:.1f} ms"
    )
    reasons = sorted(row.why_s.get(rank, {}).items(), key=lambda one: -one[1])
    shown = [f"{WHY[name]} ({seconds * 1e3:.1f} ms)" for name, seconds in reasons if seconds > row.caused_s[rank] / 10]
    if shown:
        yield f"  {', '.join(shown)}"


def _cells(row: OpRow) -> tuple[str, ...]:
    expected = "" if row.expected_GBps is None else "-".join(map(_rate, row.expected_GBps))
    caused = ", ".join(f"{rank}: {seconds * 1e3:.1f}" for rank, seconds in list(row.caused_s.items())[:2])
    busbw = "" if row.busbw_GBps is None else _rate(row.busbw_GBps)
    waited, exposed = (f"{seconds * 1e3:.1f}" for seconds in (row.waited_s, row.exposed_s))
    return row.op, row.group[:16], str(row.calls), waited, exposed, busbw, expected, caused


def _rate(rate: float) -> str:
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.2g}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table without its empty columns; numbers are on the right."""
    kept = [column for column in range(len(head)) if any(row[column] for row in rows)]
    widths = {column: max(len(row[column]) for row in (head, *rows)) for column in kept}
    for row in (head, *rows) if rows else ():
        cells = [f"{row[at]:<{widths[at]}}" if at in (0, 1, 7) else f"{row[at]:>{widths[at]}}" for at in kept]
        yield "  ".join(cells).rstrip()


def _changes(changes: Sequence[Regression]) -> Iterator[str]:
    """Yield the difference of a step's kernels to the other traces, and the kernels that differ most."""
    before, after = sum(one.before_s for one in changes), sum(one.after_s for one in changes)
    yield f"kernels of a step of one rank: {before * 1e3:.1f} -> {after * 1e3:.1f} ms"
    for one in changes[:MOST_ROWS]:
        if one.after_s - one.before_s > REPEATED * before:
            yield f"  {one.name}: {one.before_s * 1e3:.2f} -> {one.after_s * 1e3:.2f} ms"
