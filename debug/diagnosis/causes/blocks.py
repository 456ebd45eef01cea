"""Causes in blocks around a call: branches, and `with` blocks that change what ranks do.

The condition of an `if` differs between ranks, so one side took a branch and the other did not. A `with` block is
`no_sync()`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from distsim.debug.diagnosis.causes.loops import by_itself
from distsim.debug.diagnosis.causes.program_text import FUNCTIONS, Decision, ProgramText, shortened, words_of
from distsim.debug.diagnosis.context import Cause, Sides
from distsim.debug.divergence.source_order import RANK, block_at, last_word
from distsim.debug.messages import site_text
from distsim.debug.records import Site
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.records.kinds import Kind

Lines = frozenset[tuple[str, int]]
MODULE = "<module>"

NO_SYNC = re.compile(r"no_sync|accumulate\(|set_requires_gradient_sync|require_backward_grad_sync")


def guard_by_rank(text: ProgramText, sides: Sides, d: Diagnosis) -> Cause | None:
    """Return the cause if one side's call is inside an `if` on the rank."""
    for guard in _guards(text, *_guarded(sides, d)):
        if RANK.search(guard.text) is None:
            continue
        call = _guarded(sides, d)[0][0]
        at, shown = site_text(call), f"`if {shortened(guard.text)}` at {site_text(guard.site)}"
        stands = f"{shown} returns before it" if guard.leaves else f"it stands under {shown}"
        return Cause(f"Make the call at {at} on every rank, or on none: {stands}.", lines=(guard.site,))
    return None


def guarded_call(text: ProgramText, sides: Sides, d: Diagnosis) -> Cause | None:
    """Return the cause if one side's call is inside an `if` whose condition may differ between ranks."""
    decision = guard_decision(text, *_guarded(sides, d))
    if decision is None:
        return None
    call = _guarded(sides, d)[0][0]
    if (cause := by_itself(text, decision)) is not None:
        return cause
    shown = f"`{shortened(decision.text)}` at {site_text(decision.site)}"
    if decision.words >= {"grad"} and "None" in decision.text:
        return Cause(
            f"Reduce every parameter's gradient on every rank (zeros where it is None): {shown} may leave out the "
            f"call at {site_text(call)} on some ranks.",
            lines=(decision.site,),
        )
    before = ", where some ranks return before it" if decision.leaves else ""
    return Cause(
        f"Agree on {shown} first (all_reduce it, or let rank 0 decide and broadcast), or make the call at "
        f"{site_text(call)} unconditionally: each rank may decide it for itself{before}.",
        lines=(decision.site,),
    )


def guard_decision(
    text: ProgramText, frames: Sequence[Site], outside: Sequence[Site], lines: Lines = frozenset()
) -> Decision | None:
    """Return the innermost condition around *frames*, and not around *outside*, that the ranks have not agreed on;
    *lines*: those that the other side has called.
    """
    for guard in _guards(text, frames, outside, lines):
        test = ast.parse(guard.text, mode="eval").body
        test.lineno = guard.site.line
        if not words_of(test) or _counts_rounds(text, guard, test) or text.agreed_above(guard.site, test):
            continue
        return guard
    return None


def _guarded(sides: Sides, d: Diagnosis) -> tuple[Sequence[Site], Sequence[Site], Lines]:
    """Return the frames of the call that not all make, those of the other side, and the lines that this one has
    called.
    """
    if d.kind in (Kind.MISSING_RANK, Kind.UNEVEN_ITERATIONS):
        return sides.others, sides.culprits, sides.culprit_lines
    return sides.culprits, sides.others, sides.other_lines


def _guards(text: ProgramText, frames: Sequence[Site], outside: Sequence[Site], lines: Lines) -> Iterator[Decision]:
    """Yield conditions around *frames* whose branch contains no line of *outside*, innermost first.

    If both are at one line in different iterations, only conditions within its innermost loop count. A rank that has
    been in the branch (*lines*) is not excluded by a condition that never changes. The condition of the main script
    applies to all ranks and is left out.
    """
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
    """Yield conditions above the line of *frame* at which its function returns early, the nearest first."""
    blocks = text.around(frame)
    if not blocks or not isinstance(blocks[-1], FUNCTIONS):
        return
    above = (node for block in blocks for node in _above(block, frame.line))
    for node in sorted(above, key=lambda node: node.lineno, reverse=True):
        returns = any(block and isinstance(block[-1], ast.Return) for block in (node.body, node.orelse))
        if returns and ((frame.file, frame.line) not in lines or _changes(text, frame, node.test)):
            yield replace(_decision(text, frame, node), leaves=True)


def _above(statement: ast.stmt, line: int) -> list[ast.If]:
    """Return the `if` statements above *line* in the block of *statement* that holds it."""
    _, block = block_at(statement, line) or ("", [])
    return [node for node in block if isinstance(node, ast.If) and (node.end_lineno or node.lineno) < line]


def _of_program(frames: Sequence[Site]) -> Sequence[Site]:
    """Return the frames without those that started the program."""
    end = next((i for i, frame in enumerate(frames) if frame.function == MODULE), len(frames))
    return frames[: end + 1]


def _changes(text: ProgramText, frame: Site, test: ast.expr) -> bool:
    """Return whether the condition may change: it calls a function, reads a parameter, or reads a loop's variable."""
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
    """Return whether the condition reads only counters of the loops around it, and constants of the module."""
    counters: frozenset[str] = frozenset()
    for node in text.around(guard.site):
        if isinstance(node, ast.For | ast.AsyncFor):
            counters |= words_of(node.target)
        if isinstance(node, FUNCTIONS):
            break
    words = {w for w in words_of(test) if not w.isupper()}
    return bool(words & counters) and words <= counters


def no_sync_block(text: ProgramText, sides: Sides) -> Cause | None:
    """Return the cause if a counter local to each rank decides whether `backward()` reduces gradients."""
    frames = (*sides.culprits, *sides.others)
    block = _block(text, frames, NO_SYNC)
    if block is not None:
        site, node = block
        conditions = [p.test for item in node.items for p in ast.walk(item.context_expr) if isinstance(p, ast.IfExp)]
        guards = [n for n in text.around(site) if isinstance(n, ast.If)]
        conditions += [guard.test for guard in guards]
        lines = [Site(site.file, node.lineno, "")]
    else:
        switch = next(_switches(text, frames), None)
        if switch is None:
            return None
        site, conditions, lines = switch
    for condition in conditions:
        for name in sorted(words_of(condition)):
            values = text.assignments(site, name)
            counted = (line for line, value in values for one in words_of(value) if _kept_by_rank(text, site, one))
            own = next(counted, None)
            if own is None and not _kept_by_rank(text, site, name):
                continue
            lines += [Site(site.file, own, "")] if own is not None else []
            return Cause(
                "Leave no_sync() in the same micro-batch on every rank: count micro-batches, or all_reduce the count "
                f"first. `{name}` at {site_text(lines[-1])} depends on what this rank alone has seen.",
                lines=tuple(lines),
            )
    return None


def _switches(text: ProgramText, frames: Iterable[Site]) -> Iterator[tuple[Site, list[ast.expr], list[Site]]]:
    """Yield calls such as `model.set_requires_gradient_sync(is_last)` in a loop around one of *frames*."""
    for site, loop in text.loops(tuple(frames)):
        for call in ast.walk(loop):
            if isinstance(call, ast.Call) and NO_SYNC.search(ast.unparse(call.func)) and call.args:
                yield site, list(call.args), [Site(site.file, call.lineno, "")]


def _kept_by_rank(text: ProgramText, site: Site, name: str) -> bool:
    """Return whether *name* is a number that grows by something other than a constant."""
    tree = text.tree(site.file)
    return tree is not None and any(
        isinstance(node, ast.AugAssign) and last_word(node.target) == name and not isinstance(node.value, ast.Constant)
        for node in ast.walk(tree)
    )


def _block(text: ProgramText, frames: Iterable[Site], pattern: re.Pattern[str]) -> tuple[Site, ast.With] | None:
    """Return the innermost `with` around one of *frames* whose expression fits *pattern*."""
    for site in frames:
        for node in text.around(site):
            if isinstance(node, ast.With) and any(pattern.search(ast.unparse(i.context_expr)) for i in node.items):
                return site, node
    return None
