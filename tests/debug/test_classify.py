"""What one rank's row of calls makes of another: left out, added, in another order, or one call that differs."""

from __future__ import annotations

import pytest

from distsim.debug.diagnosis.diagnose import diagnose
from distsim.debug.records.kinds import Kind
from tests.debug.builders import Step, coll, play

OPS = {
    "a": "all_reduce",
    "b": "broadcast",
    "c": "all_gather",
    "d": "reduce",
    "e": "barrier",
    "x": "reduce_scatter",
    "y": "all_to_all",
}
MISSING, EXTRA, ORDER = Kind.MISSING_RANK, Kind.EXTRA_COLLECTIVE, Kind.WRONG_ORDER
ONE, ROUNDS, RACE = Kind.OP_MISMATCH, Kind.UNEVEN_ITERATIONS, Kind.THREAD_RACE


def step(letter: str, thread: str) -> Step:
    """A call at the line of its letter; a capital is the same call at another line."""
    op = OPS[letter.lower()]
    line = 10 + list(OPS).index(letter.lower()) + 20 * letter.isupper()
    root = {"root": 0} if op in ("broadcast", "reduce") else {}
    return coll(op, line, is_async=True, thread=thread, **root)


def first(own: str, others: str, thread: str = "MainThread", size: int = 3) -> tuple[Kind, tuple[int, ...], int]:
    """Kind, culprits and number of the call of the first diagnosis where rank 1 makes the calls *own*."""

    def steps(rank: int) -> list[Step]:
        letters = own if rank == 1 else others
        return [step(letter, thread if rank == 1 and letter == own[0] else "MainThread") for letter in letters]

    found = diagnose(play(size, steps))[0]
    assert found.call is not None
    return found.kind, found.culprits, found.call.seq


@pytest.mark.parametrize(
    ("own", "others", "kind", "number"),
    [
        ("bcd", "abcd", MISSING, 1),
        ("b", "ab", MISSING, 1),
        ("ab", "xyab", MISSING, 1),
        ("BC", "abc", MISSING, 1),
        ("ababa", "abbaba", MISSING, 3),
        ("abcbc", "abcabc", MISSING, 4),
        ("ababb", "ababab", MISSING, 5),
        ("abaca", "abacbaca", MISSING, 5),
        ("accac", "aca", MISSING, 3),
        ("ababbabd", "abababab", MISSING, 5),
        ("abcd", "bcd", EXTRA, 1),
        ("xb", "b", EXTRA, 1),
        ("xya", "a", EXTRA, 1),
        ("abab", "bab", EXTRA, 1),
        ("ababab", "abaab", EXTRA, 4),
        ("abcabc", "abcbc", EXTRA, 4),
        ("acacabac", "acacac", EXTRA, 6),
        ("aabbab", "aabbb", EXTRA, 5),
        ("accacd", "acacd", EXTRA, 3),
        ("cacaacad", "cacacad", EXTRA, 5),
        ("cb", "bc", ORDER, 1),
        ("CB", "bc", ORDER, 1),
        ("cba", "abc", ORDER, 1),
        ("xcd", "bcd", ONE, 1),
        ("xc", "bc", ONE, 1),
        ("Ax", "bx", ONE, 1),
        ("aA", "ab", ONE, 2),
        ("abxab", "abab", ROUNDS, 3),
        ("ababe", "ababab", ROUNDS, 5),
        ("abcxabc", "abcabc", ROUNDS, 4),
        ("abcabc", "abcxabc", ROUNDS, 4),
        ("ababxB", "ababb", ROUNDS, 5),
    ],
)
@pytest.mark.parametrize("thread", ["MainThread", "worker"])
def test_later_calls_bear_out_what_happened_to_one(own: str, others: str, kind: Kind, number: int, thread: str) -> None:
    """One later call at the same line is enough, and then the thread of the first does not matter."""
    assert first(own, others, thread) == (kind, (1,), number)


@pytest.mark.parametrize(
    ("own", "others"), [("x", "b"), ("xB", "b"), ("B", "ab"), ("x", "bX"), ("xC", "bc"), ("A", "b")]
)
def test_without_a_later_call_at_its_line_a_call_of_another_thread_has_raced(own: str, others: str) -> None:
    """A call that agrees, and is at another line, is too little; in one thread, it is this call that differs."""
    assert first(own, others) == (ONE, (1,), 1)
    assert first(own, others, "worker") == (RACE, (1,), 1)


def test_of_two_ranks_the_one_that_used_to_make_the_call_left_it_out() -> None:
    """With a third rank, the majority is right."""
    assert first("abdabd", "abdabcd") == (MISSING, (1,), 6)
    assert first("abdabd", "abdabcd", size=2) == (EXTRA, (0,), 6)
