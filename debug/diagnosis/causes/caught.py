"""Exceptions that one rank caught, and after which it went on without calls that the others make."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from distsim.debug.diagnosis.causes.cause import Cause
from distsim.debug.diagnosis.causes.program_text import FUNCTIONS, ProgramText
from distsim.debug.diagnosis.context import Case
from distsim.debug.records import Caught, Phase, Site
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.words.phrases import are, call_text, capital, one_line, place, ranks_text

__all__ = ["caught_exception"]

OUT_OF_MEMORY = "OutOfMemoryError"


def caught_exception(case: Case, d: Diagnosis, text: ProgramText) -> Cause | None:
    """The last exception that only culprits caught, around calls or where it makes them leave some out."""
    states = case.index.states
    candidates = [
        (rank, caught)
        for rank in (*d.culprits, *(d.victims if len(d.culprits) * 2 >= len(states) else ()))
        for caught in states[rank].caught
        if not _usual(case, rank, caught) and _leaves_out_calls(case, rank, caught, text)
    ]
    if not candidates:
        return None
    rank, caught = max(candidates, key=lambda c: c[1].calls)
    alike = [r for r, other in candidates if (other.site, other.kind) == (caught.site, caught.kind)]
    who, at, error = ranks_text(alike), place(caught.site), one_line(caught.error)
    have = are(alike, "has", "have")
    last = next((c for c in reversed(case.index.records(rank)) if c.index < caught.calls), None)
    after = "" if last is None else f", after {call_text(last)}"
    often = f" {caught.times} times, last" if caught.times > 1 else ""
    state = states[rank]
    over = state.phase is Phase.FINISHED or state.over or state.leaving
    then = "ended" if over else "went on"
    says = f"{capital(who)} caught {error}{often} at {at}{after}, and {then}."
    return Cause(_cure(caught, f"{who} {have}", at, over), says, (caught.site,))


def _cure(caught: Caught, who_has: str, at: str, over: bool) -> str:
    name = caught.kind.rpartition(".")[2]
    if over:
        return (
            f"Make the last call (a stop command, say) in a finally block, or raise the {name} again: {who_has} "
            f"caught it at {at} and ended, and the others wait."
        )
    cure = (
        f"Skip the step on all ranks or on none: after the try, all_reduce (MAX) whether a rank failed. "
        f"{capital(who_has)} caught {name} at {at} and left out calls. "
    )
    if name == OUT_OF_MEMORY:
        return cure + "Or let it need less memory: a smaller micro-batch, activation checkpointing."
    return cure + "Or raise it again there."


def _usual(case: Case, rank: int, caught: Caught) -> bool:
    """Another rank that is not at fault with it has caught the like at that line, as often."""
    others = [s for r, s in case.index.states.items() if r != rank]
    like = [c for s in others for c in s.caught if (c.site, c.kind) == (caught.site, caught.kind)]
    return sum(c.times >= caught.times for c in like) * 2 >= max(1, len(others))


def _leaves_out_calls(case: Case, rank: int, caught: Caught, text: ProgramText) -> bool:
    """Calls stand in the `try`, or behind it in the function or loop that its handler leaves or goes on in."""
    handler = _handler(text, caught.site)
    frames = [frame for record in _calls_near(case, rank) for frame in record]
    if handler is None:
        return caught.kind.endswith(OUT_OF_MEMORY)
    statement, clause = handler
    begin, end = statement.lineno, statement.body[-1].end_lineno or statement.lineno
    if any(f.file == caught.site.file and begin <= f.line <= end for f in frames):
        return True
    if not any(isinstance(n, ast.Continue | ast.Break | ast.Return) for part in clause.body for n in ast.walk(part)):
        return False
    function = next((n for n in text.around(caught.site) if isinstance(n, FUNCTIONS)), None)
    first, last = (0, 1 << 62) if function is None else (function.lineno, function.end_lineno or 0)
    return any(f.file == caught.site.file and first <= f.line <= last for f in frames)


def _calls_near(case: Case, rank: int) -> Sequence[tuple[Site, ...]]:
    """Stacks of calls of all ranks: what this one left out, another has made."""
    stacks = {record.way for r in case.index.states for record in case.index.records(r)[-256:]}
    return list(stacks)


def _handler(text: ProgramText, site: Site) -> tuple[ast.Try | ast.TryStar, ast.ExceptHandler] | None:
    tree = text.tree(site.file)
    if tree is None:
        return None
    tries = (node for node in ast.walk(tree) if isinstance(node, ast.Try | ast.TryStar))
    return next(((node, clause) for node in tries for clause in node.handlers if clause.lineno == site.line), None)
