"""Threads of a rank as edges: which one holds the lock that another waits for.

A simulated lock knows who holds it. Of a real one the program's text tells: a thread stands at `with X` or
`X.acquire()`, and another thread of its rank is in a call within a `with X`, or behind such an acquire of X. An acquire
with arguments may give up by itself, or may not have got the lock; and two calls or elements of a list that read alike
may be different locks.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from distsim.debug.diagnosis.causes.program_text import ProgramText
from distsim.debug.matching.index import EvidenceIndex
from distsim.debug.records import CallRecord, RankThread, Site

_TAKES = re.compile(r"^(?:async )?with (?P<block>[^:]+?)(?: as \w+)?:|(?P<call>[\w.\[\]()'\"]+)\.acquire\(\)")
_OF_A_LOCK = frozenset({"__enter__", "__aenter__", "acquire"})
"""Methods of a lock of the program's own class: who calls them waits for the lock."""


@dataclass(frozen=True, slots=True)
class HeldLock:
    """A lock of one rank that one of its threads holds in a call while another waits for it."""

    name: str
    waiter: RankThread
    site: Site
    """Where the waiter stands."""
    holder: str
    call: CallRecord


def held_locks(index: EvidenceIndex, rank: int, text: ProgramText) -> Iterator[HeldLock]:
    """Yield the locks of *rank* that a thread holds in a call in which it waits; none if not all threads are known."""
    if index.states[rank].threads_cut:
        return
    calls = {call.thread: call for call in index.call_waits(rank)}
    for thread in index.states[rank].threads:
        if thread.name in calls or not thread.stack:
            continue
        site = next((s for s in thread.stack if s.function.rpartition(".")[2] not in _OF_A_LOCK), thread.stack[0])
        name = _taken(text.line(site))
        for holder, call in calls.items():
            if thread.held_by == holder or (name and not thread.held_by and _holds(text, call, site.file, name)):
                yield HeldLock(name or "a lock", thread, site, holder, call)


def waits_for_lock(index: EvidenceIndex, rank: int, text: ProgramText) -> bool:
    """Return whether all threads of *rank* are in calls, or wait for locks that are held in these."""
    held = {lock.waiter.name for lock in held_locks(index, rank, text)}
    calls = {call.thread for call in index.call_waits(rank)}
    return bool(held) and all(thread.name in held | calls for thread in index.states[rank].threads if thread.stack)


def _taken(line: str) -> str:
    """Return the lock that a line takes, as the program names it; empty if it takes none."""
    match = _TAKES.search(line.strip())
    name = "" if match is None else (match["block"] or match["call"] or "").strip()
    return name if _is_one_lock(name) else ""


def _is_one_lock(name: str) -> bool:
    """Return whether *name* is the same lock wherever it stands in a file: a variable, an attribute or a fixed element,
    but no call.
    """
    try:
        parts = list(ast.walk(ast.parse(name, mode="eval").body))
    except (SyntaxError, ValueError):
        return False
    fixed = all(isinstance(part.slice, ast.Constant) for part in parts if isinstance(part, ast.Subscript))
    return fixed and not any(isinstance(part, ast.Call) for part in parts)


def _holds(text: ProgramText, call: CallRecord, file: str, name: str) -> bool:
    """Return whether *call* is made within a `with` on the lock *name* of *file*, or behind an acquire of it."""
    for frame in call.way:
        if frame.file != file:
            continue
        around = text.around(frame)
        items = [item for node in around if isinstance(node, ast.With | ast.AsyncWith) for item in node.items]
        if any(ast.unparse(item.context_expr) == name for item in items):
            return True
        first = around[-1].lineno if around else 1
        above = [text.line(Site(frame.file, n, "")) for n in range(first, frame.line)]
        steps = [
            f"{name}.acquire()" in line for line in above if f"{name}.acquire(" in line or f"{name}.release(" in line
        ]
        if steps and steps[-1]:
            return True
    return False
