"""`distsim watch DIR`: a live job, a row a group, updated in place."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from distsim.cli.attach import check_no_process, complain
from distsim.errors import UsageError
from distsim.text.output_files import no_folder, output_file, page_file
from distsim.text.units import seconds


def add_parser(subparsers: Any) -> None:
    """Add `watch`."""
    parser = subparsers.add_parser(
        "watch",
        description="Show a live job: a row a group, its ranks by the number of the call they are in. "
        "Updates in place on a terminal until the job ends; one snapshot when piped.",
    )
    parser.add_argument("directory", metavar="DIR", type=Path, help="where the rings are (--rings, DISTSIM_DIR)")
    parser.add_argument(
        "--interval", type=seconds, default=0.5, metavar="SECONDS", help="between updates (default: 0.5)"
    )
    parser.add_argument(
        "--job", default="", metavar="NAME", help="which job, where several write into DIR (default: the newest)"
    )
    parser.add_argument(
        "--metrics",
        metavar="FILE",
        type=output_file("--metrics", "distsim.prom"),
        help="write the job's state there until it ends, in Prometheus's text format, for the textfile collector of "
        "node_exporter (FILE.prom)",
    )
    parser.add_argument(
        "--html", metavar="FILE", type=page_file, help="write one snapshot as an HTML page (extra: html)"
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Show the table until every rank has ended, or once."""
    from rich.live import Live

    from distsim.debug.postmortem import load_jobs, load_rings
    from distsim.debug.report.console import Console, piped_width

    check_no_process(args.directory)
    if args.metrics is not None and not args.metrics.endswith(".prom"):
        print(f"distsim: --metrics {args.metrics}: node_exporter reads files named *.prom only", file=sys.stderr)
    once = args.html is not None or (not sys.stdout.isatty() and args.metrics is None)
    if not once:
        _await_job(args)
    if not args.directory.is_dir():
        start = f"start the job with --rings {args.directory} first, or watch on a terminal, where this waits for it"
        raise UsageError(f"expected a folder of rings, got {args.directory}: {no_folder(args.directory)}; {start}")
    jobs, complaints = load_jobs(args.directory)
    name = args.job or (jobs[0].name if jobs else "")
    readers, more = load_rings(args.directory, name) if jobs else ([], [])
    others = [job for job in jobs if job.name != name]
    if others:
        shown = next(job for job in jobs if job.name == name)
        which = " or ".join(f"--job {job.name}" for job in others[:4])
        print(f"distsim: {len(jobs)} jobs in one folder, this is {shown.text}; {which} shows another", file=sys.stderr)
    complain([*complaints, *(line for line in more if line not in complaints)])
    if not readers:
        raise UsageError(
            f"{args.directory}: no rings of distsim here (rank*.ring); start the job with --rings {args.directory}"
        )
    if args.html is not None:
        _write_page(name, args)
    if once:
        Console(width=None if sys.stdout.isatty() else piped_width(120), highlight=False).print(_view(readers))
        return 0
    with Live(_view(readers), console=Console(quiet=not sys.stdout.isatty()), auto_refresh=False) as live:
        while True:
            over = _ended(readers)
            _write_metrics(args, readers, name)
            if over:
                break
            time.sleep(max(args.interval, 0.05))
            readers = next((job.readers for job in load_jobs(args.directory)[0] if job.name == name), [])
            if not readers:  # the job ended well and took its rings along
                _write_metrics(args, readers, name)
                break
            live.update(_view(readers), refresh=True)
    return 0


def _write_metrics(args: argparse.Namespace, readers: Any, name: str) -> None:
    """Replace the metrics file, if one is wanted, in one step: node_exporter may read it at any moment as another
    user."""
    if args.metrics is None:
        return
    from distsim.debug.postmortem import read_verdict
    from distsim.debug.report.live import metrics_text
    from distsim.debug.rings.files import write_private

    diagnoses, _ = read_verdict(args.directory, name)
    try:
        write_private(Path(args.metrics), metrics_text(readers, name, diagnoses), 0o644)
    except OSError as error:
        raise UsageError(f"--metrics {args.metrics}: cannot be written ({error.strerror})") from None


def _await_job(args: argparse.Namespace) -> None:
    """Wait until a rank of the job has called init_process_group, so that `watch` may be started before the job."""
    from distsim.debug.postmortem import load_jobs

    is_announced = False
    while True:
        jobs = load_jobs(args.directory)[0] if args.directory.is_dir() else []
        if any(not args.job or job.name == args.job for job in jobs):
            return
        if not is_announced:
            name = f"job {args.job}" if args.job else "a job"
            print(f"distsim: waits for {name} to begin in {args.directory} (--rings DIR); Ctrl-C ends", file=sys.stderr)
            is_announced = True
        time.sleep(max(args.interval, 0.05))


def _write_page(name: str, args: argparse.Namespace) -> None:
    from distsim.debug.postmortem import examine_jobs
    from distsim.report.html.reports import write_records

    match = next((match for job, match in examine_jobs(args.directory)[0] if job.name == name), None)
    if match is None:
        raise UsageError(f"{args.directory}: the records of job {name} contradict each other, or are gone")
    final = [d for d in match.diagnoses if not d.provisional] if match.judged else []
    write_records(final, match.evidence, args, f"job {name}", snapshot=True)


def _view(readers: Any) -> Any:
    from rich.console import Group
    from rich.text import Text

    from distsim.debug.report.live import live_table, straggler_lines

    return Group(live_table(readers), *(Text(line, style="bold yellow") for line in straggler_lines(readers)))


def _ended(readers: Any) -> bool:
    from distsim.debug.evidence.processes import look

    processes = [look(reader.header.pid, reader.header.start_ticks) for reader in readers]
    return all(process is None or process.state in "ZX" for process in processes)
