"""What one rank's row of calls makes of another: left out, added, in another order, or one call that differs."""

from __future__ import annotations

import pytest

from distsim.debug.diagnosis.diagnose import diagnose
from distsim.debug.divergence import divergence as rules
from distsim.debug.matching.index import GroupCalls
from distsim.debug.records import CallRecord
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
        ("accad", "acad", EXTRA, 3),
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


# --- the rules by themselves ---------------------------------------------------------------------------


def calls(letters: str, rank: int = 0, threads: str = "") -> list[CallRecord]:
    """Records of a rank's calls, the nth by the thread of the nth letter of *threads*."""
    evidence = play(2, lambda _: [step(letter, "MainThread") for letter in letters], silent=True)
    for record, thread in zip(evidence.records[rank], threads, strict=False):
        record.thread = thread
    return evidence.records[rank]


@pytest.mark.parametrize(
    ("a", "b", "likeness"), [("a", "a", 2), ("a", "A", 1), ("a", "b", 0), ("c", "C", 1), ("b", "d", 0)]
)
def test_likeness_of_two_calls(a: str, b: str, likeness: int) -> None:
    """The operation and its arguments, and then the line."""
    assert rules.likeness(calls(a)[0], calls(b)[0]) == likeness


@pytest.mark.parametrize(
    ("own", "others", "least", "support"),
    [
        ("abc", "abc", 1, 6),
        ("abc", "abC", 1, 5),
        ("abc", "abC", 2, None),
        ("abc", "abd", 1, None),
        ("ab", "abd", 1, 4),
        ("", "abd", 1, 0),
        ("a" * 12 + "b", "a" * 12 + "c", 1, 24),
        ("a" * 11 + "b", "a" * 11 + "c", 1, None),
    ],
)
def test_support_is_what_the_next_twelve_calls_agree_in(own: str, others: str, least: int, support: int | None) -> None:
    """Two for a call at the same line, one for the same call elsewhere; nothing where one contradicts."""
    assert rules.support(calls(own), calls(others), least, exact=False) == support


@pytest.mark.parametrize(
    ("own", "others", "least", "support"),
    [
        ("ba", "ab", 1, 4),
        ("BA", "ab", 1, 2),
        ("BA", "ab", 2, None),
        ("bac", "abc", 1, 6),
        ("cab", "abc", 1, 6),
        ("bac", "abd", 1, None),
        ("ab", "ab", 1, None),
        ("bacdexyb", "abcdexyc", 1, None),
        ("bcdexyaa", "abcdexya", 1, 16),
        ("b", "a", 1, None),
    ],
)
def test_support_of_another_order(own: str, others: str, least: int, support: int | None) -> None:
    """The shortest stretch that has the same calls, what its lines share, and the calls after it."""
    assert rules.permuted(calls(own), calls(others), least) == support


@pytest.mark.parametrize(
    ("own", "others", "least", "best"),
    [
        ("bc", "abc", 1, [(4, MISSING), (0, ONE)]),
        ("abc", "bc", 1, [(4, EXTRA), (0, ONE)]),
        ("bcd", "acd", 1, [(4, ONE)]),
        ("bcd", "acd", 2, []),
        ("BC", "abc", 1, [(2, MISSING), (0, ONE)]),
        ("BC", "abc", 2, []),
        ("d", "abcd", 1, [(2, MISSING), (0, ONE)]),
        ("e", "abcde", 1, [(0, ONE)]),
        ("abcd", "d", 1, [(2, EXTRA), (0, ONE)]),
        ("ba", "ab", 1, [(4, ORDER), (2, MISSING), (2, EXTRA), (0, ONE)]),
        ("a", "b", 1, [(0, ONE)]),
    ],
)
def test_explanations_are_sorted_by_their_support(
    own: str, others: str, least: int, best: list[tuple[int, Kind]]
) -> None:
    """Up to three calls too few or too many."""
    assert rules.hypotheses(calls(own), calls(others), least) == best


@pytest.mark.parametrize(
    ("letters", "seq", "ahead"),
    [
        ("abab", 3, "ab"),
        ("ababa", 5, "aba"),
        ("abcab", 5, "bcab"),
        ("abcdab", 5, "abcdab"),
        ("abc", 1, "abc"),
        ("abc", 4, ""),
        ("abxabyab", 7, "abyab"),
        ("xababyab", 7, "abyab"),
        ("a" * 6, 6, "aaa"),
    ],
)
def test_what_followed_a_call_before_will_follow_it_again(letters: str, seq: int, ahead: str) -> None:
    """After the place in the past that has most of the same calls before it."""
    records = calls(letters)
    log = GroupCalls(0, records[0].group, calls={0: records})
    lines = {letter: calls(letter)[0].site for letter in OPS}
    expected = [lines[letter] for letter in ahead]
    assert [record.site for record in rules.ahead_of(log, 0, seq)] == expected
    assert [record.site for record in rules.calls_from(log, 0, seq)] == [lines[letter] for letter in letters[seq - 1 :]]


@pytest.mark.parametrize(
    ("own", "others", "raced"),
    [
        (("ab", "tu"), ("ba", "ut"), True),
        (("ab", "tt"), ("ba", "tt"), False),
        (("abc", "tut"), ("bac", "utt"), True),
        (("abc", "tut"), ("bca", "utt"), False),
        (("abx", "tut"), ("bay", "utt"), False),
        (("abx", "tut"), ("ba", "ut"), True),
        (("ab", "tu"), ("bay", "utt"), True),
        (("ab" + "c" * 10 + "x", "tu" + "t" * 11), ("ba" + "c" * 10 + "y", "ut" + "t" * 11), True),
    ],
)
@pytest.mark.parametrize("by_site", [False, True])
def test_threads_that_raced_keep_each_its_own_order(
    own: tuple[str, str], others: tuple[str, str], raced: bool, by_site: bool
) -> None:
    """Of the calls that both have made, twelve at most."""
    mine, other_calls = (calls(letters, threads=threads) for letters, threads in (own, others))
    assert rules.threads_raced(mine, other_calls, by_site=by_site) is raced
