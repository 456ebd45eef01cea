"""What the source of a program says about a line of it: pure rules, each in a table of small programs."""

from __future__ import annotations

import ast
import re

import pytest

from distsim.debug.diagnosis.causes import find_cause
from distsim.debug.diagnosis.causes.program_text import ProgramText, shortened, words_of
from distsim.debug.records import Site

FILE = "train.py"
WHOLE = """\
import time
LIMIT = 3
limit: int = LIMIT


@decorated
def body(model, ranks, *, loud=False):
    total = first = 0
    for step, batch in enumerate(loader):
        loss = model(batch)
        done += 1
        seen, (skipped) = done, loss
        if loss > bound:
            continue
        elif step > limit:
            break
        for part in batch:
            if part.bad:
                continue
            if part.worse:
                return None
        while loss:
            break
        else:
            if loud:
                continue
        try:
            check(loss)
        except ValueError:
            if retries:
                break
        match batch:
            case None:
                if first:
                    break

        def inner():
            return nothing

        with open(name) as file:
            if file:
                return total
    return total + 1


async def later(queue):
    async for item in queue:
        use(item)


body(net, ranks=[0, 1])
thing.body(net, group)
"""
TEXT = ProgramText({FILE: WHOLE, "empty.py": "", "broken.py": "for", "other.py": "class A:\n    value = 1\n"})


def at(line: int, file: str = FILE) -> Site:
    return Site(file, line, "")


def expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def line_of(text: str, number: int = 1) -> int:
    """The line of the *number*th occurrence of *text*."""
    return [n for n, line in enumerate(WHOLE.splitlines(), 1) if text in line][number - 1]


def first_loop(text: str) -> ast.For | ast.While:
    loop = next(node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.For | ast.While))
    assert isinstance(loop, ast.For | ast.While)
    return loop


def test_text_that_is_empty_broken_or_unknown_has_no_tree() -> None:
    """The others are gone through in order."""
    assert [file for file, _ in TEXT.trees()] == [FILE, "other.py"]
    assert TEXT.tree("empty.py") is TEXT.tree("broken.py") is TEXT.tree("unknown.py") is None
    assert TEXT.assignments(at(1, "broken.py"), "x") == TEXT.arguments(at(1, "broken.py"), "x") == []
    assert TEXT.around(at(1, "unknown.py")) == []
    assert TEXT.words_through(at(1, "unknown.py"), expression("a.b")) == {"a", "b"}


@pytest.mark.parametrize(("pattern", "occurs"), [("LIMIT", True), ("class A", True), ("absent", False)])
def test_a_pattern_may_be_in_any_file(pattern: str, occurs: bool) -> None:
    """One file is enough."""
    assert TEXT.mentions(re.compile(pattern)) is occurs


@pytest.mark.parametrize(
    ("line", "text"), [(0, ""), (1, "import time"), (2, "LIMIT = 3"), (10**6, ""), (len(WHOLE.splitlines()) + 1, "")]
)
def test_a_line_is_stripped_and_lines_begin_at_one(line: int, text: str) -> None:
    """A line outside of the file is empty."""
    assert TEXT.line(at(line)) == text


def test_the_last_line_of_a_file_is_a_line() -> None:
    """The bound is the number of lines."""
    assert TEXT.line(at(len(WHOLE.splitlines()))) == "thing.body(net, group)"


@pytest.mark.parametrize(
    ("text", "number", "kinds"),
    [
        ("@decorated", 1, ["FunctionDef"]),
        ("total = first", 1, ["Assign", "FunctionDef"]),
        ("if part.bad", 1, ["If", "For", "For", "FunctionDef"]),
        ("if loud", 1, ["If", "While", "For", "FunctionDef"]),
        ("if retries", 1, ["If", "Try", "For", "FunctionDef"]),
        ("if first", 1, ["If", "Match", "For", "FunctionDef"]),
        ("return nothing", 1, ["Return", "FunctionDef"]),
        ("return total + 1", 1, ["Return", "FunctionDef"]),
        ("use(item)", 1, ["Expr", "AsyncFor", "AsyncFunctionDef"]),
        ("limit: int", 1, ["AnnAssign"]),
        ("body(net, ranks", 1, ["Expr"]),
    ],
)
def test_statements_around_a_line_end_with_its_function(text: str, number: int, kinds: list[str]) -> None:
    """Innermost first: through blocks, handlers, cases, and not beyond the innermost function."""
    assert [type(node).__name__ for node in TEXT.around(at(line_of(text, number)))] == kinds


def test_loops_around_frames_are_those_that_no_other_line_is_in() -> None:
    """Innermost first; the first and the last line of a loop are in it."""
    inner, outer = line_of("for part in batch"), line_of("for step, batch")
    last = line_of("return total", 1)
    frames = [at(line_of("if part.bad"))]
    assert [node.lineno for _, node in TEXT.loops(frames)] == [inner, outer]
    assert [node.lineno for _, node in TEXT.loops(frames, [at(outer)])] == [inner]
    assert [node.lineno for _, node in TEXT.loops(frames, [at(last)])] == [inner]
    assert [node.lineno for _, node in TEXT.loops(frames, [at(last + 1)])] == [inner, outer]
    assert [node.lineno for _, node in TEXT.loops(frames, [at(outer - 1)])] == [inner, outer]
    assert [node.lineno for _, node in TEXT.loops(frames, [at(inner, "other.py")])] == [inner, outer]


def test_what_a_round_changes() -> None:
    """Targets of the loop, and what it assigns; a `while` has no target."""
    assert TEXT.changed_by(first_loop("for a, b in c:\n    d, e.f = b\n    g += 1")) == {"a", "b", "d", "f", "g"}
    assert TEXT.changed_by(first_loop("while a:\n    b = 1")) == {"b"}


def decided(text: str, counted: bool = False) -> list[tuple[int, str, bool]]:
    decisions = ProgramText({FILE: text}).decisions(FILE, first_loop(text), counted=counted)
    return [(d.site.line, d.text, d.leaves) for d in decisions]


def test_conditions_that_end_a_loop_or_skip_a_round() -> None:
    """`break` and `continue` of an inner loop are that loop's own, but for its `else`; `return` ends both; functions
    inside are none."""
    loop = next(node for _, node in TEXT.loops([at(line_of("loss = model"))]))
    decisions = [(d.text, d.leaves) for d in TEXT.decisions(FILE, loop)]
    assert decisions == [
        ("loss > bound", False),
        ("part.worse", True),
        ("loud", False),
        ("retries", True),
        ("first", True),
        ("file", True),
    ]
    assert ("step > limit", True) in [(d.text, d.leaves) for d in TEXT.decisions(FILE, loop, counted=True)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("while True:\n    f()", []),
        ("while left:\n    f()", [(1, "left", True)]),
        ("for i in range(n):\n    if i == m: break", []),
        ("for i in range(n):\n    if m == i + 1: break", []),
        ("for i in rows:\n    if i == m: break", [(2, "i == m", True)]),
        ("for n, i in enumerate(rows):\n    if i == m: break", [(2, "i == m", True)]),
        ("for n, i in enumerate(rows):\n    if n == m: break", []),
        ("for i in rows:\n    k += 1\n    if k == m: break", []),
        ("for i in rows:\n    k += i\n    if k == m: break", [(3, "k == m", True)]),
        ("for i in rows:\n    if i:\n        k += 1\n    if k == m: break", [(4, "k == m", True)]),
        ("for i in range(n):\n    if ready(i): break", [(2, "ready(i)", True)]),
        ("while k < n:\n    k += 1", []),
        ("for i in rows:\n    dist.all_reduce(s)\n    if s > 1: break", []),
        ("for i in rows:\n    if s > 1: break\n    dist.all_reduce(s)", [(2, "s > 1", True)]),
        ("for i in rows:\n    dist.reduce(s)\n    if s > 1: break", [(3, "s > 1", True)]),
        ("for i in rows:\n    dist.all_reduce(s)\n    t = s.item()\n    if t > 1: break", []),
        ("for i in rows:\n    t = s.item()\n    dist.all_reduce(s)\n    if t > 1: break", [(4, "t > 1", True)]),
        ("for i in rows:\n    dist.all_reduce(s)\n    if s > 1 or i: break", [(3, "s > 1 or i", True)]),
        ("for i in rows:\n    dist.all_reduce(s)\n    if s > 1 and s < 3: break", []),
        ("for i in rows:\n    dist.barrier()\n    if s: break", [(3, "s", True)]),
        ("for i in rows:\n    dist.all_reduce()\n    if s: break", [(3, "s", True)]),
    ],
)
def test_a_counter_or_a_collective_decides_alike(text: str, expected: list[tuple[int, str, bool]]) -> None:
    """A condition on the loop's own counter, or on what a collective above it has written, is the same on all ranks."""
    assert decided(text) == expected


AGREES = "def agree(x):\n    dist.all_reduce(x)\n    {returns}\nfor i in rows:\n    if agree(i): break"


@pytest.mark.parametrize(
    ("returns", "num_decisions"),
    [("return x", 0), ("return x.item() > 0", 0), ("return y", 1), ("return", 1), ("if z: return y\n    return x", 1)],
)
def test_a_function_may_agree_for_its_caller(returns: str, num_decisions: int) -> None:
    """All that it returns must come from what its collective wrote."""
    assert len(decided(AGREES.format(returns=returns))) == num_decisions


@pytest.mark.parametrize(("called", "num_decisions"), [(None, 0), ((), 1), ((3,), 0), ((4,), 0), ((5,), 1), ((2,), 1)])
def test_a_collective_under_an_if_counts_where_a_record_has_its_line(
    called: tuple[int, ...] | None, num_decisions: int
) -> None:
    """Of a call of several lines, any; without records, all collectives count."""
    text = "for i in rows:\n    if i:\n        dist.all_reduce(\n            s)\n    if s: break"
    lines = None if called is None else frozenset((FILE, line) for line in called)
    assert len(ProgramText({FILE: text}, lines).decisions(FILE, first_loop(text))) == num_decisions


def test_the_names_of_a_decision_go_through_assignments_and_functions() -> None:
    """Three assignments far, and through the functions of the file that it calls."""
    text = "def old():\n    return time.time()\nfor i in rows:\n    a = old()\n    b = a\n    c = b\n    d = c\n"
    text += "    if {}: break"
    words = [ProgramText({FILE: t}).decisions(FILE, first_loop(t))[0].words for t in map(text.format, "cd")]
    assert {"a", "old", "time"} <= words[0]
    assert "a" in words[1]
    assert "old" not in words[1]


@pytest.mark.parametrize(
    ("text", "line", "expected"),
    [
        ("def f(s):\n    dist.all_reduce(s)\n    if s: pass", 3, True),
        ("def f(s):\n    if s: pass\n    dist.all_reduce(s)", 2, False),
        ("def f(s):\n    if s: pass\n\ndist.all_reduce(s)", 2, False),
        ("dist.all_reduce(s)\nif s: pass", 2, True),
        ("dist.all_reduce(s)\nif t: pass", 2, False),
        ("dist.all_reduce(s)\nt = s\nif t: pass", 3, True),
    ],
)
def test_a_condition_that_was_agreed_above(text: str, line: int, expected: bool) -> None:
    """In the same function, or else in the module."""
    test = next(node.test for node in ast.walk(ast.parse(text)) if isinstance(node, ast.If))
    assert ProgramText({FILE: text}).agreed_above(at(line), test) is expected
    assert not ProgramText({}).agreed_above(at(line), test)


def test_assignments_of_the_function_come_before_those_of_the_module() -> None:
    """Chained, to several names, in place, annotated, to attributes; not those of another file."""
    inside = at(line_of("loss = model"))
    assert [line for line, _ in TEXT.assignments(inside, "total")] == [line_of("total = first")] * 2
    assert [line for line, _ in TEXT.assignments(at(1), "limit")] == [3]
    assert [line for line, _ in TEXT.assignments(at(2, "other.py"), "limit")] == []
    seen = TEXT.assignments(inside, "seen")
    assert [ast.unparse(value) for _, value in seen] == ["(done, loss)"] * 2


def test_what_a_function_returns_and_is_given() -> None:
    """By position or by name; `self` is not passed."""
    returned = TEXT.returns(at(1), "body")
    assert sorted(ast.unparse(value) for _, value in returned) == ["None", "nothing", "total", "total + 1"]
    assert {site.function for site, _ in returned} == {"body"}
    inside = at(line_of("loss = model"))
    assert [ast.unparse(value) for _, value in TEXT.arguments(inside, "ranks")] == ["[0, 1]", "group"]
    assert TEXT.arguments(inside, "loud") == TEXT.arguments(at(1), "model") == []
    text = "class A:\n    def f(self, x):\n        use(x)\na.f(1)\nf(2)\ng(3)\na.f(x=4)"
    passed = ProgramText({FILE: text}).arguments(at(3), "x")
    assert [(site.line, ast.unparse(value)) for site, value in passed] == [(4, "1"), (7, "4")]


@pytest.mark.parametrize(
    ("text", "words"),
    [("a.b[c]", "abc"), ("a['b']", "ab"), ("a['b c']", "a"), ("f(a, b=c)", "fac"), ("a[1]", "a"), ("None", "")],
)
def test_words_of_an_expression(text: str, words: str) -> None:
    """Names, attributes, and strings that could be names."""
    assert words_of(expression(text)) == set(words)


def test_a_condition_is_shortened_to_what_a_suggestion_holds() -> None:
    """44 letters stay as they are."""
    assert shortened("x" * 44) == "x" * 44
    assert shortened("x" * 45) == "x" * 41 + "..."


# --- the order of operands -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "origin"),
    [
        ("{a, b}", (1, True)),
        ("{x for x in y}", (1, True)),
        ("set(a)", (1, True)),
        ("frozenset(a)", (1, True)),
        ("a.union(b)", (1, True)),
        ("set(a) & b", (1, True)),
        ("b | set(a)", (1, True)),
        ("a.keys() - b", (1, True)),
        ("b ^ a.items()", (1, True)),
        ("a.values() - b", None),
        ("set(a) + b", None),
        ("os.listdir(a)", (1, False)),
        ("path.glob(a)", (1, False)),
        ("list(set(a))", (1, True)),
        ("zip(a, set(b))", (1, True)),
        ("sorted(set(a))", None),
        ("len(set(a))", None),
        ("[x for x in set(a)]", (1, True)),
        ("(x for x in os.listdir(a))", (1, False)),
        ("{x: 1 for x in set(a)}", (1, True)),
        ("[x for x in a for y in set(b)]", None),
        ("[1, *set(a)]", (1, True)),
        ("[[[*set(a)]]]", (1, True)),
        ("[[[[[[set(a)]]]]]]", None),
        ("[[[[[set(a)]]]]]", (1, True)),
        ("[*[*[*[set(a)]]]]", None),
        ("(1, 2)", None),
        ("a", None),
        ("1", None),
        ("list(list(list(list(list(set(a))))))", (1, True)),
        ("list(list(list(list(list(list(set(a)))))))", None),
    ],
)
def test_where_a_value_gets_an_order_of_its_own(value: str, origin: tuple[int, bool] | None) -> None:
    """Line, and whether it is a set (or else a listing of files); not deeper than six steps."""
    assert find_cause._origin(ProgramText({FILE: value}), at(1), expression(value), find_cause.DEEPEST) == origin


@pytest.mark.parametrize(
    ("text", "origin"),
    [
        ("a = set(b)\nuse(a)", (1, True)),
        ("a = set(b)\na = sorted(a)\nuse(a)", None),
        ("a = set(b)\na.sort()\nuse(a)", None),
        ("a = set(b)\nif c:\n    a = sorted(a)\nuse(a)", (1, True)),
        ("a = set(b)\nb.sort()\nuse(a)", (1, True)),
        ("self.a = set(b)\nuse(self.a)", (1, True)),
        ("def f():\n    return set(b)\na = f()\nuse(a)", (2, True)),
        ("def f():\n    return a\na = f()\nuse(a)", None),
        ("def f(a):\n    use(a)\nf(set(b))", (3, True)),
        ("def f(a):\n    use(a)\nf(b)\nf(set(b))", (4, True)),
        ("def f(a):\n    use(b)\nf(set(b))", None),
    ],
)
def test_the_order_of_a_name_is_that_of_what_it_was_given(text: str, origin: tuple[int, bool] | None) -> None:
    """Through assignments, functions of the file and arguments; a name that is always sorted has one order."""
    call = next(n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "use")
    assert find_cause._origin(ProgramText({FILE: text}), at(call.lineno), call.args[0], find_cause.DEEPEST) == origin


@pytest.mark.parametrize(
    ("text", "inside", "unlocked"),
    [
        ("lock.acquire()\na()\nb()", 3, False),
        ("lock.acquire()\nlock.release()\nb()", 3, True),
        ("lock.acquire()\na()\nb()\nlock.release()", 3, False),
        ("flock(f, LOCK_EX)\nflock(f, LOCK_UN)\nb()", 3, True),
        ("with lock:\n    a()\nb()", 3, True),
        ("with lock:\n    a()\n    b()", 3, False),
    ],
)
def test_a_lock_is_given_back_before_a_line(text: str, inside: int, unlocked: bool) -> None:
    """By a call between the two lines, or at the end of its block."""
    assert find_cause._unlocked(ProgramText({FILE: text}), at(1), at(inside)) is unlocked
