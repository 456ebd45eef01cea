"""Lines of the user's program at which it reads a value."""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from opcode import opname
from types import CodeType, FrameType

from distsim.debug.records.frames import Owner, is_ours, owner, user_stack
from distsim.text.distributions import Routing

# -- Where a program reads a value: its line, the expression that reads, and the condition that the value decides.

ROUTED = "routed "
"""Start of the reader's name if unknown choices, as of the experts of a mixture, were drawn."""
EMPTY = "a mask that selects nothing"
"""Name of the reader of a mask whose values are unknown."""
INTEGER = "an integer"
"""Name of the reader of integers without values, which are 0."""
COPIED = "a storage copied to the host"
"""Name of the reader of a whole storage, which is zeros then."""
MOST_PASSES, MOST_READINGS = 100, 2_000
"""Number of reads after which a `while` on an unknown value counts as endless.

The second applies inside another loop or a function, which may reach the loop anew that often.
"""
IN_LIBRARY = 10_000
"""The same limit for a loop in an installed library, in consecutive reads."""
AGAIN = (ast.For, ast.AsyncFor, ast.While, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
LONGEST = 60
"""Characters of an expression that are shown."""
IDLE = frozenset({"sleep", "synchronize", "sched_yield", "print", "flush", "debug", "info", "warning"})
"""Functions that a loop calls only to wait or to print."""
ASKS = frozenset(
    {"item", "all", "any", "sum", "max", "min", "cpu", "tolist", "bool", "int", "float", "eq", "ne", "gt", "lt"}
)
"""Methods whose result in a condition stays the same as long as the tensor has the same values."""
CONDITIONS = (ast.If, ast.While, ast.IfExp, ast.Assert)


def routed(routing: Routing) -> str:
    """Return the name of the reader of choices that *routing* drew."""
    return f"{ROUTED}{'evenly' if routing.is_even else f'by {routing.text}'} (no values)"


@dataclass(frozen=True, slots=True)
class Reading:
    """One position in a program at which a value is read."""

    where: str
    """Position as file:line; "torch" if no line of the program is involved."""
    expression: str = ""
    """Expression in the program: `loss.item()`; empty if the source is not known."""
    condition: str = ""
    """`if`, `while` or `assert` if the value decides a branch; empty otherwise."""
    most_passes: int = 0
    """For a `while` that only this value can end: the number of reads after which it counts as endless; else 0.

    Only this value ends it if the condition has no other operand and the loop no break, return or raise.
    """
    in_library: bool = False
    """The `while` is an installed library's, which the place calls: other calls are other loops."""
    fixed: bool = False
    """Whether nothing in the `while` changes its condition or leaves the loop, so that it waits for the value to
    change.
    """


def reading(frame: FrameType) -> Reading:
    """Return the reading that *frame* is a part of."""
    stack = user_stack(frame)
    if not stack:
        return Reading("torch")
    where = f"{stack[0].file}:{stack[0].line}"
    walk: FrameType | None = frame
    while walk is not None and owner(walk.f_code.co_filename) is not Owner.USER:
        walk = walk.f_back
    if walk is None:
        return Reading(where)
    expression, condition, passes, fixed = _told(walk.f_code, walk.f_code.co_filename, walk.f_lasti)
    inner: FrameType | None = frame
    while inner is not None and is_ours(inner.f_code.co_filename):
        inner = inner.f_back
    if inner is not None and inner is not walk:
        in_loop, _, most, _ = _told(inner.f_code, inner.f_code.co_filename, inner.f_lasti)
        if most:
            return Reading(where, f"{in_loop} in {inner.f_code.co_name}", "while", IN_LIBRARY, in_library=True)
    return Reading(where, expression, condition, passes, fixed=fixed)


def forget_readings() -> None:
    """Clear the cache of parsed lines after a simulation, because files may have changed before the next."""
    _told.cache_clear()
    _tests.cache_clear()
    _tested.cache_clear()
    _negations.cache_clear()


@functools.lru_cache(maxsize=1024)
def _told(code: CodeType, file: str, instruction: int) -> tuple[str, str, int, bool]:
    position = next(islice(code.co_positions(), instruction // 2, None), None)
    if position is None:
        return "", "", 0, False
    if position in (tests := _tested(file)):  # a jump that asks a tensor itself has the place of the whole statement
        position = tests[position]
    elif opname[code.co_code[instruction]].startswith(("POP_JUMP", "TO_BOOL")):
        position = _negations(file).get(position, position)
    first, last, begin, end = position
    if first is None or last is None:
        return "", "", 0, False
    lines = [linecache.getline(file, n).encode() for n in range(first, last + 1)]
    if not all(lines):
        return "", "", 0, False
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][begin:]
    expression = " ".join(b"".join(lines).decode(errors="replace").split())
    if len(expression) > LONGEST:
        expression = expression[: LONGEST - 4] + " ..."
    return expression, *_condition(file, (first, begin or 0))


def _condition(file: str, position: tuple[int, int]) -> tuple[str, int, bool]:
    """Return (its word, most passes, whether it is fixed) of the innermost condition that *position* is in."""
    result = "", 0, False
    for test, word, passes, fixed in _tests(file):
        if (test.lineno, test.col_offset) <= position < (test.end_lineno or 0, test.end_col_offset or 0):
            result = word, passes, fixed
    return result


@functools.lru_cache(maxsize=64)
def _tests(file: str) -> tuple[tuple[ast.expr, str, int, bool], ...]:
    """Return every condition of *file*, the outer ones first."""
    try:
        return tuple(_walk(ast.parse("".join(linecache.getlines(file)))))
    except (SyntaxError, ValueError):
        return ()


Place = tuple[int | None, int | None, int | None, int | None]
"""First line, last line, first column, last column."""


@functools.lru_cache(maxsize=64)
def _tested(file: str) -> dict[Place, Place]:
    """Map each conditional statement of *file* to the position of its condition."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return {}
    return {_place(node): _place(node.test) for node in ast.walk(tree) if isinstance(node, CONDITIONS)}


@functools.lru_cache(maxsize=64)
def _negations(file: str) -> dict[Place, Place]:
    """Map each operand of a `not` in a condition of *file* to the position of the `not`.

    From Python 3.12 on a jump has the place of the operand, whose answer it turns round.
    """
    places: dict[Place, Place] = {}
    for test, *_ in _tests(file):
        for node in ast.walk(test):  # the outer one first
            if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
                places[_place(node.operand)] = places.get(_place(node), _place(node))
    return places


def _place(node: ast.stmt | ast.expr) -> Place:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def _walk(
    tree: ast.AST, looped: bool = False, only: dict[int, int] | None = None
) -> Iterator[tuple[ast.expr, str, int, bool]]:
    """Yield the conditions of a syntax tree.

    *looped* says that the program may come there more than once. *only* has the largest number of passes of each
    `if` that is the only exit of its `while True`.
    """
    only = {} if only is None else only
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, CONDITIONS):
            word = {ast.While: "while", ast.Assert: "assert"}.get(type(node), "if")
            most = 0
            if isinstance(node, ast.While) and not isinstance(node.test, ast.BoolOp) and not _can_be_left(node):
                most = MOST_READINGS if looped else MOST_PASSES
            if id(node) in only:
                most = only[id(node)]
            fixed = isinstance(node, ast.While) and not _can_be_left(node) and not _can_change(node)
            yield node.test, word, most, fixed
        elif isinstance(node, ast.comprehension):
            yield from ((test, "if", 0, False) for test in node.ifs)
        if isinstance(node, ast.While) and (way := _only_way_out(node)) is not None:
            only[id(way)] = MOST_READINGS if looped else MOST_PASSES
        yield from _walk(node, looped or isinstance(node, AGAIN), only)


def _only_way_out(loop: ast.While) -> ast.If | None:
    """Return the single `if` that ends a `while True`, if there is one with a simple condition."""
    if not (isinstance(loop.test, ast.Constant) and loop.test.value):
        return None
    ways = (ast.Break, ast.Return, ast.Raise)
    exits = [node for part in loop.body for node in ast.walk(part) if isinstance(node, ways)]
    ifs = [part for part in loop.body if isinstance(part, ast.If) and any(isinstance(one, ways) for one in part.body)]
    if len(exits) != 1 or len(ifs) != 1 or isinstance(ifs[0].test, ast.BoolOp):
        return None
    return ifs[0]


def _can_be_left(loop: ast.While) -> bool:
    ways = (ast.Break, ast.Return, ast.Raise)
    return any(isinstance(node, ways) for part in loop.body for node in ast.walk(part))


def _can_change(loop: ast.While) -> bool:
    """Return whether *loop* may change what its condition reads: it assigns names, items or attributes, or calls
    functions.
    """
    for part in loop.body:
        for node in ast.walk(part):
            if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
                return True
            if isinstance(node, ast.Call) and _called(node) not in IDLE:
                return True
    names = {node.id for node in ast.walk(loop.test) if isinstance(node, ast.Name)}
    return any(
        (isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load) and node.id in names)
        or isinstance(node, ast.Yield | ast.YieldFrom | ast.Await)
        for node in ast.walk(loop)
    ) or any(isinstance(node, ast.Call) and _called(node) not in ASKS for node in ast.walk(loop.test))


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
