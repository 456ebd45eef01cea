"""Operands in an order that every process has for itself: sets of strings, listings of folders."""

from __future__ import annotations

import ast

from distsim.debug.diagnosis.causes.cause import Cause, Sides
from distsim.debug.diagnosis.causes.program_text import ProgramText, words_of
from distsim.debug.diagnosis.context import Case
from distsim.debug.divergence.divergence import HORIZON, signature
from distsim.debug.messages import place
from distsim.debug.records import Site
from distsim.debug.records.diagnosis import Diagnosis

__all__ = ["unordered_operands"]

SET_METHODS = frozenset({"union", "intersection", "difference", "symmetric_difference"})
KEEPS_ORDER = frozenset({"list", "tuple", "enumerate", "iter", "reversed", "zip", "map", "filter", "fromkeys", "copy"})
LISTINGS = frozenset({"listdir", "scandir", "glob", "iglob", "rglob", "iterdir", "walk"})
DEEPEST = 6


def unordered_operands(case: Case, d: Diagnosis, text: ProgramText, sides: Sides) -> Cause | None:
    """A loop around the calls runs over a set, or over a listing of files, that nobody has sorted."""
    for site, loop in text.loops((*sides.culprits, *sides.others)):
        if isinstance(loop, ast.While):
            continue
        origin = _origin(text, site, loop.iter, DEEPEST)
        if origin is None:
            continue
        line, is_set = origin
        at = Site(site.file, line, "")
        shown = ast.unparse(loop.iter)
        why = (
            "the order of a set of strings is another one in each process (hash randomisation, PYTHONHASHSEED)"
            if is_set
            else "the order of a listing of files is another one on each host"
        )
        says = "The ranks make the same calls in different orders." if _permuted(case, d) else ""
        return Cause(
            f"Sort what the loop runs over: `sorted({shown})` at {place(Site(site.file, loop.lineno, ''))}. It comes "
            f"from {place(at)}, and {why}.",
            says,
            (at, Site(site.file, loop.lineno, "")),
        )
    return None


def _permuted(case: Case, d: Diagnosis) -> bool:
    """The next calls of two sides are the same up to their order."""
    if d.group is None or d.call is None:
        return False
    for log in case.index.group_logs:
        if log.group != d.group:
            continue
        heads = [
            sorted(repr(signature(c)) for c in calls if c.seq >= d.call.seq)[:HORIZON] for calls in log.calls.values()
        ]
        return len(heads) > 1 and min(map(len, heads)) > 1 and all(head == heads[0] for head in heads)
    return False


def _origin(text: ProgramText, site: Site, value: ast.expr, depth: int) -> tuple[int, bool] | None:
    """Line at which *value* takes an order of its own, and whether that is a set's; None where it is ordered."""
    if depth == 0:
        return None
    match value:
        case ast.Set() | ast.SetComp():
            return value.lineno, True
        case ast.BinOp(op=ast.BitAnd() | ast.BitOr() | ast.Sub() | ast.BitXor()):
            return _set_in(text, site, value.left, depth - 1) or _set_in(text, site, value.right, depth - 1)
        case ast.Call():
            name = getattr(value.func, "attr", getattr(value.func, "id", ""))
            if name in ("set", "frozenset") or name in SET_METHODS:
                return value.lineno, True
            if name in LISTINGS:
                return value.lineno, False
            if name in KEEPS_ORDER:
                return next((o for a in value.args if (o := _origin(text, site, a, depth - 1))), None)
            returns = text.returns(site, name)
            return next((o for at, v in returns if (o := _origin(text, at, v, depth - 1))), None)
        case ast.ListComp() | ast.GeneratorExp() | ast.DictComp():
            return _origin(text, site, value.generators[0].iter, depth - 1)
        case ast.Starred():
            return _origin(text, site, value.value, depth - 1)
        case ast.List() | ast.Tuple():
            return next((o for e in value.elts if (o := _origin(text, site, e, depth - 1))), None)
        case ast.Name() | ast.Attribute():
            name = value.id if isinstance(value, ast.Name) else value.attr
            values = text.assignments(site, name)
            if _sorted(text, site, name, values):
                return None
            if not values:
                arguments = text.arguments(site, name)
                return next((o for at, v in arguments if (o := _origin(text, at, v, depth - 1))), None)
            return next((o for _, v in values if (o := _origin(text, site, v, depth - 1))), None)
    return None


def _set_in(text: ProgramText, site: Site, value: ast.expr, depth: int) -> tuple[int, bool] | None:
    """An operand of `&`, `|` or `-` that is a set, or the keys of a dict."""
    if isinstance(value, ast.Call) and getattr(value.func, "attr", "") in ("keys", "items"):
        return value.lineno, True
    return _origin(text, site, value, depth)


def _sorted(text: ProgramText, site: Site, name: str, values: list[tuple[int, ast.expr]]) -> bool:
    """*name* is sorted on its way, under no condition: `name = sorted(...)` or `name.sort()`."""
    tree = text.tree(site.file)
    lines = [line for line, value in values if words_of(value) & {"sorted", "sort"}]
    lines += [
        node.lineno
        for node in (() if tree is None else ast.walk(tree))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "sort"
        and getattr(node.func.value, "id", getattr(node.func.value, "attr", None)) == name
    ]
    return any(not any(isinstance(n, ast.If) for n in text.around(Site(site.file, line, ""))) for line in lines)
