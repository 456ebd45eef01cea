"""Runs a body on real ranks: every rank is a process on gloo, under the guard, with a monitor beside them.

The processes are forked from pytest's own, so fixtures, parametrized values and rewritten assertions are available.
Their output is shown with its rank when they have ended. Each sends its coverage data to pytest's process, which has
the only data file, without any configuration. (Simulated ranks need nothing: their threads use the trace function of
`threading`.)
"""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import pdb
import pickle
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from distsim.debug.monitor.start import Series
from distsim.plugin.annotations import in_library
from distsim.plugin.on_rank import RankReport, describe, rank_body
from distsim.plugin.options import NotSent, PluginOptions
from distsim.plugin.verdict import Verdict, from_here, report_silent, whole
from distsim.text.untrusted_input import read_object

if TYPE_CHECKING:
    from distsim.debug.diagnosis.silent.facts import SilentFinding
    from distsim.debug.postmortem import Found
    from distsim.debug.records import Evidence
    from distsim.debug.records.diagnosis import Diagnosis

MONITOR = Series()
"""One for all tests of this process."""

GRACE_S = 2.0
"""Seconds that the other ranks may run after one has failed; most of them fail, too."""
MONITOR_WAIT_S, SEARCH_WAIT_S = 5.0, 60.0
"""Seconds for the monitor's last judgement, and for a search for silent faults before it."""
_OPTIONS = (
    *("branch", "source", "source_pkgs", "source_dirs", "include", "omit", "context", "dynamic_context"),
    *("plugins", "relative_files", "cover_pylib", "core", "timid", "concurrency"),
)
"""Options of coverage's section `run` that decide what is measured, and how."""


def run_real(
    item: pytest.Function, body: functools.partial[Any], kwargs: Mapping[str, Any], options: PluginOptions
) -> Verdict:
    """Run *body* on `options.n` processes."""
    if options.cluster is not None or options.faults or options.guards:
        raise pytest.UsageError("ranks: cluster, faults and guards mean simulated ranks; leave them out on gloo")
    from distsim.debug.evidence.processes import own_process
    from distsim.debug.settings import Settings, Silent

    # gloo's ranks connect to each other one after the other: who has, ran a short body and left, took the connection
    # from a rank that was still at it. Not by the store: it is rank 0's, which may leave, too.
    connected = multiprocessing.get_context("fork").Barrier(options.n)
    directory = Path(tempfile.mkdtemp(prefix="distsim-test-"))
    away_s = min(options.host_timeout_s, options.timeout_s / 2)
    given = {"directory": str(directory), "on_hang": "abort", "hang_after_s": away_s, "silent": options.silent or "off"}
    settings = Settings.read(given)
    (directory / "launcher.json").write_text(json.dumps(own_process()))
    MONITOR.begin(directory, settings)
    children: dict[int, int] = {}
    readers: dict[int, int] = {}
    late = ""
    early: list[Diagnosis] | None = None
    try:
        port = _free_port()
        for rank in range(options.n):
            reader, writer = os.pipe()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Python 3.12 warns of fork beside threads; ours are asleep
                pid = os.fork()
            if pid == 0:
                os.close(reader)
                _child(rank, port, directory, settings, writer, item, body, kwargs, options, connected.wait)
            os.close(writer)
            children[rank], readers[rank] = pid, reader
        try:
            reports, codes, results = _collect(children, readers, directory, options.timeout_s)
        except pytest.fail.Exception as stop:  # pytest-timeout
            raise pytest.fail.Exception(f"{stop}\n\n{_where(directory)}".rstrip(), pytrace=False) from None
        if len(codes) < options.n and not any(codes.values()):  # nobody failed: it was too long
            late = f"the test still ran after timeout_s={options.timeout_s:g} seconds\n{_where(directory)}"
        elif len(codes) < options.n:  # what a monitor says of ranks after we have ended them is no news
            early = _told(directory) or _found(directory).diagnoses
            early = [d for d in early if d.kind.value == "rank_raised"] or early  # others had no time to come
    finally:
        for pid in children.values():
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        for reader in readers.values():
            os.close(reader)
        (directory / "done.json").write_text("{}")  # the monitor's last judgement, after all ranks have ended
        MONITOR.wait(SEARCH_WAIT_S if settings.silent is not Silent.OFF else MONITOR_WAIT_S)
        diagnoses = _told(directory)
        silent = _silent_findings(directory)
        _print_output(directory, options.n)
        take_in(directory)
        page = _page(item, directory) if diagnoses else ""
        shutil.rmtree(directory, ignore_errors=True)
    verdict = Verdict(reports, results=results)
    if late:
        verdict.report = late
        return verdict
    diagnoses_told = [d for d in (diagnoses if early is None else early) if d.adds_to(reports)]
    verdict.explain(diagnoses_told, _lines_of(diagnoses_told, options.n), every=whole(item))
    for rank, code in codes.items():
        if code and not reports and not verdict.report:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"
            verdict.report = f"rank {rank} {how}\n"
    if silent and not verdict.report and not reports:
        report_silent(item.name, verdict, silent, strict=options.silent == "strict")
    _leave_out_what_follows(verdict)
    if any(d.kind.value == "host_stuck" for d in diagnoses_told):
        verdict.notes.append(options.patience_note(away_s))
    if page:
        verdict.notes.append(page)
    return verdict


def _page(item: pytest.Function, directory: Path) -> str:
    """Return a line about the HTML page of the accused test, if pages are wanted."""
    folder = item.config.getoption("--distsim-html")
    if not folder:
        return ""
    from distsim.report.html.reports import page_of_records

    return page_of_records(folder, from_here(item), directory)


def _leave_out_what_follows(verdict: Verdict) -> None:
    """Keep only the ranks that failed by themselves, if there are any.

    Errors of gloo after a rank has gone are consequences. A timeout never is, because the user sets it.
    """
    reports = verdict.ranks
    own = {rank: report for rank, report in reports.items() if not _follows(report.headline)}
    if not verdict.report and not any(report.kind == "failed" for report in own.values()):
        return
    if (lost := sorted(reports.keys() - own.keys())) and not verdict.report:
        who = f"rank {lost[0]}" if len(lost) == 1 else f"{len(lost)} ranks"
        verdict.notes.append(f"{who} failed after that, of what gloo says: {reports[lost[0]].headline}")
    verdict.ranks = own


def _follows(headline: str) -> bool:
    return "gloo/transport" in headline and "Timed out waiting" not in headline


def _child(
    rank: int,
    port: int,
    directory: Path,
    settings: Any,
    writer: int,
    item: pytest.Function,
    body: functools.partial[Any],
    kwargs: Mapping[str, Any],
    options: PluginOptions,
    connected: Callable[[], object],
) -> NoReturn:
    """Run as one rank, from the start of its process to its end."""
    code = 1
    try:
        output = os.open(directory / f"output.{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
        sys.breakpointhook = pdb.set_trace = _no_prompt
        os.environ.update(settings.environment())
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(options.n),
            LOCAL_WORLD_SIZE=str(options.n),
            GROUP_RANK="0",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            DISTSIM_MONITOR="0",
            OMP_NUM_THREADS="1",
        )
        with measured_apart(directory / f"coverage.{rank}"):
            code = _run_rank(writer, item, body, kwargs, options, connected)
    except BaseException as error:  # ours: the parent has to hear of it
        with contextlib.suppress(OSError):
            report = RankReport("failed", f"distsim's own error: {error!r}", repr(error))
            os.write(writer, pickle.dumps((report, b"")))
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def _no_prompt(*args: Any, **kwargs: Any) -> NoReturn:
    raise pytest.UsageError("breakpoint() on gloo: a rank is a process without a terminal; debug the test on='sim'")


def _run_rank(
    writer: int,
    item: pytest.Function,
    body: functools.partial[Any],
    kwargs: Mapping[str, Any],
    options: PluginOptions,
    connected: Callable[[], object],
) -> int:
    import torch

    from distsim.realexec import install as guard

    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    guard.install()
    report: RankReport | None = None
    result = b""
    try:
        result = _sent(rank_body(body, kwargs, options, joined=connected)())
    except BaseException as error:
        session = guard.current_session()
        if session is not None:
            session.raised(error)
        report = describe(item, body, error)
    with os.fdopen(writer, "wb") as pipe:
        pickle.dump((report, result), pipe)
    if report is None:
        guard.remove()
    return 0 if report is None else 1


def _sent(value: Any) -> bytes:
    """Serialize *value* to send it to pytest's process, which deserializes it only if a test asks for it."""
    try:
        return pickle.dumps(value)
    except Exception as error:
        return pickle.dumps(NotSent(f"what the rank returned cannot be pickled: {type(error).__name__}: {error}"))


def _collect(
    children: Mapping[int, int], readers: Mapping[int, int], directory: Path, timeout_s: float
) -> tuple[dict[int, RankReport], dict[int, int], list[Any]]:
    """Wait for every rank, and return the reports of failed ranks, the exit codes, and the returned values."""
    reports: dict[int, RankReport] = {}
    codes: dict[int, int] = {}
    results: list[Any] = [None] * len(children)
    open_pipes = dict(readers)
    output: dict[int, bytes] = dict.fromkeys(readers, b"")
    deadline = time.monotonic() + timeout_s
    while len(codes) < len(children) and time.monotonic() < deadline:
        ready, _, _ = select.select(list(open_pipes.values()), [], [], 0.02)
        for rank, reader in list(open_pipes.items()):
            if reader in ready:
                data = os.read(reader, 1 << 16)
                output[rank] += data
                if not data:
                    del open_pipes[rank]
        for rank, pid in children.items():
            if rank in codes:
                continue
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[rank] = os.waitstatus_to_exitcode(status)
                scratch = directory / f"exit.{rank:05d}.new"
                scratch.write_text(json.dumps({"rank": rank, "attempt": 0, "code": codes[rank]}))
                scratch.rename(directory / f"exit.{rank:05d}.a0.json")
                if codes[rank]:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
    for rank, reader in open_pipes.items():
        os.set_blocking(reader, False)
        with contextlib.suppress(BlockingIOError):
            while data := os.read(reader, 1 << 16):
                output[rank] += data
    for rank, data in output.items():
        report = None
        with contextlib.suppress(Exception):
            report, result = pickle.loads(data)
            results[rank] = pickle.loads(result) if result else None
        if report is not None:
            reports[rank] = report
    return reports, codes, results


def _told(directory: Path) -> list[Diagnosis]:
    """Return the diagnoses of the monitor so far."""
    from distsim.debug.records.diagnosis import Diagnosis

    return [Diagnosis.from_json(d) for d in read_object(directory / "verdict.json").get("diagnoses", ())]


def _silent_findings(directory: Path) -> list[SilentFinding]:
    """Return the silent findings in the ranks' records, if the test asks for them."""
    from distsim.debug.diagnosis.silent.facts import SilentFinding

    return [SilentFinding.from_json(one) for one in read_object(directory / "verdict.json").get("silent", ())]


def _where(directory: Path) -> str:
    """Return the position of every rank that is still running."""
    from distsim.debug.report.rank_states import whereabouts

    return "\n".join(whereabouts(_found(directory).evidence))


def _found(directory: Path) -> Found:
    """Return the diagnoses from the rings at this moment."""
    from distsim.debug.postmortem import Found, examine
    from distsim.debug.records import Evidence
    from distsim.errors import UsageError

    try:
        return examine(directory)
    except UsageError:  # nobody has come as far as to write one
        return Found([], Evidence(0, {}, {}))


def _lines_of(diagnoses: Sequence[Diagnosis], num: int) -> Evidence:
    """Return the lines of the program that *diagnoses* name, and no more: the rings also hold later ones."""
    from distsim.debug.evidence.rank_state import sources_at
    from distsim.debug.records import Evidence

    return Evidence(
        num, {}, sources=sources_at(site for d in diagnoses for site in d.sites.values() if not in_library(site.file))
    )


def _print_output(directory: Path, num: int) -> None:
    width = len(str(num - 1))
    for rank in range(num):
        path = directory / f"output.{rank}"
        if path.exists():
            for line in path.read_text(errors="replace").splitlines():
                print(f"[{rank:>{width}}] {line}")


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _current() -> Any:
    module = sys.modules.get("coverage")
    return None if module is None else module.Coverage.current()


@contextlib.contextmanager
def measured_apart(file: Path) -> Iterator[None]:
    """Measure coverage in a process forked from a measuring one, and write the result to *file*."""
    inherited = _current()
    if inherited is None:
        yield
        return
    import coverage

    inherited.stop()
    own = coverage.Coverage(data_file=None, config_file=False)
    for name in _OPTIONS:
        with contextlib.suppress(coverage.CoverageException):  # one that this release does not know
            own.set_option(f"run:{name}", inherited.get_option(f"run:{name}"))
    own._warn_no_data = own._warn_unimported_source = own._warn_preimported_source = False
    own.start()
    try:
        yield
    finally:
        own.stop()
        file.write_bytes(own.get_data().dumps())


def take_in(directory: Path) -> None:
    """Add the coverage data that ranks have left in *directory* to that of this process."""
    cov = _current()
    if cov is None:
        return
    import coverage

    for file in sorted(directory.glob("coverage.*")):
        measured = coverage.CoverageData(no_disk=True)
        measured.loads(file.read_bytes())
        if measured:
            cov.get_data().update(measured)
