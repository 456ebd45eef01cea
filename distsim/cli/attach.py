"""`distsim attach PID`: which rank hangs a job that was started without distsim, by its stacks."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from distsim.errors import UsageError
from distsim.text.codec import encode
from distsim.text.output_files import output_file, page_file, write_json
from distsim.text.units import seconds
from distsim.text.untrusted_input import brief, folded, printable, read_text

if TYPE_CHECKING:
    from distsim.debug.attach import HostPositions, Judged, RasStatus
    from distsim.debug.attach.ranks import RankProcess

DESCRIPTION = """\
Find the rank that hangs a running job. Nothing has to be installed in the job.

  distsim attach 4711           the launcher's process (torchrun, mpirun, a script that spawns), or ranks
  distsim attach                the only job of this host
  distsim attach --hosts FILE   on every host in FILE, through ssh; distsim has to be installed there

With --watch it looks every 10 s, and prints a line for each change: a rank that ended or stopped, a
hang, a rank that is slow.

Takes two stack samples of each rank with py-spy, a second apart, without stopping it, and names the
ranks that are not where the others wait. Stacks do not show what a rank called before: the report
says what it rests on.

exit codes: 0 no rank hangs, or nothing tells the waiting ranks apart, 2 usage, 3 a hang was seen
"""
SSH_S = 120
LARGEST_HOSTS = 1 << 20


def add_report_flags(parser: argparse.ArgumentParser) -> None:
    """Add `--report` and `--json`."""
    as_json = parser.add_mutually_exclusive_group()
    as_json.add_argument(
        "--report",
        metavar="FILE|-",
        type=output_file("--report"),
        help="the diagnoses as JSON (schema distsim.report/1); -: stdout",
    )
    as_json.add_argument("--json", dest="report", action="store_const", const="-", help="as --report -")


def add_parser(subparsers: Any) -> None:
    """Add `attach`."""
    parser = subparsers.add_parser("attach", description=DESCRIPTION)
    parser.add_argument("pids", metavar="PID", type=int, nargs="*", help="launcher or ranks (default: all ranks here)")
    parser.add_argument("--torchrun", metavar="PID", type=int, help="the launcher's process, as PID")
    parser.add_argument("--pattern", metavar="REGEX", help="ranks whose command line matches, as in pgrep -f")
    parser.add_argument("--hosts", metavar="FILE", type=Path, help="a file with a host name in each line, for ssh")
    parser.add_argument(
        "--ras",
        metavar="HOST[:PORT]",
        help="ask NCCL's RAS service there, too (NCCL 2.24 and later listens on localhost:28028 of each host)",
    )
    parser.add_argument(
        "--debug-server",
        metavar="[HOST:]PORT",
        help="read the records of torch.distributed.debug's server there (default: port 25999, where the job has one)",
    )
    add_report_flags(parser)
    parser.add_argument("--html", metavar="FILE", type=page_file, help="write an HTML page (extra: html)")
    parser.add_argument("--watch", action="store_true", help="look again and again, until the ranks have ended")
    parser.add_argument(
        "--every", type=seconds, default=10.0, metavar="SECONDS", help="between two looks of --watch (default: 10)"
    )
    parser.add_argument(
        "--events",
        metavar="FILE|-",
        type=output_file("--events"),
        help="append what --watch sees as lines of JSON (schema distsim.events/1); -: stdout",
    )
    parser.add_argument("--places", action="store_true", help="print where the ranks are as JSON, without a diagnosis")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Examine the ranks, print the result, and return the exit code."""
    from distsim.debug.attach import find_ranks, judge_hosts, look_at_host

    pids = [*args.pids, *([args.torchrun] if args.torchrun is not None else [])]
    try:
        re.compile(args.pattern or "")
    except re.error as error:
        raise UsageError(f"--pattern: expected a regular expression, got {args.pattern!r} ({error})") from None
    if args.events and not args.watch:
        raise UsageError("--events: expected --watch, which sees events")
    if args.hosts is not None and args.watch:
        raise UsageError("--watch: it watches the ranks of this host; run it on each host, without --hosts")
    if args.hosts is not None:
        if pids:
            raise UsageError("--hosts: process numbers differ by host; choose the job there by --pattern")
        ras = _ask_ras(args)
        seen = _on_hosts(args.hosts, args.pattern)
        ranks = []
    else:
        ranks = find_ranks(pids, args.pattern or "")
        if args.watch:
            return _watch(ranks, args)
        ras = _ask_ras(args)
        seen = [look_at_host(ranks)]
    if args.places:
        print(encode(seen[0]).decode())
        return 0
    return _tell(_join(judge_hosts(seen), ranks, ras, args), args)


def _watch(ranks: Sequence[RankProcess], args: argparse.Namespace) -> int:
    """Look at the ranks of this host until they have ended. Return 3 if they hung at the last look."""
    from distsim.debug.attach import JobWatch, StackWatch, judge_hosts, look_at_host, ras_facts, watch_job
    from distsim.debug.report.news import Events, say

    stacks = StackWatch(ranks)
    polls = _ask_ras(args)
    known: set[str] = set()

    def examine() -> Judged:
        return _join(judge_hosts([look_at_host(stacks.processes)]), stacks.processes, polls[-1:], args)

    def poll() -> None:
        """Ask RAS, and print what two answers in a row agree on."""
        if args.ras is None:
            return
        try:
            polls[:] = [*polls[-1:], *_ask_ras(args)]
            texts = {text for text, _ in ras_facts(polls, {})}
        except UsageError as error:
            texts = {str(error)}
        for text in sorted(texts - known):
            say(f"NCCL RAS: {text}")
        known.clear()
        known.update(texts)

    job = JobWatch(say, examine, lambda judged: _print(judged, sys.stdout), Events(args.events or "", ""))
    try:
        watch_job(stacks, job, max(args.every, 0.5), say, poll)
    except KeyboardInterrupt:
        pass
    finally:
        job.finish()
    return 3 if job.hangs else 0


def _print(judged: Judged, stream: TextIO) -> None:
    from distsim.debug.report.console import Console, piped_width
    from distsim.debug.report.render import render_diagnoses

    console = Console(file=stream, width=None if stream.isatty() else piped_width(110))
    if judged.running:
        console.print(judged.running, highlight=False)
    else:
        console.print(render_diagnoses(judged.diagnoses, judged.evidence, judged.inconclusive), crop=False)
    stream.flush()


def _ask_ras(args: argparse.Namespace) -> list[RasStatus]:
    from distsim.debug.attach import ask_ras

    return [] if args.ras is None else [ask_ras(args.ras)]


def _join(judged: Judged, ranks: Sequence[RankProcess], ras: list[RasStatus], args: argparse.Namespace) -> Judged:
    """Join the stacks with the answers of other services of the job."""
    from distsim.debug.attach import ask_debug_server, ask_flight_recorders, find_debug_server, join

    if judged.running:
        return judged
    joined = ask_flight_recorders(ranks)
    if joined.records is None and (server := args.debug_server or find_debug_server(ranks)):
        notes = joined.notes
        joined = ask_debug_server(server)
        joined.notes[:0] = notes
    joined.ras = [*ras, *_ask_ras(args)]
    not_asked = [
        *(["Flight Recorder (no pipe, no debug server)"] if joined.records is None and not joined.notes else []),
        *([] if args.ras else ["NCCL RAS (--ras)"]),
    ]
    if not_asked and not (judged.diagnoses and joined.records):
        joined.notes.append(f"not asked: {', '.join(not_asked)}")
    return join(judged, joined)


def complain(complaints: list[str]) -> None:
    """Print the first of *complaints* about files or hosts, a line each, and how many more there are."""
    sys.stdout.flush()
    for complaint in folded(complaints):
        print(f"distsim: {printable(complaint)}", file=sys.stderr)


def check_no_process(directory: Path) -> None:
    """Raise UsageError if the user passed the number of a running process where a folder of records is expected."""
    name = str(directory)
    if name.isdigit() and not directory.exists() and Path(f"/proc/{name}").exists():
        raise UsageError(
            f"expected a folder of records, got {name}, a running process: distsim attach {name} reads its stacks"
        )


def _tell(judged: Judged, args: argparse.Namespace) -> int:
    from distsim.debug.records.diagnosis import diagnoses_to_json, exit_code
    from distsim.debug.report.shown import with_evidence

    _print(judged, sys.stderr if args.report == "-" else sys.stdout)
    code = min(int(exit_code(judged.diagnoses)), 3)  # 4 is for contradictions on record, which stacks do not show
    if args.report:
        report = diagnoses_to_json(with_evidence(judged.diagnoses, judged.evidence)) | {"exit_code": code}
        if judged.inconclusive:
            report["inconclusive"] = str(judged.inconclusive)
        write_json("--report", args.report, report)
    if args.html:
        from distsim.report.html.reports import write_records

        write_records(judged.diagnoses, judged.evidence, args, "a running job", judged.inconclusive)
    return code


def _on_hosts(file: Path, pattern: str | None) -> list[HostPositions]:
    """Return the ranks of each host in *file*; a host that cannot be looked at is one line on stderr."""
    try:
        hosts = [line.split("#")[0].strip() for line in read_text(file, LARGEST_HOSTS).splitlines()]
    except OSError as error:
        raise UsageError(f"--hosts {file}: expected a file with a host name in each line ({error.strerror})") from None
    hosts = [host for host in hosts if host]
    if wrong := [host for host in hosts if not re.fullmatch(r"[\w@.:\[\]-]{1,300}", host) or host.startswith("-")]:
        raise UsageError(f"--hosts {file}: expected a host name in each line, got {brief(wrong[0])!r}")
    if not hosts:
        raise UsageError(f"--hosts {file}: expected a host name in each line, got none")
    command = ["distsim", "attach", "--places", *(["--pattern", pattern] if pattern else [])]
    with ThreadPoolExecutor(min(32, len(hosts))) as pool:
        answers = list(pool.map(lambda host: _ask(host, command), hosts))
    complain([f"{host}: {answer}" for host, answer in zip(hosts, answers, strict=True) if isinstance(answer, str)])
    seen = [answer for answer in answers if not isinstance(answer, str)]
    if not seen:
        raise UsageError(f"--hosts {file}: none of {len(hosts)} hosts could be examined")
    return seen


def _ask(host: str, command: Sequence[str]) -> HostPositions | str:
    from distsim.debug.attach import HostPositions

    try:
        done = subprocess.run(
            ["ssh", "-o", "BatchMode=yes", host, shlex.join(command)],
            capture_output=True,
            text=True,
            timeout=SSH_S,
            check=False,
        )
    except FileNotFoundError:
        return "ssh is not installed"
    except subprocess.TimeoutExpired:
        return f"no answer in {SSH_S} s"
    if done.returncode:
        errors = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return errors[-1].removeprefix("distsim: error: ")
    try:
        return HostPositions.from_json(done.stdout)
    except ValueError:
        return "unexpected answer; is another release of distsim installed there?"
