"""Loops over a dict or a list of the program's own, with one call for each key or item."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from distsim.debug.diagnosis.causes.cause import Cause
from distsim.debug.diagnosis.causes.program_text import Loop, ProgramText, words_of
from distsim.debug.messages.phrases import place, ranks_text
from distsim.debug.records import Site

__all__ = ["BATCHES", "collection_loop"]

BATCHES = re.compile(r"load|data|batch|sampl|iter|train|valid|(^|_)val(_|$)|test", re.IGNORECASE)
"""Names of loops over training or test data."""
METRICS = re.compile(r"metric|loss|stat|score|grad|param|meter|result|counter|histogram", re.IGNORECASE)
"""Names of collections whose value is not in sight."""
WRAPPERS = frozenset({"sorted", "list", "tuple", "enumerate", "reversed", "iter", "set"})
VIEWS = frozenset({"items", "keys", "values"})
DICTS = frozenset({"dict", "defaultdict", "OrderedDict", "Counter"})
DEEPEST = 4
"""Assignments and calls between a loop and the value that it runs over."""


def collection_loop(text: ProgramText, site: Site, loop: Loop, ranks: Sequence[int], longer: bool) -> Cause | None:
    """*ranks* go through *loop* another number of times, more where *longer*: its dict or list differs there."""
    if isinstance(loop, ast.While):
        return None
    value = _unwrapped(loop.iter)
    if isinstance(value, ast.Call | ast.Constant):
        return None
    keyed = isinstance(loop.iter, ast.Call) and value is not loop.iter and _view(loop.iter)
    keyed = keyed or _subscripted(loop, value) or _is_a(text, site, value, ast.Dict | ast.DictComp, DICTS)
    named = " ".join(words_of(value))
    listed = not BATCHES.search(named) and (
        METRICS.search(named) is not None
        or _is_a(text, site, value, ast.List | ast.ListComp | ast.Tuple, frozenset({"list", "tuple"}))
    )
    if not keyed and not listed:
        return None
    noun = "keys" if keyed else "items"
    header, goes = Site(site.file, loop.lineno, ""), "goes" if len(ranks) == 1 else "go"
    return Cause(
        f"Make the {noun} of `{ast.unparse(value)}` the same on every rank (gather them first, or fill the missing "
        f"with a neutral value): {ranks_text(ranks)} {goes} {'more' if longer else 'less'} often through the loop at "
        f"{place(header)} than the others.",
        lines=(header,),
    )


def _unwrapped(value: ast.expr) -> ast.expr:
    """The collection itself: `m` of `sorted(m.items())`."""
    while isinstance(value, ast.Call):
        match value.func:
            case ast.Name(id=name) if name in WRAPPERS and value.args:
                value = value.args[0]
            case ast.Attribute(attr=name, value=owner) if name in VIEWS and not value.args:
                value = owner
            case _:
                break
    return value


def _view(value: ast.expr) -> bool:
    """`m.items()`, also within `sorted()`."""
    calls = (part for part in ast.walk(value) if isinstance(part, ast.Call))
    return any(isinstance(call.func, ast.Attribute) and call.func.attr in VIEWS for call in calls)


def _subscripted(loop: ast.For | ast.AsyncFor, value: ast.expr) -> bool:
    """The loop reads `m[k]` of the *value* `m` by its own target `k`."""
    return any(
        isinstance(part, ast.Subscript)
        and ast.unparse(part.value) == ast.unparse(value)
        and isinstance(part.slice, ast.Name)
        and part.slice.id in words_of(loop.target)
        for statement in loop.body
        for part in ast.walk(statement)
    )


def _is_a(
    text: ProgramText, site: Site, value: ast.expr, display: type | object, makers: frozenset[str], depth: int = DEEPEST
) -> bool:
    """*value* is a *display*, or made by one of *makers*, through assignments and arguments of the same file."""
    if isinstance(value, display):  # type: ignore[arg-type]
        return True
    if depth == 0:
        return False
    if isinstance(value, ast.Call):
        name = getattr(value.func, "attr", getattr(value.func, "id", ""))
        if name in makers:
            return True
        return any(_is_a(text, at, v, display, makers, depth - 1) for at, v in text.returns(site, name))
    if not isinstance(value, ast.Name | ast.Attribute):
        return False
    name = value.id if isinstance(value, ast.Name) else value.attr
    origins = [(site, v) for _, v in text.assignments(site, name)] if not text.arguments(site, name) else []
    origins = origins or text.arguments(site, name)
    return any(_is_a(text, at, v, display, makers, depth - 1) for at, v in origins)
