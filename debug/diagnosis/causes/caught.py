"""Causes in exceptions that a rank handled, or that ended one of its threads.

An exception leaves out the rest of each function that it crossed, and of the `try` that handled it. Calls on record
behind these lines are those that it left out.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable
from functools import cached_property

from distsim.debug.diagnosis.causes.program_text import FUNCTIONS, Loop, ProgramText
from distsim.debug.diagnosis.context import Case, Cause
from distsim.debug.messages import are, call_text, capital, one_line, ranks_text, site_text, thread_text
from distsim.debug.records import P2P, CallRecord, Caught, Site
from distsim.debug.records.diagnosis import Diagnosis

OUT_OF_MEMORY = "OutOfMemoryError"
ANSWERS = frozenset(
    {"StopIteration", "StopAsyncIteration", "Empty", "Full", "KeyError", "TimeoutError", "ImportError"}
    | {"ModuleNotFoundError", "AttributeError", "FileNotFoundError", "QueueEmptyError", "DistStoreError"}
)
"""Exceptions by which programs ask, and which therefore explain nothing unless calls are missing."""
Place = tuple[str, int]
Region = Callable[[Site], bool]
Way = tuple[Site, ...]


class Passages:
    """The calls of one diagnosis by the stacks that made them: few are distinct, however many calls and ranks."""

    def __init__(self, case: Case, d: Diagnosis) -> None:
        """Args:
        case: The evidence.
        d: The diagnosis; calls behind its own are not counted.
        """
        self._case = case
        self._d = d
        self._diagnosed = None if d.call is None else (d.call.op, d.group)

    @cached_property
    def _latest(self) -> dict[tuple[Way, bool], CallRecord]:
        latest: dict[tuple[Way, bool], CallRecord] = {}
        for rank in self._case.index.states:
            for record in self._case.index.records(rank):
                key = record.way, self.is_like(record)
                latest.pop(key, None)
                latest[key] = record
        return latest

    @cached_property
    def _logs(self) -> list[dict[int, Counter[Way]]]:
        logs, d = [], self._d
        for log in self._case.index.group_logs:
            until = d.call.seq if d.call is not None and d.group == log.group else 1 << 62
            since = max((calls[0].seq for calls in log.calls.values() if calls), default=0)
            counted = {
                rank: Counter(call.way for call in calls if since <= call.seq <= until)
                for rank, calls in log.calls.items()
            }
            logs.append(counted)
        return logs

    def is_like(self, record: CallRecord) -> bool:
        """Return whether *record* is of the operation and group of the diagnosed call."""
        return (record.op, record.group) == self._diagnosed

    def latest(self, region: Region) -> list[tuple[CallRecord, Site]]:
        """Return the latest call of each stack and kind through lines of *region*, with these lines."""
        return [(record, site) for record in self._latest.values() for site in record.way if region(site)]

    def counts(self, region: Region, rank: int) -> tuple[Counter[Place], Counter[Place]]:
        """Return calls through the lines of *region* up to the diagnosed one: those of *rank*, and the most of another
        rank. Only calls that the records of both still hold are counted.
        """
        ways = {way for log in self._logs for counted in log.values() for way in counted}
        places = {way: {(site.file, site.line) for site in way if region(site)} for way in ways}
        own: Counter[Place] = Counter()
        most: Counter[Place] = Counter()
        for log in self._logs:
            for other, counted in log.items():
                lines: Counter[Place] = Counter()
                for way, times in counted.items():
                    for line in places[way]:
                        lines[line] += times
                if other == rank:
                    own += lines
                else:
                    most |= lines
        return own, most


def swallowed(case: Case, d: Diagnosis, text: ProgramText) -> Cause | None:
    """Return the cause if only culprits handled an exception by which they left out calls that others make."""
    states = case.index.states
    passages = Passages(case, d)
    split = len(d.culprits) * 2 >= len(states) and not _of_messages(d)
    candidates = [
        (rank, caught, call)
        for rank in (*d.culprits, *(d.victims if split else ()))
        for caught in states[rank].caught
        if not caught.thread and not _usual(case, rank, caught)
        if (call := _left_out(case, d, rank, caught, passages, text)) is not None
    ]
    if not candidates:
        return None
    rank, caught, call = max(candidates, key=lambda one: one[1].calls)
    alike = [r for r, other, _ in candidates if (other.site, other.kind) == (caught.site, caught.kind)]
    who, at, name = ranks_text(alike), site_text(caught.site), caught.kind.rpartition(".")[2]
    last = next((c for c in reversed(case.index.records(rank)) if c.index < caught.calls), None)
    raised = caught.crossed[0] if caught.crossed else None
    says = f"{capital(who)} caught {one_line(caught.error)}"
    if raised is not None and raised != caught.site:
        says += f" (raised at {site_text(raised, function=True)})"
    says += f"{f' {caught.times} times, last' if caught.times > 1 else ''} at {at}"
    says += "" if last is None else f", after {call_text(last)}"
    is_over = case.is_over(rank)
    if is_over:
        says += ", and ended."
    elif _no_call_since(case, rank, caught):
        says += f", and {are(alike, 'has', 'have')} made no call since."
    else:
        says += ", and went on."
    return Cause(
        _cure(caught, who, at, name, call, raised, is_over),
        says,
        tuple(dict.fromkeys(site for site in (caught.site, raised) if site is not None)),
        leads=True,
        culprits=() if set(alike) & set(d.culprits) else tuple(alike),
    )


def _cure(caught: Caught, who: str, at: str, name: str, call: CallRecord, raised: Site | None, is_over: bool) -> str:
    from_where = f" (raised at {site_text(raised)})" if raised is not None else ""
    left_out = f"{who} caught it at {at}{from_where}"
    if is_over:
        return (
            f"Make the last call (a stop command, say) in a finally block, or raise the {name} again: {left_out} and "
            "ended, and the others wait."
        )
    left_out += f" and thereby left out {call.op}{f' at {site_text(call.site)}' if call.site is not None else ''}"
    if name == OUT_OF_MEMORY:
        return (
            f"Skip the step on all ranks or on none (after the try, all_reduce (MAX) whether a rank failed), or let "
            f"{who} need less memory (a smaller micro-batch, activation checkpointing): {left_out}."
        )
    return (
        f"Do not let the {name} pass: {left_out}. Skip the step on all ranks or on none (after the try, all_reduce "
        "(MAX) whether a rank failed), raise it again there, or send the failure as an answer that the others look at."
    )


def _left_out(
    case: Case, d: Diagnosis, rank: int, caught: Caught, passages: Passages, text: ProgramText
) -> CallRecord | None:
    """Return a call that the exception may have made *rank* skip: one that it has made less often than another rank,
    or any where it has made no call since. A rank's messages have no number that another rank has too, so that of them
    no count shows which are missing.
    """
    region = _behind(caught, text)
    passing = passages.latest(region)
    if not passing:
        return None
    asks, no_call_since = caught.kind.rpartition(".")[2] in ANSWERS, _no_call_since(case, rank, caught)
    if _of_messages(d):
        waits = [call.site for call in case.index.call_waits(rank)]
        left_out = (record for record, _ in reversed(passing) if record.site not in waits)
        return next(left_out, None) if no_call_since and not asks else None
    if case.is_over(rank) and no_call_since:
        return passing[-1][0]
    own, others = passages.counts(region, rank)
    lacking = {line_key for line_key in others if others[line_key] > own[line_key]}
    for record, site in reversed(passing):
        if (site.file, site.line) in lacking:
            return record
    if asks or not no_call_since:
        return None
    return next((record for record, _ in reversed(passing) if passages.is_like(record)), None)


def _behind(caught: Caught, text: ProgramText) -> Region:
    """Return whether a line is behind one that the exception left: in a function that it crossed, in the loops there
    around that line, in the `try`, or in what the handler skips.
    """
    spans: list[tuple[str, str, int, int]] = []
    handler = _handler(text, caught.site)
    for site in caught.crossed:
        around = text.around(site)
        suppressed = [n for n in around if isinstance(n, ast.With) and n.lineno == caught.site.line]
        last = suppressed[0].end_lineno or 0 if suppressed else caught.site.line
        ends = (site.file, site.function) == (caught.site.file, caught.site.function) and site.line <= last
        loops = [] if ends else [n for n in around if isinstance(n, Loop)]
        first = min([site.line, *(loop.lineno for loop in loops)])
        spans.append((site.file, site.function, first, last if ends else 1 << 62))
        if ends:
            break
    if handler is not None:
        statement, clause = handler
        if not spans:
            spans.append((caught.site.file, "", statement.lineno, statement.body[-1].end_lineno or statement.lineno))
        leaves = {type(n) for part in clause.body for n in ast.walk(part)} & {ast.Continue, ast.Break, ast.Return}
        kinds = FUNCTIONS if ast.Return in leaves else (*FUNCTIONS, ast.For, ast.AsyncFor, ast.While)
        left = next((n for n in text.around(caught.site) if isinstance(n, kinds)), None)
        if leaves:
            bounds = (0, 1 << 62) if left is None else (left.lineno, left.end_lineno or 0)
            spans.append((caught.site.file, "", *bounds))

    def is_behind(site: Site) -> bool:
        return any(
            site.file == file and function in ("", site.function) and first <= site.line <= last
            for file, function, first, last in spans
        )

    return is_behind


def tried_again(case: Case, d: Diagnosis, text: ProgramText) -> Cause | None:
    """Return the cause if a culprit handled an exception and made calls of the `try` once more than the others, or
    calls in the handler.
    """
    if d.call is None or d.call.op in P2P:
        return None
    passages = Passages(case, d)
    for rank in d.culprits:
        for caught in reversed(case.index.states[rank].caught):
            handler = _handler(text, caught.site)
            if handler is None or caught.thread or _usual(case, rank, caught):
                continue
            statement, clause = handler
            name, at, error = caught.kind.rpartition(".")[2], site_text(caught.site), one_line(caught.error)
            own, others = passages.counts(_within(caught.site, clause.body), rank)
            if own and not others:
                line = Site(*min(own), "")
                return Cause(
                    "Make no collective calls in an except block, or try again on all ranks: after the try, "
                    f"all_reduce (MAX) whether a rank failed. Rank {rank} caught {name} at {at} and has made calls at "
                    f"{site_text(line)} that the others do not make.",
                    f"Rank {rank} caught {error} at {at}, and made calls in the except block.",
                    (caught.site, line),
                    leads=True,
                )
            ends = {type(n) for part in clause.body for n in ast.walk(part)} & {ast.Break, ast.Return, ast.Raise}
            if ends and type(clause.body[-1]) not in ends and _left_when_done(statement):
                ends = set()  # it gives up under a condition alone
            if ends or not any(isinstance(n, ast.For | ast.While) for n in text.around(caught.site)):
                continue
            own, others = passages.counts(_within(caught.site, statement.body), rank)
            if any(own[line] > others[line] > 0 for line in own) and all(others[n] <= own[n] for n in others):
                return Cause(
                    "Keep collectives out of the block that is tried again, or try again on all ranks: after the try, "
                    f"all_reduce (MAX) whether a rank failed. Rank {rank} caught {name} at {at} and has made the calls "
                    "of that try more often than the others.",
                    f"Rank {rank} caught {error} at {at}, and went through the try again.",
                    (caught.site,),
                    leads=True,
                )
    return None


def _left_when_done(statement: ast.Try | ast.TryStar) -> bool:
    """Return whether the block of a `try` leaves the loop or function around it, so that the loop is one of retries."""
    inner = (node for part in statement.body for node in ast.walk(part))
    return any(isinstance(node, ast.Break | ast.Return) for node in inner)


def ended_thread(case: Case, d: Diagnosis, text: ProgramText) -> Cause | None:
    """Return the cause if an exception has ended a thread of the culprits, and of no other rank."""
    states = case.index.states
    others = states.keys() - {*d.culprits}
    usual = {(c.site, c.kind) for rank in others for c in states[rank].caught}
    ended = [
        (rank, c)
        for rank in d.culprits
        for c in states[rank].caught
        if c.thread and (c.site, c.kind) not in usual
        if all(other.thread or other.error != c.error for other in states[rank].caught)  # else the program heard of it
    ]
    if not ended:
        return None
    last = ended[-1][1]
    ranks = [rank for rank, c in ended if (c.site, c.kind) == (last.site, last.kind)]
    at, error = site_text(last.site, function=True), one_line(last.error)
    return Cause(
        f"Fix the {last.kind.rpartition('.')[2]} at {site_text(last.site)} first: {ranks_text(ranks)} may wait for "
        f"what {are(ranks, 'its', 'their')} {thread_text(last.thread)} would have brought. Let a thread hand its "
        "exception on (into the queue, or end the process).",
        f"An exception has ended {thread_text(last.thread)} of {ranks_text(ranks)}: {error} at {at}.",
        (last.site,),
        leads=True,
    )


def _of_messages(d: Diagnosis) -> bool:
    return d.call is None or d.call.op in P2P


def _no_call_since(case: Case, rank: int, caught: Caught) -> bool:
    return all(call.index < caught.calls for call in reversed(case.index.records(rank)))


def _usual(case: Case, rank: int, caught: Caught) -> bool:
    """Return whether a rank that is not at fault has caught a similar exception at that line, equally often."""
    others = [s for r, s in case.index.states.items() if r != rank]
    like = [c for s in others for c in s.caught if (c.site, c.kind) == (caught.site, caught.kind)]
    return sum(c.times >= caught.times for c in like) * 2 >= max(1, len(others))


def _within(site: Site, body: list[ast.stmt]) -> Region:
    first, last = body[0].lineno, body[-1].end_lineno or body[-1].lineno
    return lambda one: one.file == site.file and first <= one.line <= last


def _handler(text: ProgramText, site: Site) -> tuple[ast.Try | ast.TryStar, ast.ExceptHandler] | None:
    tree = text.tree(site.file)
    if tree is None:
        return None
    tries = (node for node in ast.walk(tree) if isinstance(node, ast.Try | ast.TryStar))
    return next(((node, clause) for node in tries for clause in node.handlers if clause.lineno == site.line), None)
