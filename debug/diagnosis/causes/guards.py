"""Calls under an `if` whose condition differs between ranks: the branch that one side took and the other did not."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from distsim.debug.diagnosis.causes.cause import Cause, Sides
from distsim.debug.diagnosis.causes.loops import by_itself
from distsim.debug.diagnosis.causes.program_text import FUNCTIONS, Decision, ProgramText, shortened, words_of
from distsim.debug.divergence.source_order import RANK
from distsim.debug.messages import place
from distsim.debug.records import Site
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.records.kinds import Kind

__all__ = ["guard_by_rank", "guard_decision", "guarded_call"]

Lines = frozenset[tuple[str, int]]
MODULE = "<module>"

DDP = re.compile(r"\bDistributedDataParallel\b|\bDDP\(")
SHARDED = re.compile(r"\bfully_shard\b|\bFullyShardedDataParallel\b|\bFSDP\(|\bdeepspeed\b")


def guard_by_rank(text: ProgramText, sides: Sides, d: Diagnosis) -> Cause | None:
    """The call of one side stands under an `if` that asks for the rank."""
    for guard in _guards(text, *_guarded(sides, d)):
        if RANK.search(guard.text) is None:
            continue
        call = _guarded(sides, d)[0][0]
        at, shown = place(call), f"`if {shortened(guard.text)}` at {place(guard.site)}"
        stands = f"{shown} returns before it" if guard.leaves else f"it stands under {shown}"
        cure = f"Make the call at {at} on every rank, or on none: {stands}."
        if not _spelled(text, call, d) and text.mentions(SHARDED):
            cure += " The forward of a sharded model gathers its parameters from all ranks: every rank must run it."
        elif not _spelled(text, call, d) and text.mentions(DDP):
            cure += " Where the model is in DDP, model.module has no collectives: validate and save with that."
        return Cause(cure, lines=(guard.site,))
    return None


def guarded_call(text: ProgramText, sides: Sides, d: Diagnosis) -> Cause | None:
    """The call of one side stands under an `if` that each rank may decide for itself."""
    decision = guard_decision(text, *_guarded(sides, d))
    if decision is None:
        return None
    call = _guarded(sides, d)[0][0]
    if (cause := by_itself(decision)) is not None:
        return cause
    shown = f"`{shortened(decision.text)}` at {place(decision.site)}"
    if decision.words >= {"grad"} and "None" in decision.text:
        return Cause(
            f"Reduce every parameter's gradient on every rank (zeros where it is None): {shown} may leave out the "
            f"call at {place(call)} on some ranks.",
            lines=(decision.site,),
        )
    before = ", where some ranks return before it" if decision.leaves else ""
    return Cause(
        f"Agree on {shown} first (all_reduce it, or let rank 0 decide and broadcast), or make the call at "
        f"{place(call)} whatever it says: each rank may decide it for itself{before}.",
        lines=(decision.site,),
    )


def guard_decision(
    text: ProgramText, frames: Sequence[Site], outside: Sequence[Site], lines: Lines = frozenset()
) -> Decision | None:
    """The innermost condition around *frames*, and not around *outside*, that the ranks have not agreed on; *lines*:
    those that the other side has called."""
    for guard in _guards(text, frames, outside, lines):
        test = ast.parse(guard.text, mode="eval").body
        ast.copy_location(test, ast.Constant(0, lineno=guard.site.line, col_offset=0))
        if not words_of(test) or _counts_rounds(text, guard, test) or text.agreed_above(guard.site, test):
            continue
        return guard
    return None


def _guarded(sides: Sides, d: Diagnosis) -> tuple[Sequence[Site], Sequence[Site], Lines]:
    """The frames of the call that not all make, those of the other side, and the lines that this one has called."""
    if d.kind in (Kind.MISSING_RANK, Kind.UNEVEN_ITERATIONS):
        return sides.others, sides.culprits, sides.culprit_lines
    return sides.culprits, sides.others, sides.other_lines


def _spelled(text: ProgramText, site: Site, d: Diagnosis) -> bool:
    """The line names the collective itself: no model makes it there."""
    return d.call is not None and re.search(rf"\b{re.escape(d.call.op)}", text.line(site)) is not None


def _guards(text: ProgramText, frames: Sequence[Site], outside: Sequence[Site], lines: Lines) -> Iterator[Decision]:
    """Conditions around *frames* whose branch no line of *outside* is in, innermost first. Where both are at one line,
    in other rounds, those within its innermost loop. A rank that has been in the branch (*lines*) is not kept out of it
    by a condition that stays what it is. Whoever started the program let all ranks through."""
    for i, frame in enumerate(frames):
        alike = any((o.file, o.line) == (frame.file, frame.line) for o in outside)
        if alike and not text.loops(_of_program(frames[i:])):
            return  # there are no rounds: all have passed what is around this line
        for node in text.around(frame):
            if isinstance(node, ast.For | ast.AsyncFor | ast.While) and alike:
                break
            if not isinstance(node, ast.If):
                continue
            block = next((b for b in (node.body, node.orelse) if _holds(b, frame.line)), None)
            if block is None:
                continue
            if not alike and any(o.file == frame.file and _holds(block, o.line) for o in outside):
                continue
            if (frame.file, frame.line) in lines and not _changes(text, frame, node.test):
                continue
            yield _decision(text, frame, node)
        if not alike and not any(o.file == frame.file and _holds(text.around(frame)[-1:], o.line) for o in outside):
            yield from _early_returns(text, frame, lines)
        if alike or frame.function == MODULE:
            return


def _early_returns(text: ProgramText, frame: Site, lines: Lines) -> Iterator[Decision]:
    """Conditions above the line of *frame* by which its function returns before it, the nearest first."""
    blocks = text.around(frame)
    if not blocks or not isinstance(blocks[-1], FUNCTIONS):
        return
    above = (node for block in blocks for node in _above(block, frame.line))
    for node in sorted(above, key=lambda node: node.lineno, reverse=True):
        returns = any(block and isinstance(block[-1], ast.Return) for block in (node.body, node.orelse))
        if returns and ((frame.file, frame.line) not in lines or _changes(text, frame, node.test)):
            yield replace(_decision(text, frame, node), leaves=True)


def _above(statement: ast.stmt, line: int) -> list[ast.If]:
    """The `if` statements above *line* in the block of *statement* that holds it."""
    blocks = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
    block = next((block for block in blocks if _holds(block, line)), [])
    return [node for node in block if isinstance(node, ast.If) and (node.end_lineno or node.lineno) < line]


def _of_program(frames: Sequence[Site]) -> Sequence[Site]:
    """Without the frames that started the program."""
    end = next((i for i, frame in enumerate(frames) if frame.function == MODULE), len(frames))
    return frames[: end + 1]


def _changes(text: ProgramText, frame: Site, test: ast.expr) -> bool:
    """The condition calls something, or reads a parameter, or what a loop around *frame* counts or assigns."""
    words = words_of(test)
    parameters = {
        a.arg
        for f in text.around(frame)
        if isinstance(f, FUNCTIONS)
        for a in ast.walk(f.args)
        if isinstance(a, ast.arg)
    }
    calls = any(isinstance(part, ast.Call | ast.Attribute | ast.Subscript) for part in ast.walk(test))
    if (calls or words & parameters) and RANK.search(ast.unparse(test)) is None:
        return True
    loops = [loop for _, loop in text.loops((frame,))]
    return any(words & text.changed_by(loop) for loop in loops)


def _holds(block: Sequence[ast.stmt], line: int) -> bool:
    return bool(block) and block[0].lineno <= line <= (block[-1].end_lineno or 0)


def _decision(text: ProgramText, frame: Site, node: ast.If) -> Decision:
    words = text.words_through(frame, node.test)
    return Decision(Site(frame.file, node.lineno, frame.function), ast.unparse(node.test), words, leaves=False)


def _counts_rounds(text: ProgramText, guard: Decision, test: ast.expr) -> bool:
    """The condition reads only counters of the loops around it, and constants of the module."""
    counters: frozenset[str] = frozenset()
    for node in text.around(guard.site):
        if isinstance(node, ast.For | ast.AsyncFor):
            counters |= words_of(node.target)
        if isinstance(node, FUNCTIONS):
            break
    words = {w for w in words_of(test) if not w.isupper()}
    return bool(words & counters) and words <= counters
