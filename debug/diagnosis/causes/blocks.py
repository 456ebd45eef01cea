"""Causes in blocks around a call: branches, `with` blocks that change what ranks do, and `except` blocks.

The condition of an `if` differs between ranks, so one side took a branch and the other did not. A `with` block is
`join()` or `no_sync()`. A rank that caught an exception may continue without calls that the others make, or repeat
some.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from distsim.debug.diagnosis.causes.loops import by_itself
from distsim.debug.diagnosis.causes.program_text import FUNCTIONS, Decision, ProgramText, shortened, words_of
from distsim.debug.diagnosis.context import Case, Cause, Sides
from distsim.debug.divergence.source_order import RANK
from distsim.debug.messages import are, call_text, capital, one_line, ranks_text, site_text
from distsim.debug.records import P2P, Caught, Phase, Site
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.records.frames import Owner, owner
from distsim.debug.records.kinds import Kind

__all__ = [
    "caught_exception",
    "guard_by_rank",
    "guard_decision",
    "guarded_call",
    "join_block",
    "no_sync_block",
    "repeated_calls",
]

Lines = frozenset[tuple[str, int]]
MODULE = "<module>"

DDP = re.compile(r"\bDistributedDataParallel\b|\bDDP\(")
SHARDED = re.compile(r"\bfully_shard\b|\bFullyShardedDataParallel\b|\bFSDP\(|\bdeepspeed\b")
JOIN = re.compile(r"\bjoin\(|\bJoin\(")
NO_SYNC = re.compile(r"no_sync|accumulate\(|set_requires_gradient_sync|require_backward_grad_sync")
OUT_OF_MEMORY = "OutOfMemoryError"


def guard_by_rank(text: ProgramText, sides: Sides, d: Diagnosis) -> Cause | None:
    """Return the cause if one side's call is inside an `if` on the rank."""
    for guard in _guards(text, *_guarded(sides, d)):
        if RANK.search(guard.text) is None:
            continue
        call = _guarded(sides, d)[0][0]
        at, shown = site_text(call), f"`if {shortened(guard.text)}` at {site_text(guard.site)}"
        stands = f"{shown} returns before it" if guard.leaves else f"it stands under {shown}"
        cure = f"Make the call at {at} on every rank, or on none: {stands}."
        if not _spelled(text, call, d) and text.mentions(SHARDED):
            cure += " The forward of a sharded model gathers its parameters from all ranks: every rank must run it."
        elif not _spelled(text, call, d) and text.mentions(DDP):
            cure += " Where the model is in DDP, model.module has no collectives: validate and save with that."
        return Cause(cure, lines=(guard.site,))
    return None


def guarded_call(text: ProgramText, sides: Sides, d: Diagnosis) -> Cause | None:
    """Return the cause if one side's call is inside an `if` whose condition may differ between ranks."""
    decision = guard_decision(text, *_guarded(sides, d))
    if decision is None:
        return None
    call = _guarded(sides, d)[0][0]
    if (cause := by_itself(decision)) is not None:
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


def _spelled(text: ProgramText, site: Site, d: Diagnosis) -> bool:
    """Return whether the line names the collective itself: no model makes it there."""
    return d.call is not None and re.search(rf"\b{re.escape(d.call.op)}", text.line(site)) is not None


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
    blocks = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
    block = next((block for block in blocks if _holds(block, line)), [])
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


def join_block(case: Case, d: Diagnosis, text: ProgramText, sides: Sides) -> Cause | None:
    """Return a call of the program's own inside `join()`: a rank that has joined does not make it."""
    block = _block(text, (*sides.culprits, *sides.others), JOIN)
    if block is None:
        return None
    site, node = block
    own = [
        record.site
        for rank in sorted(case.index.states)
        for record in case.index.records(rank)
        if record.site is not None
        and record.site.file == site.file
        and node.body[0].lineno <= record.site.line <= (node.end_lineno or 0)
        and _calls_it(text.line(record.site), record.op)
    ]
    if not own:
        return None
    call = own[-1]
    return Cause(
        f"Move the call at {site_text(call, through=False)} out of join(): a rank that has joined makes only the "
        "model's own calls (or make it through a Joinable of yours).",
        lines=(call,),
    )


def _calls_it(line: str, op: str) -> bool:
    """Return whether the line names a collective itself, not a model or an optimizer that makes it."""
    return (
        re.search(rf"\b{re.escape(op)}|all_reduce|all_gather|broadcast|barrier|\breduce\(|gather\(", line) is not None
    )


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
            own = next((line for line, value in values if _own_count(text, site, value)), None)
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


def _own_count(text: ProgramText, site: Site, value: ast.expr) -> bool:
    """Return whether an expression reads a number that grows by something other than a constant."""
    return any(_kept_by_rank(text, site, name) for name in words_of(value))


def _kept_by_rank(text: ProgramText, site: Site, name: str) -> bool:
    tree = text.tree(site.file)
    return tree is not None and any(
        isinstance(node, ast.AugAssign)
        and getattr(node.target, "id", getattr(node.target, "attr", None)) == name
        and not isinstance(node.value, ast.Constant)
        for node in ast.walk(tree)
    )


def _block(text: ProgramText, frames: Iterable[Site], pattern: re.Pattern[str]) -> tuple[Site, ast.With] | None:
    """Return the innermost `with` around one of *frames* whose expression fits *pattern*."""
    for site in frames:
        for node in text.around(site):
            if isinstance(node, ast.With) and any(pattern.search(ast.unparse(i.context_expr)) for i in node.items):
                return site, node
    return None


def caught_exception(case: Case, d: Diagnosis, text: ProgramText) -> Cause | None:
    """Return the cause if only culprits caught an exception around calls, or one that makes them skip calls."""
    states = case.index.states
    candidates = [
        (rank, caught)
        for rank in (*d.culprits, *(d.victims if len(d.culprits) * 2 >= len(states) else ()))
        for caught in states[rank].caught
        if not _usual(case, rank, caught) and _may_leave_out_calls(case, d, rank, caught, text)
    ]
    if not candidates:
        return None
    rank, caught = max(candidates, key=lambda c: c[1].calls)
    alike = [r for r, other in candidates if (other.site, other.kind) == (caught.site, caught.kind)]
    who, at, error = ranks_text(alike), site_text(caught.site), one_line(caught.error)
    have = are(alike, "has", "have")
    last = next((c for c in reversed(case.index.records(rank)) if c.index < caught.calls), None)
    after = "" if last is None else f", after {call_text(last)}"
    often = f" {caught.times} times, last" if caught.times > 1 else ""
    state = states[rank]
    over = state.phase is Phase.FINISHED or state.over or state.leaving
    then = "ended" if over else "went on"
    says = f"{capital(who)} caught {error}{often} at {at}{after}, and {then}."
    return Cause(_cure(caught, f"{who} {have}", at, over), says, (caught.site,))


def repeated_calls(case: Case, d: Diagnosis, text: ProgramText) -> Cause | None:
    """Return the cause if a culprit caught an exception in a loop and made calls of the `try` once more than the
    others.
    """
    if d.call is None or d.call.op in P2P:
        return None
    for rank in d.culprits:
        for caught in reversed(case.index.states[rank].caught):
            handler = _handler(text, caught.site)
            if handler is None or _usual(case, rank, caught):
                continue
            statement, clause = handler
            if (cause := _calls_in_handler(case, d, rank, caught, clause)) is not None:
                return cause
            ends = {type(n) for part in clause.body for n in ast.walk(part)} & {ast.Break, ast.Return, ast.Raise}
            if ends or not any(isinstance(n, ast.For | ast.While) for n in text.around(caught.site)):
                continue
            block = [(statement.lineno, statement.body[-1].end_lineno or statement.lineno)]
            own, others = _calls_at(case, d, caught.site.file, block, rank)
            if not any(own[line] > others[line] > 0 for line in own) or any(others[n] > own[n] for n in others):
                continue
            name, at = caught.kind.rpartition(".")[2], site_text(caught.site)
            return Cause(
                f"Keep collectives out of the block that is tried again, or try again on all ranks: after the try, "
                f"all_reduce (MAX) whether a rank failed. Rank {rank} caught {name} at {at} and has made the calls of "
                "that try more often than the others.",
                f"Rank {rank} caught {one_line(caught.error)} at {at}, and went through the try again.",
                (caught.site,),
            )
    return None


def _calls_in_handler(case: Case, d: Diagnosis, rank: int, caught: Caught, clause: ast.ExceptHandler) -> Cause | None:
    """Return the cause if *rank* made calls in the `except` block that no other rank made."""
    block = [(clause.body[0].lineno, clause.body[-1].end_lineno or clause.lineno)]
    own, others = _calls_at(case, d, caught.site.file, block, rank)
    if not own or others:
        return None
    name, at = caught.kind.rpartition(".")[2], site_text(caught.site)
    line = min(own)
    return Cause(
        f"Make no collective calls in an except block, or try again on all ranks: after the try, all_reduce (MAX) "
        f"whether a rank failed. Rank {rank} caught {name} at {at} and has made calls at "
        f"{site_text(Site(caught.site.file, line, ''))} that the others do not make.",
        f"Rank {rank} caught {one_line(caught.error)} at {at}, and made calls in the except block.",
        (caught.site, Site(caught.site.file, line, "")),
    )


def _cure(caught: Caught, who_has: str, at: str, over: bool) -> str:
    name = caught.kind.rpartition(".")[2]
    if over:
        return (
            f"Make the last call (a stop command, say) in a finally block, or raise the {name} again: {who_has} "
            f"caught it at {at} and ended, and the others wait."
        )
    cure = (
        f"Skip the step on all ranks or on none: after the try, all_reduce (MAX) whether a rank failed. "
        f"{capital(who_has)} caught {name} at {at} and may have left out calls by it. "
    )
    if name == OUT_OF_MEMORY:
        return cure + "Or let it need less memory: a smaller micro-batch, activation checkpointing."
    return cure + "Or raise it again there."


def _usual(case: Case, rank: int, caught: Caught) -> bool:
    """Return whether a rank that is not at fault has caught a similar exception at that line, equally often."""
    others = [s for r, s in case.index.states.items() if r != rank]
    like = [c for s in others for c in s.caught if (c.site, c.kind) == (caught.site, caught.kind)]
    return sum(c.times >= caught.times for c in like) * 2 >= max(1, len(others))


def _may_leave_out_calls(case: Case, d: Diagnosis, rank: int, caught: Caught, text: ProgramText) -> bool:
    """Return whether the exception may have made *rank* skip calls.

    That is so if it has made fewer calls than another rank in the `try`, or in the rest of the function or loop that
    its handler skips, or if it ended without another call.
    """
    if caught.thread:
        return False  # it ended a thread
    handler = _handler(text, caught.site)
    if handler is None or owner(caught.site.file) is Owner.LIBRARY:  # frames of libraries are not on the records
        return caught.kind.endswith(OUT_OF_MEMORY)
    statement, clause = handler
    regions = [(statement.lineno, statement.body[-1].end_lineno or statement.lineno)]
    leaves = {type(n) for part in clause.body for n in ast.walk(part)} & {ast.Continue, ast.Break, ast.Return}
    if leaves:
        around = text.around(caught.site)
        kinds = FUNCTIONS if ast.Return in leaves else (*FUNCTIONS, ast.For, ast.AsyncFor, ast.While)
        left = next((n for n in around if isinstance(n, kinds)), None)
        regions.append((0, 1 << 62) if left is None else (left.lineno, left.end_lineno or 0))
    state = case.index.states[rank]
    if state.phase is Phase.FINISHED or state.over or state.leaving:
        if all(call.index < caught.calls for call in case.index.records(rank)):
            return _has_calls(case, caught.site.file, regions)
    if d.call is None or d.call.op in P2P:  # a rank's messages have no number that another rank has too
        return _has_calls(case, caught.site.file, regions)
    own, others = _calls_at(case, d, caught.site.file, regions, rank)
    return any(others[site] > own[site] for site in others)


def _has_calls(case: Case, file: str, regions: Sequence[tuple[int, int]]) -> bool:
    frames = (f for rank in case.index.states for r in case.index.records(rank)[-256:] for f in r.way)
    return any(f.file == file and any(a <= f.line <= b for a, b in regions) for f in frames)


def _calls_at(
    case: Case, d: Diagnosis, file: str, regions: Sequence[tuple[int, int]], rank: int
) -> tuple[Counter[int], Counter[int]]:
    """Return calls through the lines of *regions* up to the diagnosed one: those of *rank*, and the most of another
    rank. Only calls that the records of both still hold are counted.
    """
    own: Counter[int] = Counter()
    most: Counter[int] = Counter()
    for log in case.index.group_logs:
        until = d.call.seq if d.call is not None and d.group == log.group else 1 << 62
        since = max((calls[0].seq for calls in log.calls.values() if calls), default=0)
        for other, calls in log.calls.items():
            lines = Counter(
                line
                for call in calls
                if since <= call.seq <= until
                for line in {f.line for f in call.way if f.file == file and any(a <= f.line <= b for a, b in regions)}
            )
            if other == rank:
                own += lines
            else:
                most |= lines
    return own, most


def _handler(text: ProgramText, site: Site) -> tuple[ast.Try | ast.TryStar, ast.ExceptHandler] | None:
    tree = text.tree(site.file)
    if tree is None:
        return None
    tries = (node for node in ast.walk(tree) if isinstance(node, ast.Try | ast.TryStar))
    return next(((node, clause) for node in tries for clause in node.handlers if clause.lineno == site.line), None)
