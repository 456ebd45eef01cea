"""Combines the outcomes of all ranks of a test: passed, skipped, or one failure with one text.

With `--pdb` it has the frame in which a rank failed, or the reason why there is none.
"""

from __future__ import annotations

import bdb
import os
import re
import shutil
import textwrap
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

import pytest
from _pytest.outcomes import Failed
from _pytest.skipping import evaluate_xfail_marks

from distsim.plugin.annotations import in_library
from distsim.plugin.hypothesis import rejected
from distsim.plugin.on_rank import RankReport, full_names, pruned
from distsim.plugin.options import PluginOptions
from distsim.text.ranks import of_ranks

if TYPE_CHECKING:
    from distsim.debug.diagnosis.silent.facts import SilentFinding
    from distsim.debug.records import Evidence
    from distsim.debug.records.diagnosis import Diagnosis

SHOWN_IN_FULL = 2
"""Number of failures shown completely among those that differ only in values, without -vv."""
SHOWN_IN_A_LINE = 8
"""Number of further failures that are shown in one line each."""

MAX_DIAGNOSES = 3
"""Diagnoses shown whole."""
REST = "pytest -vv"
"""Command that shows the other failures, and complete tracebacks."""

_RAISED = ("rank_raised", "rank_exited", "ddp_unused_parameter")
"""Kinds that repeat what the rank's exception says."""
_ADDRESS = re.compile(r"0x[0-9a-f]+")
_OWN_ARGUMENTS = re.compile(r"^(.*\b)?(rank = \d+|world = World\(.*\)).*$", re.MULTILINE)
"""Pattern of the line in which pytest shows the arguments of the body."""


@dataclass(slots=True)
class Verdict:
    """Verdict on a test after all its ranks have ended."""

    ranks: dict[int, RankReport] = field(default_factory=dict)
    report: str = ""
    """The diagnosis as text for people, with the verdict in its first line; empty if there is none."""
    lead: str = ""
    """A short form of the diagnosis, if the ranks' failures only follow from it."""
    site: tuple[str, int] | None = None
    """File and line that the diagnosis names."""
    notes: list[str] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    """Return values by rank."""
    traces: dict[int, TracebackType] = field(default_factory=dict)
    """Tracebacks of simulated ranks that failed or were ended, for a debugger."""
    output: str = ""
    """What the ranks printed in one of many runs."""
    orders: list[str] = field(default_factory=list)
    """In which order of operations the test fails, if it does not fail in the usual one."""
    replay: str = ""
    """Command that repeats the run; empty for that of the test."""
    wrong_under_fault: str | None = None
    """Why ranks did not end as they should after a fault or an early limit; None if there was none."""

    def has_failed(self, num_ranks: int) -> bool:
        """Return whether the test of so many ranks has failed; a skip of all ranks is no failure."""
        failed = any(report.kind == "failed" for report in self.ranks.values())
        return failed or bool(self.report) or 0 < len(self.ranks) < num_ranks

    def explain(self, diagnoses: Sequence[Diagnosis], evidence: Evidence | None, *, every: bool) -> None:
        """Add the diagnoses to the verdict: the first few, or *every* one."""
        from distsim.debug.messages import ranks_text, site_text
        from distsim.debug.report.render import render_diagnoses

        if not diagnoses:
            return
        shown = len(diagnoses) if every else MAX_DIAGNOSES
        self.report = render_diagnoses(diagnoses[:shown], evidence, whole=every, rest=REST).plain(columns())
        if diagnoses[shown:]:
            kinds = ", ".join(dict.fromkeys(d.kind.label for d in diagnoses[shown:]))
            ranks = sorted({rank for d in diagnoses[shown:] for rank in d.culprits})
            self.report += f"\nand {len(diagnoses) - shown} more ({kinds}: {of_ranks(ranks)}); -vv shows them all\n"
        root = diagnoses[0]
        sites = [root.sites[r] for r in (*root.culprits, *root.victims) if r in root.sites]
        site = next((one for one in sites if not in_library(one.file)), None)  # a rank that is done stands in pytest
        if site is not None and site.line:
            self.site = (site.file, site.line)
        if root.kind.value not in _RAISED:
            self.lead = f"{root.kind.label}: {ranks_text(root.culprits)}" + (f" ({site_text(site)})" if site else "")


def from_here(item: pytest.Item) -> str:
    """Return the name of a test where pytest was started, which may be below the folder that its names begin in."""
    return item.config.cwd_relative_nodeid(item.nodeid)


def columns() -> int:
    """Return the width of a report: that of the terminal, or 80, as for pytest's own lines."""
    return max(60, min(120, shutil.get_terminal_size((80, 24)).columns))


def whole(item: pytest.Item) -> bool:
    """Return whether the user asked for full output (-vv)."""
    return item.config.get_verbosity() >= 2


def judge(verdict: Verdict, item: pytest.Function, options: PluginOptions) -> None:
    """Pass, skip or fail the test according to the outcomes of its ranks."""
    __tracebackhide__ = True
    if any(rejected(report.bases) for report in verdict.ranks.values()):
        from hypothesis.errors import UnsatisfiedAssumption

        raise UnsatisfiedAssumption
    failed = {rank: report for rank, report in verdict.ranks.items() if report.kind == "failed"}
    stopped = {rank: report for rank, report in verdict.ranks.items() if report.kind != "failed"}
    if not failed and len(stopped) == options.n:
        first = stopped[min(stopped)]
        (pytest.skip if first.kind == "skipped" else pytest.xfail)(first.text)
    if not failed and not stopped and not verdict.report:
        return
    expected = evaluate_xfail_marks(item)
    if expected is not None and expected.raises is not None and failed and _expected(expected.raises, failed):
        pytest.xfail(expected.reason)
    trace, failure = None, pytest.fail.Exception
    if wants_frames(item):
        trace, note = choose_frame(verdict.traces, failed, options.on)
        verdict.notes.append(note)
        failure = NoPrompt if trace is None else failure
    text = _text(verdict, failed, stopped, options, from_here(item), every=whole(item))
    if trace is not None:
        raise failure(text, pytrace=False).with_traceback(trace)
    ended = failed or stopped
    frames = ended[min(ended)].frames if ended else ()
    frames = tuple(frame for frame in frames if not in_library(frame[0])) or frames
    fail_at(verdict.site if verdict.lead or not frames else frames[-1], failure(text, pytrace=False))


def _expected(raises: object, failed: Mapping[int, RankReport]) -> bool:
    """Return whether every failed rank raised what `xfail(raises=...)` names."""
    kinds = raises if isinstance(raises, tuple) else (raises,)
    names = {full_names(kind)[0] for kind in kinds if isinstance(kind, type)}
    return all(names & set(report.bases) for report in failed.values())


def fail_at(site: tuple[str, int] | None, error: BaseException) -> None:
    """Raise *error* as if at *site*, which `--tb=line`, editors and annotations then show."""
    __tracebackhide__ = True
    if site is None:
        raise error
    file, line = site
    exec(compile("\n" * (line - 1) + "raise error", file, "exec"), {"error": error})


def _text(
    verdict: Verdict,
    failed: Mapping[int, RankReport],
    stopped: Mapping[int, RankReport],
    options: PluginOptions,
    test: str,
    *,
    every: bool,
) -> str:
    parts: list[str] = []
    alike = _alike(failed)
    if alike:
        first = alike[0][0]
        others = len(failed) - len(first)
        more = f" ({others} more rank{'s' if others > 1 else ''} failed, too)" if others else ""
        lead = f"{verdict.lead}; " if verdict.lead else ""
        parts.append(f"{lead}{of_ranks(first)}: {failed[first[0]].headline}{more}")
    for same_place in alike:
        full = len(same_place) if every or len(same_place) <= SHOWN_IN_FULL else SHOWN_IN_FULL
        for ranks in same_place[:full]:
            title = f"_____ {of_ranks(ranks)} of {options.n} on {options.on} _____"
            parts += ["", title, failed[ranks[0]].text.rstrip()]
        if same_place[full:]:
            parts += ["", *_folded(same_place[full:], failed)]
    for who, how in _stopped(stopped):
        parts += [*([""] if parts else []), f"{who} {how}"]
    if verdict.report:
        parts += [*([""] if parts else []), verdict.report.rstrip()]
    for note in verdict.notes:
        parts += textwrap.wrap(f"note: {note}", columns(), subsequent_indent="  ", break_long_words=False)
    if verdict.orders:
        parts += ["", *verdict.orders]
    replay = verdict.replay or f"pytest '{test}'  (seed {options.seed})"
    return "\n".join([*parts, "", f"replay: {replay}"])


def _alike(failed: Mapping[int, RankReport]) -> list[list[list[int]]]:
    """Return the failed ranks: those with the same text together, and these by exception and lines."""
    places: dict[object, dict[str, list[int]]] = {}
    for rank in sorted(failed):
        report = failed[rank]
        key = (report.error, report.frames) if report.frames else _essence(report.text)
        places.setdefault(key, {}).setdefault(_essence(report.text), []).append(rank)
    return [list(texts.values()) for texts in places.values()]


def _folded(rest: Sequence[list[int]], failed: Mapping[int, RankReport]) -> list[str]:
    """Return one line for each failure that differs from the ones above only in its values, up to a maximum number
    of lines.
    """
    ranks_of: dict[str, list[int]] = {}
    for ranks in rest:
        ranks_of.setdefault(_ADDRESS.sub("0x", failed[ranks[0]].headline), []).extend(ranks)
    everyone = sorted(rank for ranks in rest for rank in ranks)
    file, line = failed[everyone[0]].frames[-1]
    alike = "rank fails" if len(everyone) == 1 else "ranks fail"
    lines = [f"_____ {len(everyone)} more {alike} at {os.path.basename(file)}:{line}, with other values _____"]
    listed = sorted((sorted(ranks), text) for text, ranks in ranks_of.items())
    shown = listed if len(listed) == SHOWN_IN_A_LINE + 1 else listed[:SHOWN_IN_A_LINE]
    width = columns()
    for ranks, text in shown:
        line_of = f"{of_ranks(ranks)}: {text}"
        lines.append(line_of if len(line_of) <= width else line_of[: width - 3] + "...")
    left = sorted(rank for ranks, _ in listed[len(shown) :] for rank in ranks)
    if left:
        lines.append(f"and {of_ranks(left)}")
    return [*lines, "-vv shows each of them whole"]


def _stopped(stopped: Mapping[int, RankReport]) -> list[tuple[str, str]]:
    """Return the ranks that were skipped, or expected to fail, while others were not."""
    ranks_of: dict[tuple[str, str], list[int]] = {}
    for rank in sorted(stopped):
        ranks_of.setdefault((stopped[rank].kind, stopped[rank].text), []).append(rank)
    return [
        (of_ranks(ranks), f"{'was' if len(ranks) == 1 else 'were'} {kind}, others were not: {reason}")
        for (kind, reason), ranks in ranks_of.items()
    ]


def _essence(text: str) -> str:
    """Return the part of a failure that must be equal for two ranks to be shown once: all but addresses and the
    rank."""
    text = _ADDRESS.sub("0x", text)
    return _OWN_ARGUMENTS.sub("", text)


def report_silent(name: str, verdict: Verdict, findings: Sequence[SilentFinding], *, strict: bool) -> None:
    """Fail the test *name* over silent findings of which one is an error if *strict*, else make them a warning."""
    from distsim.debug.report.silent import SilentReport

    report = SilentReport(findings).plain(columns())
    if not strict:
        warnings.warn(f"{name}: {report}", stacklevel=1)
    elif any(one.level.value == "error" for one in findings):
        verdict.report = report


class NoPrompt(Failed, bdb.BdbQuit):
    """A failure at which `--pdb` opens no prompt, because its frame contains nothing of interest."""

    __module__ = Failed.__module__


NoPrompt.__qualname__ = Failed.__qualname__  # in pytest's summary it is a failure like any other


def wants_frames(item: pytest.Item) -> bool:
    """Return whether a debugger is to show the failure."""
    return bool(item.config.getoption("usepdb", False))


def traces_of(ended: Mapping[int, BaseException]) -> dict[int, TracebackType]:
    """Return the user's frames of each rank that did not finish."""
    traces = {rank: pruned(error.__traceback__) for rank, error in ended.items()}
    return {rank: trace for rank, trace in traces.items() if trace is not None}


def choose_frame(
    traces: Mapping[int, TracebackType], failed: Collection[int], on: str
) -> tuple[TracebackType | None, str]:
    """Choose the frame of the debugger's prompt, in the first rank that failed or was ended, with a note about it."""
    for rank in (*sorted(failed), *sorted(traces)):
        if rank in traces:
            return traces[rank], f"--pdb: in rank {rank}'s own frame, as it was when the rank ended"
    if on == "gloo":
        return None, "--pdb: on gloo a rank is a process, and its frames are gone with it; use on='sim'"
    return None, "--pdb: no rank has a frame to debug"
