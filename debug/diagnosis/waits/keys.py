"""Keys of a store as edges: which ranks come to a line that sets what a rank awaits.

A rank comes to a line that is below its own in the same function or in one of its callers, or in a loop around it, and
not in the other branch. Where all lines that set a key are such lines, nobody else in the job will set it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from functools import cached_property

from distsim.debug.diagnosis.causes.program_text import FUNCTIONS, Loop, ProgramText
from distsim.debug.divergence.source_order import block_at, last_word
from distsim.debug.matching.index import EvidenceIndex
from distsim.debug.records import Site, StoreWait

SETS = frozenset({"set", "add", "append", "compare_set", "queue_push", "multi_set"})
DEEPEST = 3
"""Calls between a line of a rank's function and the line that sets a key."""


def awaited_key(index: EvidenceIndex, rank: int) -> str | None:
    """Return the key of the program's own for which *rank* waits."""
    wait = next((w for w in index.waits(rank) if isinstance(w, StoreWait)), None)
    return wait.keys[0] if wait is not None and wait.keys and not wait.purpose else None


def setting_lines(text: ProgramText) -> Iterator[tuple[Site, ast.expr]]:
    """Yield the lines of the program that set keys of a store, with the key, or with what the keys are read from."""
    for file, tree in text.trees():
        for call in ast.walk(tree):
            if not isinstance(call, ast.Call) or getattr(call.func, "attr", "") not in SETS:
                continue
            arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
            unpacked = any(isinstance(a, ast.Starred) for a in call.args) or any(k.arg is None for k in call.keywords)
            if len(arguments) < 2 and not unpacked:
                continue  # that of a set, a list or an event
            named = next((keyword.value for keyword in call.keywords if keyword.arg in ("key", "keys")), None)
            name = arguments[0] if named is None else named
            names = name.elts if isinstance(name, ast.List | ast.Tuple) else [name]  # multi_set takes a list
            for one in names:
                yield Site(file, call.lineno, ""), one


def sets_unseen(text: ProgramText) -> bool:
    """Return whether the program sets keys, or may, in a way that has no line of its own: a method that it hands on,
    or calls in a lambda.
    """
    for _, tree in text.trees():
        called = {id(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)}
        later = {id(n) for one in ast.walk(tree) if isinstance(one, ast.Lambda) for n in ast.walk(one)}
        methods = (n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr in SETS)
        if any(id(n) not in called or id(n) in later for n in methods):
            return True
    return False


def names_key(name: ast.expr, key: str) -> bool | None:
    """Return whether *name* may be *key*, which a store's prefixes may precede: a text, or an f-string whose fixed
    parts fit; None if that cannot be read.
    """
    if isinstance(name, ast.JoinedStr):
        if not any(isinstance(v, ast.Constant) and str(v.value).strip("/_ ") for v in name.values):
            return None
        pattern = "".join(re.escape(str(v.value)) if isinstance(v, ast.Constant) else ".*" for v in name.values)
        return re.search(rf"(^|/){pattern}$", key) is not None
    if isinstance(name, ast.Constant):
        return isinstance(name.value, str) and (name.value == key or key.endswith(f"/{name.value}"))
    return None


class KeySetters:
    """The ranks that come to the lines that set keys, as the text of one evidence shows it."""

    def __init__(self, index: EvidenceIndex, text: ProgramText) -> None:
        """Args:
        index: The evidence.
        text: Its sources.
        """
        self._index = index
        self._text = text
        self._comers: dict[Site, list[int]] = {}
        self._alone: dict[Site, bool] = {}

    def setters(self, rank: int) -> dict[int, Site] | None:
        """Return the ranks that come to a line that sets the key that *rank* awaits, with that line; None if another
        thread, process or line may set it.
        """
        key = awaited_key(self._index, rank)
        if key is None or self._unseen:
            return None
        comers: dict[int, Site] = {}
        for line, name in self._lines:
            fits = names_key(name, key)
            if fits is False:
                continue
            if fits is None or not self._by_calls_alone(line):
                return None
            comers.update((other, line) for other in self._that_come_to(line) if other != rank)
        return comers or None

    @cached_property
    def _unseen(self) -> bool:
        """Whether keys may be set where neither a rank's stack nor a line shows it."""
        return sets_unseen(self._text) or any(_has_other_threads(self._index, rank) for rank in self._index.states)

    @cached_property
    def _lines(self) -> list[tuple[Site, ast.expr]]:
        return list(setting_lines(self._text))

    def _that_come_to(self, line: Site) -> list[int]:
        if line not in self._comers:
            lines = _lines_that_lead_to(self._text, line)
            ways = {rank: tuple(_where(self._index, rank)) for rank in self._index.states}
            coming = {way for way in {*ways.values()} if _comes_to(self._text, way, lines)}
            self._comers[line] = [rank for rank, way in ways.items() if way in coming]
        return self._comers[line]

    def _by_calls_alone(self, line: Site) -> bool:
        if line not in self._alone:
            lines = _lines_that_lead_to(self._text, line)
            self._alone[line] = _by_calls_alone(self._index, self._text, lines)
        return self._alone[line]


def _has_other_threads(index: EvidenceIndex, rank: int) -> bool:
    calls = {call.thread for call in index.call_waits(rank)}
    state = index.states[rank]
    # A Timer has no frames.
    return state.threads_cut or any(t.name not in calls | {"MainThread"} for t in state.threads)


def _where(index: EvidenceIndex, rank: int) -> Sequence[Site]:
    calls = index.call_waits(rank)
    return calls[0].way if calls else index.states[rank].stack


def _lines_that_lead_to(text: ProgramText, line: Site) -> list[Site]:
    """Return the line and those of its file that call the function around it."""
    lines = [line]
    for one in lines[:64]:
        function = next((n for n in text.around(one) if isinstance(n, FUNCTIONS)), None)
        name = getattr(function, "name", None)
        tree = text.tree(line.file)
        if name is None or tree is None or len(lines) > DEEPEST * 16:
            continue
        calls = (n for n in ast.walk(tree) if isinstance(n, ast.Call))
        lines += [
            Site(line.file, n.lineno, "")
            for n in calls
            if last_word(n.func) == name and not any(known.line == n.lineno for known in lines)
        ]
    return lines


def _by_calls_alone(index: EvidenceIndex, text: ProgramText, lines: Sequence[Site]) -> bool:
    """Return whether the ranks come to all *lines* by calls of the text, so that no thread or process that the program
    starts will come there in another way.
    """
    for line in lines:
        function = next((n for n in text.around(line) if isinstance(n, FUNCTIONS)), None)
        if function is None:
            continue
        name, tree = getattr(function, "name", ""), text.tree(line.file)
        inside = (any(frame.function.endswith(name) for frame in _where(index, rank)) for rank in index.states)
        if tree is None or not name or all(inside):
            continue
        called = {id(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)}
        named = [n for n in ast.walk(tree) if last_word(n) == name]
        if not named or any(id(n) not in called for n in named):
            return False
    return True


def comes_to(text: ProgramText, here: Sequence[Site], line: Site) -> bool:
    """Return whether a rank whose frames are *here* comes to *line* later, as far as the text shows."""
    return _comes_to(text, here, _lines_that_lead_to(text, line))


def _comes_to(text: ProgramText, here: Sequence[Site], lines: Sequence[Site]) -> bool:
    return any(_below(text, frame, line) for frame in here for line in lines if frame.file == line.file)


def _below(text: ProgramText, frame: Site, line: Site) -> bool:
    around, other = text.around(frame), text.around(line)
    own, its = (next((n for n in nodes if isinstance(n, FUNCTIONS)), None) for nodes in (around, other))
    if own is not its:
        return False
    for node in around:
        if isinstance(node, ast.If) and node in other and block_at(node, frame.line) != block_at(node, line.line):
            return False
    return line.line > frame.line or any(isinstance(node, Loop) and node in other for node in around)
