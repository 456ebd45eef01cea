"""Position of two lines of a user's program relative to each other: before, after, or in exclusive branches.

A rank that makes another call than the rest either skipped their call, makes an additional one, or took the other
branch of an `if`. The program's text distinguishes these cases; the records alone do not.
"""

from __future__ import annotations

import ast
import builtins
import enum
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from distsim.debug.records import CallRecord, Site


class Order(enum.StrEnum):
    """Position of one line relative to another."""

    SAME = "same"
    BEFORE = "before"
    AFTER = "after"
    EXCLUSIVE = "exclusive"  # two branches: one pass reaches only one of them
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Relation:
    """Position of line *mine* relative to line *theirs*, in the innermost function that both stacks contain."""

    order: Order
    mine: Site | None = None
    theirs: Site | None = None
    my_guard: int | None = None
    """Line of an `if` around *mine* but not around *theirs*, also in a function that it was called through, so that
    *mine* runs under a condition; None without one.
    """
    guard_is_outer: bool = False
    """Whether an `if` in the function of both lines is around all loops of *mine* that do not contain *theirs*, and
    each of these has rounds on every rank that comes to it."""
    mine_for_some: bool = False
    """Whether the `if` around *mine* tests the rank, so that only some ranks run it."""
    theirs_for_some: bool = False
    left_loop: bool = False
    """Whether *theirs* is in a loop that does not contain *mine*."""
    still_in_loop: bool = False
    """Whether *mine* is in a loop that does not contain *theirs*."""
    repeated: bool = False
    """Whether the lines are in exclusive branches, and the branch of *mine* has the operation of *theirs* further
    down.
    """
    swapped: bool = False
    """Whether the lines are in exclusive branches, and each branch has the other's operation further down."""
    passed: bool = False
    """Whether *theirs* is before *mine* in the same block without a condition, so that a rank at *mine* has executed
    it.
    """
    mine_each_round: bool = False
    """Whether both are in one loop and every iteration executes *mine*."""
    theirs_each_round: bool = False
    only_theirs_skipped: bool = False
    """Whether every iteration of the common loop executes *mine*, while some statement may skip *theirs*."""
    certain: bool = True
    """Whether the relation comes from the program's text and not only from line numbers."""


RANK = re.compile(
    r"rank|main_process|process_zero|global_zero|master|leader|chief|coordinator|\bis_(?:main|root|zero|writer)\b",
    re.IGNORECASE,
)
"""Expressions by which programs test their rank (`get_rank()`, and the names of accelerate, transformers and
Lightning).
"""

UNKNOWN = Relation(Order.UNKNOWN, certain=False)

_LOOPS = (ast.For, ast.AsyncFor, ast.While)


def relate(mine: CallRecord, other: CallRecord, sources: Mapping[str, str]) -> Relation:
    """Compare the two calls in the innermost function that is in both stacks with different lines."""
    my_frames = mine.stack or ((mine.site,) if mine.site else ())
    their_frames = other.stack or ((other.site,) if other.site else ())
    for i, a in enumerate(my_frames):
        for j, b in enumerate(their_frames):
            if (a.file, a.function) != (b.file, b.function):
                continue
            if a.line == b.line:
                if not (i and j) or my_frames[i - 1].function == their_frames[j - 1].function:
                    break
                if any(step.is_loop for step in _around([a], sources)):
                    break  # they may be in different rounds
                my_inner, their_inner = _around(my_frames[:i], sources), _around(their_frames[:j], sources)
                return replace(  # two functions that one line calls, in an order that is not known
                    UNKNOWN,
                    mine=a,
                    theirs=b,
                    left_loop=any(step.is_loop for step in their_inner),
                    still_in_loop=any(step.is_loop for step in my_inner),
                )
            relation = _within(a, b, mine.op, other.op, sources.get(a.file))
            my_line = relation.mine_each_round and _inevitable(my_frames[:i], sources)
            their_line = relation.theirs_each_round and _inevitable(their_frames[:j], sources)
            my_inner, their_inner = _around(my_frames[:i], sources), _around(their_frames[:j], sources)
            return replace(
                relation,
                my_guard=relation.my_guard or next((s.node.lineno for s in my_inner if s.is_branch), None),
                guard_is_outer=relation.guard_is_outer and not any(s.may_have_no_round for s in my_inner),
                mine_for_some=relation.mine_for_some or any(s.asks_rank for s in my_inner),
                theirs_for_some=relation.theirs_for_some or any(s.asks_rank for s in their_inner),
                passed=relation.passed and not j,
                mine_each_round=my_line and _spelled(mine, sources),
                theirs_each_round=their_line and _spelled(other, sources),
                only_theirs_skipped=my_line and not their_line,
                left_loop=relation.left_loop or any(s.is_loop for s in their_inner),
                still_in_loop=relation.still_in_loop or any(s.is_loop for s in my_inner),
            )
    if mine.site is not None and mine.site == other.site:
        return Relation(Order.SAME, mine.site, other.site)
    return UNKNOWN


def _around(frames: Sequence[Site], sources: Mapping[str, str]) -> list[_Step]:
    """Return the compound statements around each of these lines in its function."""
    steps: list[_Step] = []
    for site in frames:
        steps += _innermost_function(_path(sources.get(site.file), site.line) or ())
    return steps


def _inevitable(frames: Sequence[Site], sources: Mapping[str, str]) -> bool:
    """Return whether a call of the outermost of *frames* always reaches the line of the innermost one."""
    for site in frames:
        path = _path(sources.get(site.file), site.line) or []
        starts = [i for i, step in enumerate(path) if step.is_function]
        if not starts:
            return False
        function, *inner = path[starts[-1] :]
        if any(step.may_be_skipped for step in inner) or _jumps(function.statements, (ast.Return,), 0, site.line):
            return False
    return True


def _spelled(call: CallRecord, sources: Mapping[str, str]) -> bool:
    """Return whether the line of *call* contains the operation by name. A library call may make any collective."""
    return call.site is not None and _spells_out(sources.get(call.site.file, ""), call.site.line, call.op)


@lru_cache(maxsize=256)
def _spells_out(text: str, line: int, op: str) -> bool:
    """Return whether a line of a file calls *op* by name."""
    tree = parse(text)
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and _calls(node, op)) if tree else ()
    return any(node.lineno <= line <= (node.end_lineno or 0) for node in calls)


def _jumps(block: Iterable[ast.stmt], kinds: tuple[type[ast.stmt], ...], after: int, before: int) -> bool:
    """Return whether a statement of *kinds* between two lines of *block* leaves the block. A `break` of an inner
    loop does not.
    """
    for statement in block:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if isinstance(statement, kinds) and after < statement.lineno < before:
            return True
        inner = (ast.Return,) if isinstance(statement, _LOOPS) else kinds
        if _jumps(statements_in(statement), inner, after, before):
            return True
    return False


def _each_round(shared: Sequence[_Step], own: Sequence[_Step], line: int, other: int) -> bool:
    """Return whether a rank at line *other* always reaches *line* before it returns to *other*, in the innermost loop
    of *shared*.

    Those are the statements around both lines; *own* are the others around *line*.
    """
    inside = _innermost_function(shared)
    loops = [i for i, step in enumerate(inside) if step.is_loop]
    if not loops or any(step.may_be_skipped for step in own):
        return False
    if any(step.catches for step in inside[loops[-1] + 1 :]):
        return False
    loop = inside[loops[-1]]
    after = 0 if line < other else other
    return not _jumps(loop.statements, (ast.Return, ast.Break, ast.Continue), after, line)


def _innermost_function(path: Sequence[_Step]) -> Sequence[_Step]:
    starts = [i for i, step in enumerate(path) if step.is_function]
    return path[starts[-1] :] if starts else path


def _within(a: Site, b: Site, my_op: str, their_op: str, text: str | None) -> Relation:
    by_line = Order.AFTER if a.line > b.line else Order.BEFORE
    mine, other_path = _path(text, a.line), _path(text, b.line)
    if mine is None or other_path is None:
        return Relation(by_line, a, b, certain=False)
    shared = 0
    while shared < min(len(mine), len(other_path)) and mine[shared] == other_path[shared]:
        shared += 1
    my_own, their_own = mine[shared:], other_path[shared:]
    exclusive = bool(my_own and their_own) and my_own[0].node is their_own[0].node
    repeated = exclusive and my_own[0].later_call(a.line, their_op)
    return Relation(
        order=Order.EXCLUSIVE if exclusive else by_line,
        mine=a,
        theirs=b,
        my_guard=next((s.node.lineno for s in my_own if s.is_branch), None),
        guard_is_outer=next((s.is_branch for s in my_own if s.is_branch or s.is_loop), False)
        and not any(s.may_have_no_round for s in my_own),
        mine_for_some=any(s.asks_rank for s in my_own),
        theirs_for_some=any(s.asks_rank for s in their_own),
        left_loop=any(s.is_loop for s in their_own),
        still_in_loop=any(s.is_loop for s in my_own),
        repeated=repeated,
        swapped=repeated and their_own[0].later_call(b.line, my_op),
        passed=by_line is Order.AFTER and not their_own,
        mine_each_round=_each_round(mine[:shared], my_own, a.line, b.line),
        theirs_each_round=_each_round(mine[:shared], their_own, b.line, a.line),
    )


@dataclass(frozen=True, slots=True)
class _Step:
    """A compound statement around a line, and which of its blocks contains the line."""

    node: ast.stmt
    block: str
    statements: list[ast.stmt] = field(compare=False)
    """Those of that block."""

    @property
    def is_loop(self) -> bool:
        return isinstance(self.node, _LOOPS)

    @property
    def may_have_no_round(self) -> bool:
        """Return whether this is a loop that goes over data or by a condition, of which a rank may have none."""
        over = getattr(self.node, "iter", None)
        return self.is_loop and not (isinstance(over, ast.Call) and ast.unparse(over.func) == "range")

    @property
    def is_function(self) -> bool:
        return isinstance(self.node, ast.FunctionDef | ast.AsyncFunctionDef)

    @property
    def catches(self) -> bool:
        """Return whether an exception in the block may be caught, so that the program continues after the statement."""
        if isinstance(self.node, ast.With | ast.AsyncWith):
            return any("suppress" in ast.unparse(item.context_expr) for item in self.node.items)
        return isinstance(self.node, ast.Try | ast.TryStar) and bool(self.node.handlers) and self.block != "finalbody"

    @property
    def may_be_skipped(self) -> bool:
        """Return whether a rank that reaches the statement may skip its block or a part of it."""
        return self.is_loop or self.is_branch or self.catches

    @property
    def is_branch(self) -> bool:
        return isinstance(self.node, ast.If | ast.Match) or (
            isinstance(self.node, ast.Try | ast.TryStar) and self.block.startswith("handlers")
        )

    @property
    def asks_rank(self) -> bool:
        return isinstance(self.node, ast.If) and RANK.search(ast.unparse(self.node.test)) is not None

    def later_call(self, line: int, op: str) -> bool:
        """Return whether the same block calls *op* further down."""
        return any(
            _calls(node, op) and getattr(node, "lineno", 0) > line
            for statement in self.statements
            for node in ast.walk(statement)
        )


@lru_cache(maxsize=64)
def parse(text: str) -> ast.Module | None:
    """Return the syntax tree of a program, in which a comprehension that makes calls is a loop around its statement.

    None if *text* is not Python.
    """
    try:
        tree: ast.Module = _Unrolled().visit(ast.parse(text))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return tree


TENSOR_METHODS = frozenset({"item", "to", "cpu", "cuda", "detach", "clone", "float", "size", "numel", "tolist", "mean"})


def _is_own(call: ast.Call) -> bool:
    """Return whether a call may lead to a collective: it is no built-in function, and none of torch's tensors."""
    function: ast.expr = call.func
    if isinstance(function, ast.Attribute) and function.attr in TENSOR_METHODS:
        return False
    while isinstance(function, ast.Attribute | ast.Call):
        function = function.value if isinstance(function, ast.Attribute) else function.func
    name = getattr(function, "id", "")
    return name not in ("torch", "np", "numpy") and not hasattr(builtins, name)


class _Unrolled(ast.NodeTransformer):
    def visit_Return(self, node: ast.Return | ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Expr) -> ast.stmt:
        calls = [part for part in ast.walk(node) if isinstance(part, ast.Call) and _is_own(part)]
        arguments = {id(inner) for call in calls for one in call.args + call.keywords for inner in ast.walk(one)}
        for part in ast.walk(node):
            if not isinstance(part, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
                continue
            elements = [part.key, part.value] if isinstance(part, ast.DictComp) else [part.elt]
            inner = {id(one) for element in elements for one in ast.walk(element)}
            if id(part) not in arguments and any(id(call) in inner for call in calls):
                over = part.generators[0]
                return ast.copy_location(ast.For(over.target, over.iter, [node], []), node)
        return node

    visit_Assign = visit_AnnAssign = visit_AugAssign = visit_Expr = visit_Return


def _path(text: str | None, line: int) -> list[_Step] | None:
    """Return the compound statements around *line*, outermost first; None if there is no such line."""
    path: list[_Step] = []
    tree = parse(text) if text else None
    block = [] if tree is None else tree.body
    while True:
        inside = next((s for s in block if s.lineno <= line <= (s.end_lineno or s.lineno)), None)
        if inside is None:
            return path if path else None
        entered = block_at(inside, line)
        if entered is None:
            return path  # a plain statement, or the head of a compound one
        name, block = entered
        path.append(_Step(inside, name, block))


def block_at(statement: ast.stmt, line: int) -> tuple[str, list[ast.stmt]] | None:
    """Return which block of a compound statement holds *line*, and its statements; None for the head, or elsewhere."""
    for name in ("body", "orelse", "finalbody"):
        block = getattr(statement, name, None)
        if isinstance(block, list) and block and block[0].lineno <= line <= (block[-1].end_lineno or 0):
            return name, block
    for i, part in enumerate([*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())]):
        block = part.body
        if block and block[0].lineno <= line <= (block[-1].end_lineno or 0):
            return f"{'handlers' if hasattr(statement, 'handlers') else 'cases'}:{i}", block
    return None


def statements_in(node: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements right below a node: of its blocks, handlers and cases."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        elif isinstance(child, ast.ExceptHandler | ast.match_case):
            yield from child.body


def calls_below(site: Site | None, op: str, sources: Mapping[str, str]) -> bool:
    """Return whether the function of *site* calls *op* (or its asynchronous form) further down on the same path."""
    text = sources.get(site.file) if site is not None else None
    tree = parse(text) if text else None
    if tree is None or site is None:
        return False
    blocks: list[list[ast.stmt]] = [tree.body]
    for step in _path(text, site.line) or ():
        if step.is_function:
            blocks.clear()  # what its callers do afterwards is not looked at
        blocks.append(step.statements)
        if isinstance(step.node, ast.Try | ast.TryStar):
            blocks.append(step.node.finalbody)
            if step.block == "body":
                blocks.append(step.node.orelse)
    return any(
        _calls(node, op)
        for block in blocks
        for statement in block
        if statement.lineno > site.line
        for node in ast.walk(statement)
    )


def _calls(node: ast.AST, op: str) -> bool:
    if not isinstance(node, ast.Call):
        return False
    return last_word(node.func).lstrip("i") == op.lstrip("i")


def last_word(node: ast.AST) -> str:
    """Return the last word of a name: `all_reduce` of `dist.all_reduce`; empty for another expression."""
    return str(getattr(node, "attr", getattr(node, "id", "")))
