"""Calls inside a `with` block that changes what the ranks do: `join()`, `no_sync()`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

from distsim.debug.diagnosis.causes.cause import Cause, Sides
from distsim.debug.diagnosis.causes.program_text import ProgramText, words_of
from distsim.debug.diagnosis.context import Case
from distsim.debug.messages.phrases import place
from distsim.debug.records import Site
from distsim.debug.records.diagnosis import Diagnosis

__all__ = ["join_block", "no_sync_block"]

JOIN = re.compile(r"\bjoin\(|\bJoin\(")
NO_SYNC = re.compile(r"no_sync|accumulate\(|set_requires_gradient_sync|require_backward_grad_sync")
OWN_CALLS = r"all_reduce|all_gather|broadcast|barrier|\breduce\(|gather\("


def join_block(case: Case, d: Diagnosis, text: ProgramText, sides: Sides) -> Cause | None:
    """A call of the program's own inside `join()`: a rank that has joined does not make it."""
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
        f"Move the call at {place(call, through=False)} out of join(): a rank that has joined makes only the model's "
        "own calls (or make it through a Joinable of yours).",
        lines=(call,),
    )


def _calls_it(line: str, op: str) -> bool:
    """The line names a collective itself, not a model or an optimizer that makes it."""
    return (
        re.search(rf"\b{re.escape(op)}|all_reduce|all_gather|broadcast|barrier|\breduce\(|gather\(", line) is not None
    )


def no_sync_block(text: ProgramText, sides: Sides) -> Cause | None:
    """Whether `backward()` all_reduces is decided by a count that each rank keeps by itself."""
    frames = (*sides.culprits, *sides.others)
    block = _block(text, frames, NO_SYNC)
    if block is not None:
        site, node = block
        conditions = [p.test for item in node.items for p in ast.walk(item.context_expr) if isinstance(p, ast.IfExp)]
        guards = [n for n in text.around(site) if isinstance(n, ast.If)]
        conditions += [guard.test for guard in guards]
        lines = [Site(site.file, node.lineno, "")]
    else:
        found = next(_switches(text, frames), None)
        if found is None:
            return None
        site, conditions, lines = found
    for condition in conditions:
        for name in sorted(words_of(condition)):
            values = text.assignments(site, name)
            own = next((line for line, value in values if _own_count(text, site, value)), None)
            if own is None and not _kept_by_rank(text, site, name):
                continue
            lines += [Site(site.file, own, "")] if own is not None else []
            return Cause(
                "Leave no_sync() in the same micro-batch on every rank: count micro-batches, or all_reduce the count "
                f"first. `{name}` at {place(lines[-1])} depends on what this rank alone has seen.",
                lines=tuple(lines),
            )
    return None


def _switches(text: ProgramText, frames: Iterable[Site]) -> Iterator[tuple[Site, list[ast.expr], list[Site]]]:
    """`model.set_requires_gradient_sync(is_last)` in a loop around one of *frames*."""
    for site, loop in text.loops(tuple(frames)):
        for call in ast.walk(loop):
            if isinstance(call, ast.Call) and NO_SYNC.search(ast.unparse(call.func)) and call.args:
                yield site, list(call.args), [Site(site.file, call.lineno, "")]


def _own_count(text: ProgramText, site: Site, value: ast.expr) -> bool:
    """An expression that reads a number which grows by something else than a constant."""
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
    """The innermost `with` around one of *frames* whose expression fits *pattern*."""
    for site in frames:
        for node in text.around(site):
            if isinstance(node, ast.With) and any(pattern.search(ast.unparse(i.context_expr)) for i in node.items):
                return site, node
    return None
