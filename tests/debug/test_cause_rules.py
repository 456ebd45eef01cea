"""Which condition, loop or block around a call is its cause: pure rules, each in a table of small programs."""

from __future__ import annotations

import ast

import pytest

from distsim.debug.diagnosis.causes import blocks, find_cause, loops, program_text
from distsim.debug.diagnosis.causes.program_text import Decision, ProgramText
from distsim.debug.diagnosis.context import Cause, Sides
from distsim.debug.records import Site
from tests.debug.test_program_text import FILE, at, expression, first_loop

# --- loops ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "is_fixed"),
    [
        ("for i in range(3)", True),
        ("for i in range(0, 9, 3)", True),
        ("for i in range(n)", False),
        ("for i in range(3, n)", False),
        ("for i in steps(3)", False),
        ("for i in rows", False),
        ("while n", False),
    ],
)
def test_a_loop_of_a_fixed_length(header: str, is_fixed: bool) -> None:
    """`range` of numbers alone."""
    assert loops._fixed_length(first_loop(f"{header}: pass")) is is_fixed


@pytest.mark.parametrize(
    ("text", "noun"),
    [
        ("for k in metrics: f(k)", "items"),
        ("for k in sorted(metrics): f(k)", "items"),
        ("for k in train_metrics: f(k)", None),
        ("for k in things: f(k)", None),
        ("for k, v in things.items(): f(k)", "keys"),
        ("for k in sorted(things.keys()): f(k)", "keys"),
        ("for k in things.keys(1): f(k)", None),
        ("for k in things: f(things[k])", "keys"),
        ("for k in things: f(others[k])", None),
        ("for k in things: f(things[j])", None),
        ("for k in list(metrics): f(k)", "items"),
        ("for k in make(things): f(k)", None),
        ("for k in 3: f(k)", None),
        ("while metrics: f()", None),
        ("things = {}\nfor k in things: f(k)", "keys"),
        ("things = defaultdict(int)\nfor k in things: f(k)", "keys"),
        ("things = []\nfor k in things: f(k)", "items"),
        ("things = tuple(a)\nfor k in things: f(k)", "items"),
        ("batches = []\nfor k in batches: f(k)", None),
        ("def make():\n    return {}\nthings = make()\nfor k in things: f(k)", "keys"),
        ("def run(things):\n    for k in things: f(k)\nrun({1: 2})", "keys"),
        ("things = 0\ndef run(things):\n    for k in things: f(k)\nrun([1])", "items"),
        ("a = {}\nb = a\nc = b\nd = c\nfor k in d: f(k)", "keys"),
        ("def m():\n    return n()\ndef n():\n    return {}\na = m()\nb = a\nfor k in b: f(k)", "keys"),
        ("def m():\n    return n()\ndef n():\n    return {}\na = m()\nb = a\nc = b\nfor k in c: f(k)", None),
        ("a = {}\nb = a\nc = b\nd = c\ne = d\nfor k in e: f(k)", None),
    ],
)
def test_a_loop_over_a_collection_of_each_rank(text: str, noun: str | None) -> None:
    """A dict by its keys, a list by its items; loops over batches, and values that nothing is known of, are none."""
    loop = first_loop(text)
    cause = loops.collection_loop(ProgramText({FILE: text}), at(loop.lineno), loop, [1], longer=True)
    assert (None if cause is None else cause.suggestion.partition(" of ")[0]) == (noun and f"Make the {noun}")
    if cause is not None:
        assert "rank 1 goes more often" in cause.suggestion
        assert cause.lines == (at(loop.lineno),)


def test_several_ranks_go_less_often() -> None:
    """Number and direction are in the words."""
    loop = first_loop("for k in metrics: f(k)")
    cause = loops.collection_loop(ProgramText({}), at(1), loop, [1, 2], longer=False)
    assert cause is not None
    assert "ranks 1,2 go less often" in cause.suggestion


@pytest.mark.parametrize(
    ("text", "begins"),
    [
        ("for s in range(start, n): f()", "Begin at the same step"),
        ("for s in range(2, n): f()", "Give `range(2, n)` at train.py:1 the same bound"),
        ("for s in range(k + start, n): f()", "Begin at the same step"),
        ("k = 0\nk = load()\nwhile k < n:\n    k += 1", "Begin at the same step"),
        ("for s in range(k, n): f()", "Give `range(k, n)` at train.py:1 the same bound"),
        ("for s in range(num): f()", "Give `range(num)` at train.py:1 the same bound"),
        ("for s in range(len(loader)): f()", "Give every rank the same number of batches in `range(len(loader))`"),
        ("for b in loader: f()", "Give every rank the same number of batches in `loader`"),
        ("for p in model.parameters(): f()", "Build the same model on every rank"),
        ("for n in range(3): f()", None),
        ("while busy: f()", "Make `while busy` at train.py:1 end in the same round"),
        ("k = load()\nwhile k < n:\n    k += 1", "Begin at the same step on every rank: load the same checkpoint"),
        ("k = 0\nwhile k < n:\n    k += 1", "Make `while k < n` at train.py:2"),
        ("while k < n:\n    k += 1\nk = load()", "Make `while k < n` at train.py:1"),
        ("k = load()\nwhile m < n:\n    k += 1", "Make `while m < n` at train.py:2"),
    ],
)
def test_the_header_of_a_loop_as_the_cause(text: str, begins: str | None) -> None:
    """Where it begins, its bound, its batches, its parts; a loop over numbers of the text is none."""
    loop = first_loop(text)
    cause = loops.header_cause(ProgramText({FILE: text}), at(loop.lineno), loop)
    if begins is None:
        assert cause is None
    else:
        assert cause is not None
        assert cause.suggestion.startswith(begins)
        assert cause.lines == (at(loop.lineno),)


@pytest.mark.parametrize(
    ("handler", "flags"),
    [
        ("signal.signal(TERM, lambda *a: stop.set())", {"stop": 1}),
        ("loop.add_signal_handler(TERM, stop.append)", {}),
        ("def on(n, f):\n    flags['stop'] = True\nsignal.signal(TERM, on)", {"stop": 3, "flags": 3}),
        ("def on(n, f):\n    self.n += 1\nsignal.signal(TERM, on)", {"n": 3}),
        ("def on(n, f):\n    box[0] = True\nsignal.signal(TERM, on)", {"box": 3}),
        ("def on(n, f):\n    stop = True\nsignal.signal(TERM)", {}),
        ("def on(n, f):\n    stop = True\ndef off(n, f):\n    go = True\nsignal.signal(TERM, on)", {"stop": 5}),
        ("def on(n, f):\n    stop = True\nregister(TERM, on)", {}),
    ],
)
def test_names_that_signal_handlers_set(handler: str, flags: dict[str, int]) -> None:
    """With the line at which the handler is registered."""
    assert {name: site.line for name, site in loops.signal_flags(ProgramText({FILE: handler})).items()} == flags


@pytest.mark.parametrize(
    ("words", "begins"),
    [
        ({"monotonic", "limit"}, "Let rank 0 decide on the time limit"),
        ({"exists"}, "Let rank 0 look for the file"),
        ({"time", "exists"}, "Let rank 0 decide on the time limit"),
        ({"loss"}, None),
    ],
)
def test_conditions_that_each_rank_decides_by_itself(words: set[str], begins: str | None) -> None:
    """A clock comes before a file."""
    cause = loops.by_itself(ProgramText({"x.py": "time()"}), Decision(at(3), "x", frozenset(words), leaves=True))
    assert (None if cause is None else cause.suggestion.startswith(begins or "?")) in (
        None if begins is None else True,
    )


@pytest.mark.parametrize(
    ("culprit", "call", "skipped"), [(2, 4, True), (2, 2, False), (1, 4, True), (5, 4, True), (6, 4, False)]
)
def test_a_round_is_skipped_by_a_condition_above_the_call(culprit: int, call: int, skipped: bool) -> None:
    """The culprit must be in the loop, its first and last line included, and the condition above the others' call."""
    text = "for i in rows:\n    a()\n    if i.bad: continue\n    b()\n    c()\nd()"
    sides = Sides((at(culprit),), (at(call),), "all_reduce")
    assert (loops.skipped_round(ProgramText({FILE: text}), sides) is not None) is skipped


# --- blocks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("test", "changes"),
    [
        ("flag", False),
        ("ready()", True),
        ("state.ready", True),
        ("flags[0]", True),
        ("item", True),
        ("count", True),
        ("given", True),
        ("rank == 0", False),
        ("get_rank() == 0", False),
        ("rank == 0 and item", True),
    ],
)
def test_a_condition_may_change_from_round_to_round(test: str, changes: bool) -> None:
    """It calls something, reads a parameter or what the loop assigns; the rank stays what it is."""
    text = f"def f(given):\n    for item in rows:\n        count += 1\n        if {test}:\n            g()"
    assert blocks._changes(ProgramText({FILE: text}), at(5), expression(test)) is changes


RETURNS = """\
def f(x):
    if x.bad:
        return
    if quiet:
        pass
    else:
        return
    if late: return
    for y in x:
        if y: return
        dist.all_reduce(y)
    if after: return
dist.barrier()
"""


@pytest.mark.parametrize(
    ("line", "called", "expected"),
    [(11, False, [10, 8, 4, 2]), (11, True, [10, 2]), (8, False, [4, 2]), (13, False, []), (2, False, [])],
)
def test_conditions_by_which_a_function_returns_before_a_line(line: int, called: bool, expected: list[int]) -> None:
    """The nearest first; one that may return in no other round than this line was reached in is left out."""
    frame = at(line)
    lines = frozenset({(FILE, line)}) if called else frozenset()
    decisions = list(blocks._early_returns(ProgramText({FILE: RETURNS}), frame, lines))
    assert [d.site.line for d in decisions] == expected
    assert all(d.leaves for d in decisions)


@pytest.mark.parametrize(
    ("functions", "num_frames"), [(["f", "g"], 2), (["f", "<module>", "main"], 2), (["<module>"], 1), ([], 0)]
)
def test_frames_end_with_the_module_of_the_program(functions: list[str], num_frames: int) -> None:
    """What started the program is no part of it."""
    frames = [Site(FILE, 1, function) for function in functions]
    assert blocks._of_program(frames) == frames[:num_frames]


GUARDS = """\
for i in rows:
    if flag:
        dist.all_reduce(x)
    else:
        dist.broadcast(x)
    if item.ready:
        dist.barrier()
if last:
    dist.barrier()
"""


@pytest.mark.parametrize(
    ("frame", "outside", "called", "guard"),
    [
        (3, 5, False, 2),
        (5, 3, False, 2),
        (3, 7, False, 2),
        (3, 7, True, None),
        (7, 3, True, 6),
        (7, 7, False, 6),
        (9, 9, False, None),
        (9, 3, False, 8),
        (5, 1, False, 2),
    ],
)
def test_the_condition_around_a_call_that_keeps_others_out(
    frame: int, outside: int, called: bool, guard: int | None
) -> None:
    """The branch that the other line is not in. Both at one line are in other rounds of a loop, or nothing is known.
    Who has been in the branch is not kept out of it by what stays as it is."""
    lines = frozenset({(FILE, frame)}) if called else frozenset()
    sites = [Site(FILE, line, blocks.MODULE) for line in (frame, outside)]
    decision = blocks.guard_decision(ProgramText({FILE: GUARDS}), sites[:1], sites[1:], lines)
    assert (decision and decision.site.line) == guard


EARLY = """\
def f(x):
    if x.bad:
        return
    x.work()
    dist.all_reduce(x)
f(x)
dist.barrier()
"""


@pytest.mark.parametrize(("outside", "guard"), [(4, None), (6, 2), (7, 2), (5, None)])
def test_a_condition_by_which_others_have_left_the_function(outside: int, guard: int | None) -> None:
    """Not where they are in it."""
    frame = Site(FILE, 5, "f")
    decision = blocks.guard_decision(ProgramText({FILE: EARLY}), [frame], [Site(FILE, outside, "f")])
    assert (decision and decision.site.line) == guard


@pytest.mark.parametrize(
    ("headers", "also"), [([], False), ([2], False), ([3], False), ([2, 3], False), ([7], True), ([3, 7], True)]
)
def test_a_condition_and_the_header_of_its_loop(headers: list[int], also: bool) -> None:
    """Both are told if the header has a line of its own; of several conditions two are."""
    decisions = [Decision(at(line), f"c{line}", frozenset({f"c{line}"}), leaves=line == 2) for line in (2, 3, 4)]
    header = Cause("Give the loop one length.", lines=tuple(at(line) for line in headers)) if headers else None
    cause = loops._by_decision(decisions, header)
    assert cause.suggestion.startswith("Agree on `c2` before any rank leaves the loop")
    assert "`c3`" in cause.suggestion
    assert "`c4`" not in cause.suggestion
    assert cause.suggestion.endswith("If it is not: give the loop one length.") is also
    assert [site.line for site in cause.lines] == [2, 3, *(headers if also else [])]


@pytest.mark.parametrize(("line", "inside"), [(1, False), (2, True), (3, True), (4, False)])
def test_the_lines_of_a_block(line: int, inside: bool) -> None:
    """From its first to its last."""
    block = ast.parse("if a:\n    b()\n    c()\nd()").body[0]
    assert isinstance(block, ast.If)
    assert blocks._holds(block.body, line) is inside
    assert not blocks._holds([], line)


def test_the_deepest_chains_are_bounded() -> None:
    """A function that calls itself ends the search."""
    text = "def f():\n    return f()\nuse(f())"
    value = expression("f()")
    assert find_cause._origin(ProgramText({FILE: text}), at(3), value, find_cause.DEEPEST) is None
    assert not loops._is_a(ProgramText({FILE: text}), at(3), value, ast.Dict, loops.DICTS)
    assert program_text._through_assignments(frozenset("a"), ast.parse("a = a")) == {"a"}
