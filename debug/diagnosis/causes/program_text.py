"""The user's source as syntax trees: the loops, blocks and handlers around a line, and what they depend on."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from distsim.debug.divergence.source_order import last_word, parse, statements_in
from distsim.debug.records import Site
from distsim.debug.records.call import line_of

Loop = ast.For | ast.AsyncFor | ast.While
AGREEING = frozenset({"all_reduce", "broadcast", "all_gather_object", "broadcast_object_list", "all_gather"})
"""Collectives after which all ranks hold the same value in their first argument."""
LONGEST = 44
"""Largest number of characters of a condition in a suggestion."""
DEEPEST = 3
"""Assignments between a condition and the value that it depends on."""
TAKES_LOCK = re.compile(r"\.acquire\(|with .*(?<![A-Za-z])(?:r|m)?lock", re.IGNORECASE)
"""A line that waits for a lock."""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@dataclass(frozen=True, slots=True)
class Decision:
    """A condition by which a rank leaves a loop, or skips the rest of a round."""

    site: Site
    text: str
    """Source text of the condition."""
    words: frozenset[str]
    """Names that it reads, through assignments in the loop and functions of the same file."""
    leaves: bool
    """Whether the statement ends the loop, instead of skipping the rest of the iteration."""


class ProgramText:
    """Syntax trees of the files of one evidence."""

    def __init__(self, sources: Mapping[str, str], called: frozenset[tuple[str, int]] | None = None) -> None:
        """Args:
        sources: Text of each file.
        called: File and line of every frame in the records; None to treat every call in the text as made.
        """
        self._sources = sources
        self._called = called

    def tree(self, file: str) -> ast.Module | None:
        """Return the syntax tree of *file*; None if its text is not known, or is not Python."""
        text = self._sources.get(file)
        return parse(text) if text else None

    def trees(self) -> Iterator[tuple[str, ast.Module]]:
        """Yield all files that can be parsed."""
        for file in self._sources:
            if (tree := self.tree(file)) is not None:
                yield file, tree

    def mentions(self, pattern: re.Pattern[str]) -> bool:
        """Return whether *pattern* occurs in one of the files."""
        return any(pattern.search(source) for source in self._sources.values())

    def line(self, site: Site) -> str:
        """Return the text of a line."""
        return line_of(self._sources, site)

    def around(self, site: Site) -> list[ast.stmt]:
        """Return the statements around a line, innermost first, up to and including its function."""
        tree = self.tree(site.file)
        chain = [] if tree is None else _chain(tree, site.line)
        inside: list[ast.stmt] = []
        for node in reversed(chain):
            inside.append(node)
            if isinstance(node, FUNCTIONS):
                break
        return inside

    def loops(self, frames: Sequence[Site], outside: Sequence[Site] = ()) -> list[tuple[Site, Loop]]:
        """Return the loops around *frames* that contain no line of *outside*, innermost first."""
        return [
            (frame, node)
            for frame in frames
            for node in self.around(frame)
            if isinstance(node, Loop) and not holds(node, frame, outside)
        ]

    def changed_by(self, loop: Loop) -> frozenset[str]:
        """Return names that an iteration of *loop* counts or assigns."""
        counted = frozenset() if isinstance(loop, ast.While) else words_of(loop.target)
        return counted.union(name for name, _ in _assigned(loop))

    def decisions(self, file: str, loop: Loop, *, counted: bool = False) -> list[Decision]:
        """Return the conditions that end *loop* or skip an iteration.

        Conditions that depend only on its counter, or on a value that the ranks have agreed on by a collective, are
        included only with *counted*.
        """
        targets = _counters(loop)
        met: list[Decision] = []
        tests = [(loop.test, loop.lineno, True)] if isinstance(loop, ast.While) else []
        tests += list(_exits(loop.body, own=True))
        for test, line, leaves in tests:
            if isinstance(test, ast.Constant) or (not counted and _counts(test, targets)):
                continue
            if not counted and self._agreed(file, loop, test, line):
                continue
            words = _through_assignments(words_of(test), loop)
            for function in self._functions(file, words):
                words |= words_of(function)
            met.append(Decision(Site(file, line, ""), ast.unparse(test), words, leaves))
        return met

    def _agreed(self, file: str, loop: Loop, test: ast.expr, line: int) -> bool:
        """Return whether each part of *test* reads a value that a collective above it in the loop wrote, or a function
        that returns one."""
        written = self._written_by_collectives(file, loop, line)
        agreed = {f.name for f in self._functions(file, words_of(loop)) if self._answers_alike(file, f)}
        for name, value in _assigned(loop):
            words = words_of(value)
            if words & agreed or any(written.get(word, value.lineno) < value.lineno for word in words):
                written.setdefault(name, value.lineno)
        parts = test.values if isinstance(test, ast.BoolOp) else [test]
        return all(words_of(part) & (written.keys() | agreed) for part in parts)

    def agreed_above(self, site: Site, test: ast.expr) -> bool:
        """Return whether *test* reads a value that a collective above it, in the function or module of *site*, has
        written.
        """
        scope = self._scope(site)
        written = {} if scope is None else self._written_by_collectives(site.file, scope, test.lineno)
        return not written.keys().isdisjoint(self.words_through(site, test))

    def words_through(self, site: Site, test: ast.expr) -> frozenset[str]:
        """Return names that *test* reads, followed through assignments in the function or module of *site*."""
        scope = self._scope(site)
        return words_of(test) if scope is None else _through_assignments(words_of(test), scope)

    def _scope(self, site: Site) -> ast.AST | None:
        return next((n for n in self.around(site) if isinstance(n, FUNCTIONS)), self.tree(site.file))

    def _written_by_collectives(self, file: str, scope: ast.AST, until: int) -> dict[str, int]:
        """Return names of tensors and lists that collectives of *scope* wrote for all ranks, with their first line. A
        collective under an `if` without a record does not count."""
        written: dict[str, int] = {}
        for call in ast.walk(scope):
            if not isinstance(call, ast.Call) or not call.args or call.lineno > until:
                continue
            if last_word(call.func) in AGREEING and not self._left_out(file, scope, call):
                written.setdefault(last_word(call.args[0]), call.lineno)
        written.pop("", None)
        return written

    def _left_out(self, file: str, scope: ast.AST, call: ast.Call) -> bool:
        """Return whether *call* is inside an `if` of *scope*, and no record has its line."""
        lines = range(call.lineno, (call.end_lineno or call.lineno) + 1)
        if self._called is None or any((file, line) in self._called for line in lines):
            return False
        ifs = [node for node in ast.walk(scope) if isinstance(node, ast.If)]
        return any(node.lineno <= call.lineno <= (node.end_lineno or 0) for node in ifs)

    def _answers_alike(self, file: str, function: ast.FunctionDef) -> bool:
        """Return whether *function* returns a value that a collective in it has written, so that it is equal on all
        ranks.
        """
        written = self._written_by_collectives(file, function, function.end_lineno or 0)
        values = [node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value is not None]
        return bool(values) and all(words_of(value) & written.keys() for value in values)

    def _functions(self, file: str, names: frozenset[str]) -> list[ast.FunctionDef]:
        tree = self.tree(file)
        functions = () if tree is None else ast.walk(tree)
        return [n for n in functions if isinstance(n, ast.FunctionDef) and n.name in names]

    def assignments(self, site: Site, name: str) -> list[tuple[int, ast.expr]]:
        """Return line and value of the assignments to *name* in the function or module of *site*."""
        scopes = dict.fromkeys((self._scope(site), self.tree(site.file)))
        assigned = (pair for scope in scopes if scope is not None for pair in _assigned(scope))
        return [(value.lineno, value) for target, value in assigned if target == name]

    def returns(self, site: Site, name: str) -> list[tuple[Site, ast.expr]]:
        """Return the return expressions of function *name* in the same file, with their positions."""
        return [
            (Site(site.file, node.lineno, name), node.value)
            for function in self._functions(site.file, frozenset({name}))
            for node in ast.walk(function)
            if isinstance(node, ast.Return) and node.value is not None
        ]

    def arguments(self, site: Site, name: str) -> list[tuple[Site, ast.expr]]:
        """Return what calls in the same file pass for the parameter *name* of the function of *site*, and where."""
        tree = self.tree(site.file)
        function = next((n for n in self.around(site) if isinstance(n, ast.FunctionDef)), None)
        if tree is None or function is None:
            return []
        names = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
        if name not in names:
            return []
        met: list[tuple[Site, ast.expr]] = []
        for call in ast.walk(tree):
            if not isinstance(call, ast.Call) or last_word(call.func) != function.name:
                continue
            at = names.index(name) - (isinstance(call.func, ast.Attribute) and names[:1] == ["self"])
            values = [k.value for k in call.keywords if k.arg == name] or call.args[at : at + 1]
            met += [(Site(site.file, call.lineno, ""), value) for value in values]
        return met


def holds(loop: Loop, at: Site, frames: Sequence[Site]) -> bool:
    """Return whether one of *frames* is in *loop*, which is in the file of *at*."""
    return any(f.file == at.file and loop.lineno <= f.line <= (loop.end_lineno or 0) for f in frames)


def shortened(text: str) -> str:
    """Return the start of a condition, short enough for a suggestion."""
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def words_of(node: ast.AST) -> frozenset[str]:
    """Return names, attributes and string keys that an expression or function body reads."""
    words: set[str] = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            words.add(part.id)
        elif isinstance(part, ast.Attribute):
            words.add(part.attr)
        elif isinstance(part, ast.Constant) and isinstance(part.value, str) and part.value.isidentifier():
            words.add(part.value)
    return frozenset(words)


def _chain(tree: ast.AST, line: int) -> list[ast.stmt]:
    """Return the statements that contain *line*, outermost first."""
    chain: list[ast.stmt] = []
    node: ast.AST | None = tree
    while node is not None:
        node = next((n for n in statements_in(node) if _first_line(n) <= line <= (n.end_lineno or n.lineno)), None)
        if node is not None:
            chain.append(node)
    return chain


def _first_line(node: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(d.lineno for d in decorators)])


def _exits(body: Sequence[ast.stmt], own: bool, test: ast.expr | None = None) -> Iterator[tuple[ast.expr, int, bool]]:
    """Yield (condition, its line, whether it ends the loop).

    If *own*, `break` and `continue` belong to the loop itself.
    """
    for statement in body:
        match statement:
            case ast.Break() | ast.Continue() if own and test is not None:
                yield test, test.lineno, isinstance(statement, ast.Break)
            case ast.Return() if test is not None:
                yield test, test.lineno, True
            case ast.If():
                yield from _exits(statement.body, own, statement.test)
                yield from _exits(statement.orelse, own, statement.test)
            case ast.For() | ast.AsyncFor() | ast.While():
                yield from _exits(statement.body, False, test)
                yield from _exits(statement.orelse, own, test)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                continue
            case _:
                yield from _exits(list(statements_in(statement)), own, test)


def _counters(loop: Loop) -> frozenset[str]:
    """Return names that count the iterations of a loop."""
    names: set[str] = set()
    if not isinstance(loop, ast.While) and (over := words_of(loop.iter) & {"range", "enumerate", "count"}):
        counted = loop.target.elts[:1] if "enumerate" in over and isinstance(loop.target, ast.Tuple) else [loop.target]
        names.update(word for part in counted for word in words_of(part))
    for node in loop.body:  # in every round
        if isinstance(node, ast.AugAssign) and isinstance(node.value, ast.Constant):
            names |= words_of(node.target)
    return frozenset(names)


def _counts(test: ast.expr, counters: frozenset[str]) -> bool:
    """Return whether the condition compares a counter with something, as in `step + 1 >= max_steps`."""
    if not isinstance(test, ast.Compare):
        return False
    ends = [words_of(end) for end in (test.left, *test.comparators)]
    return any(words and words <= counters for words in ends)


def _through_assignments(words: frozenset[str], scope: ast.AST) -> frozenset[str]:
    """Return *words* and the names that assignments to them in *scope* read, transitively."""
    assigned = _assigned(scope)
    for _ in range(DEEPEST):
        words = words.union(*(words_of(value) for name, value in assigned if name in words))
    return words


def _assigned(scope: ast.AST) -> list[tuple[str, ast.expr]]:
    """Return names, or last attributes, that are assigned in *scope*."""
    pairs: list[tuple[str, ast.expr]] = []
    for node in ast.walk(scope):
        targets: Sequence[ast.expr]
        match node:
            case ast.Assign():
                targets = node.targets
            case ast.AugAssign() | ast.NamedExpr():
                targets = [node.target]
            case ast.AnnAssign() if node.value is not None:
                targets = [node.target]
            case _:
                continue
        for target in targets:
            for part in target.elts if isinstance(target, ast.Tuple | ast.List) else [target]:
                name = getattr(part, "id", getattr(part, "attr", None))
                if name is not None and node.value is not None:
                    pairs.append((name, node.value))
    return pairs
