"""Ranks that count the rounds of one loop from different steps, as after loading different checkpoints."""

from __future__ import annotations

import ast
import re

from distsim.debug.diagnosis.causes.cause import Cause, Sides
from distsim.debug.diagnosis.causes.program_text import Loop, ProgramText, words_of
from distsim.debug.messages.phrases import place
from distsim.debug.records import Site

__all__ = ["first_step", "resumed_elsewhere", "same_start"]

STEPS = re.compile(r"start|begin|first|resum|step|epoch|iter|done|seen|global|checkpoint|ckpt|state", re.IGNORECASE)


def resumed_elsewhere(text: ProgramText, sides: Sides) -> Cause | None:
    """Both sides are in one loop, one in a call that every n-th step makes, and the first step is a variable."""
    for inside, outside in ((sides.others, sides.culprits), (sides.culprits, sides.others)):
        for site in inside:
            for node in text.around(site):
                if not isinstance(node, ast.If) or not any(isinstance(p, ast.Mod) for p in ast.walk(node.test)):
                    continue
                shared = [loop for at, loop in text.loops([site]) if _holds(loop, at, outside)]
                for loop in shared:
                    start = first_step(text, site, loop, named=False)
                    if start is None or not words_of(node.test) & _counter(loop):
                        continue
                    return same_start(start, Site(site.file, loop.lineno, ""), (Site(site.file, node.lineno, ""),))
    return None


def same_start(start: str, header: Site, lines: tuple[Site, ...] = ()) -> Cause:
    """The ranks may begin the loop at *header* at different values of *start*."""
    return Cause(
        f"Begin at the same step on every rank: load the same checkpoint everywhere, or broadcast `{start}` from rank "
        f"0 before the loop at {place(header)}. Each rank may have a value of its own.",
        lines=(*lines, header),
    )


def first_step(text: ProgramText, site: Site, loop: Loop, named: bool = True) -> str | None:
    """The variable at which *loop* begins to count; None where all ranks begin at a number of the program's text.
    With *named*, only a variable that is called like a step."""
    match loop:
        case ast.For(iter=ast.Call(func=ast.Name(id="range"), args=[start, _])):
            words = words_of(start)
            return ast.unparse(start) if words and (not named or any(map(STEPS.search, words))) else None
        case ast.While():
            for name in sorted(_counter(loop) & words_of(loop.test)):
                before = [value for line, value in text.assignments(site, name) if line < loop.lineno]
                if before and not all(isinstance(value, ast.Constant) for value in before):
                    return name
    return None


def _counter(loop: Loop) -> frozenset[str]:
    if not isinstance(loop, ast.While):
        return words_of(loop.target)
    grown = (node.target for node in loop.body if isinstance(node, ast.AugAssign))
    return frozenset(word for target in grown for word in words_of(target))


def _holds(loop: Loop, at: Site, frames: tuple[Site, ...]) -> bool:
    return any(f.file == at.file and loop.lineno <= f.line <= (loop.end_lineno or 0) for f in frames)
