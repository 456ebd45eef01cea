"""What one rank's row of calls makes of another: left out, added, in another order, or one call that differs."""

from __future__ import annotations

from typing import Any

import pytest

from distsim.debug.diagnosis.diagnose import diagnose
from distsim.debug.divergence import divergence as rules
from distsim.debug.divergence import find
from distsim.debug.divergence.source_order import Order, Relation
from distsim.debug.matching.agreement import Mismatch, check_meeting
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


# --- what the program's text says ----------------------------------------------------------------------

ROUND = [
    # which of the calls is made in every round of their common loop; in which loops; under a condition -> kind
    ({"theirs_each_round": True, "still_in_loop": True}, ROUNDS, "it goes round more often"),
    ({"theirs_each_round": True, "my_guard": 3}, EXTRA, "theirs is made anyway, and mine on a condition"),
    ({"theirs_each_round": True}, None, "both without a condition: nothing is known"),
    ({"theirs_each_round": True, "mine_each_round": True, "still_in_loop": True}, None, "both in every round"),
    ({"mine_each_round": True, "left_loop": True}, ROUNDS, "they go round more often"),
    ({"mine_each_round": True}, None, "theirs is not in an inner loop"),
    ({"mine_each_round": True, "my_guard": 3}, None, "what is made in every round has no condition"),
    ({"left_loop": True, "still_in_loop": True, "my_guard": 3}, None, "neither in every round"),
    ({"mine_each_round": True, "theirs_each_round": True, "left_loop": True}, None, "both in every round"),
]


@pytest.mark.parametrize(("fields", "kind", "reason"), ROUND)
def test_one_call_is_made_in_every_round(fields: dict[str, Any], kind: Kind | None, reason: str) -> None:
    """Who is at the other call has not left it out."""
    assert find._by_round(Relation(Order.AFTER, **fields)) is kind, reason


NEITHER, MINE, THEIRS, BOTH = "", "m", "t", "mt"
AFTER, BEFORE, APART = Order.AFTER, Order.BEFORE, Order.EXCLUSIVE
TEXT = [
    # order of the lines, which call the other rank has made before, what else is known -> kind
    (AFTER, NEITHER, {}, MISSING, "mine is behind theirs, which it passed"),
    (BEFORE, NEITHER, {}, None, "it has not come to theirs"),
    (AFTER, NEITHER, {"mine_for_some": True}, EXTRA, "mine is for some ranks"),
    (AFTER, NEITHER, {"mine_for_some": True, "theirs_for_some": True}, MISSING, "both are for some ranks"),
    (AFTER, THEIRS, {"left_loop": True}, ROUNDS, "it made theirs, and has left the loop of it"),
    (AFTER, THEIRS, {"certain": False}, ROUNDS, "by line numbers alone that is as likely"),
    (AFTER, THEIRS, {}, MISSING, "theirs is in no loop: it was passed this time"),
    (AFTER, BOTH, {"left_loop": True}, MISSING, "they have made mine as well"),
    (AFTER, NEITHER, {"left_loop": True}, MISSING, "it never made theirs"),
    (BEFORE, THEIRS, {"left_loop": True}, None, "mine comes first"),
    (BEFORE, MINE, {"still_in_loop": True}, ROUNDS, "they made mine, and it goes round once more"),
    (BEFORE, MINE, {"certain": False}, ROUNDS, "by line numbers alone that is as likely"),
    (BEFORE, MINE, {}, MISSING, "it is in the next round already"),
    (BEFORE, BOTH, {"still_in_loop": True}, MISSING, "it has made theirs as well"),
    (AFTER, MINE, {"still_in_loop": True}, MISSING, "mine comes last"),
    (AFTER, NEITHER, {"certain": False}, None, "line numbers alone say nothing"),
    (BEFORE, NEITHER, {"my_guard": 3}, EXTRA, "mine is on a condition"),
    (BEFORE, MINE, {"my_guard": 3}, EXTRA, "also where they made it before"),
    (AFTER, THEIRS, {"passed": True, "my_guard": 3}, EXTRA, "it made theirs in this round; they are in the next"),
    (AFTER, THEIRS, {"passed": True}, MISSING, "mine is on no condition"),
    (AFTER, THEIRS, {"my_guard": 3}, MISSING, "theirs is on a condition, too"),
    (AFTER, BOTH, {"passed": True, "my_guard": 3}, MISSING, "they have made mine as well"),
    (AFTER, NEITHER, {"passed": True, "my_guard": 3}, MISSING, "it never made theirs"),
    (APART, NEITHER, {"swapped": True}, ORDER, "two branches with both calls, in two orders"),
    (APART, NEITHER, {}, None, "two branches with one call each"),
    (Order.SAME, NEITHER, {"my_guard": 3}, None, "one line"),
]


@pytest.mark.parametrize(("order", "made", "fields", "kind", "reason"), TEXT)
def test_what_the_text_says_of_two_calls(
    order: Order, made: str, fields: dict[str, Any], kind: Kind | None, reason: str
) -> None:
    """Without any later call. Rank 0 is at `c`, rank 1 at `b`; each may have made the other's call before."""
    mine, theirs = calls("xc")[1], calls("xb", rank=1)[1]
    mine.seq = theirs.seq = 2
    log = GroupCalls(0, mine.group, calls={0: [*calls("b" if THEIRS in made else "x"), mine]})
    log.calls[1] = [*calls("c" if MINE in made else "x", rank=1), theirs]
    assert find._by_text(log, mine, theirs, Relation(order, **fields)) is kind, reason


BEFORE_NOW = [
    ("b", "b", True, "at that line"),
    ("B", "b", False, "at another line"),
    ("", "b", False, "no call"),
    ("d", "b", False, "another operation"),
]


@pytest.mark.parametrize(("past", "letter", "called", "reason"), BEFORE_NOW)
def test_a_call_that_a_rank_has_made_before(past: str, letter: str, called: bool, reason: str) -> None:
    """By operation and line, and before the call of that number."""
    record = calls(f"x{letter}")[1]
    record.seq = 2
    log = GroupCalls(0, record.group, calls={0: calls(past)})
    assert find._called_before(log, record, 0) is called, reason
    assert find._called_before(log, record, 1) is False, "a rank without calls"
    record.seq = 1
    assert find._called_before(log, record, 0) is False, "at the same time is not before"
    record.site, record.seq = None, 2
    assert find._called_before(log, record, 0) is False, "a line that is not known"


@pytest.mark.parametrize(
    ("letters", "threads", "raced"),
    [
        ("ab", ("MainThread", "worker"), True),
        ("aa", ("MainThread", "worker"), False),
        ("ab", ("MainThread", "MainThread"), False),
        ("ab", ("worker-0", "worker-12"), False),
        ("ab", ("Thread-1 (load)", "Thread-2 (save)"), True),
    ],
)
def test_calls_of_two_threads(letters: str, threads: tuple[str, str], raced: bool) -> None:
    """At two lines; threads of one part of the program differ in a number alone."""
    mine, other = (calls(letter, threads=threads[:1])[0] for letter in letters)
    mine.thread, other.thread = threads
    assert find._from_two_threads(mine, other) is raced


CREATORS = [
    # operation of each rank -> culprits, others
    ("nna", (2,), (0, 1), "the one that does not create"),
    ("naa", (1, 2), (0,), "however many they are"),
    ("aan", (0, 1), (2,), "or of which rank"),
    ("nnn", (1,), (0, 2), "all create: as the vote has it"),
]


@pytest.mark.parametrize(("ops", "culprits", "others", "reason"), CREATORS)
def test_who_did_not_create_a_group(ops: str, culprits: tuple[int, ...], others: tuple[int, ...], reason: str) -> None:
    """Where new_group met another call."""
    made = {rank: calls("a")[0] for rank in range(len(ops))}
    for rank, letter in enumerate(ops):
        made[rank].rank, made[rank].op = rank, "new_group" if letter == "n" else "all_reduce"
    mismatch = Mismatch(ONE, made[0].group, 1, (1,), (0, 2), "", {}, False, made)
    assert find._creators(mismatch) == (culprits, others), reason


UNEVEN: list[tuple[str, dict[str, Any], bool, str]] = [
    ("all_to_all_single", {"input_splits": (2, 2), "output_splits": (2, 2)}, False, "equal splits"),
    ("all_to_all_single", {"input_splits": (1, 3), "output_splits": (2, 2)}, True, "input splits"),
    ("all_to_all_single", {"input_splits": (2, 2), "output_splits": (1, 3)}, True, "output splits"),
    ("all_to_all", {}, False, "none"),
    ("all_gather", {"input_shapes": ((4,),), "output_shapes": ((4,), (4,))}, False, "equal tensors"),
    ("all_gather", {"input_shapes": ((4,),), "output_shapes": ((4,), (5,))}, True, "an output of its own size"),
    ("reduce_scatter", {"input_shapes": ((4,), (4,)), "output_shapes": ((5,),)}, True, "an output of another size"),
    ("all_gather_into_tensor", {"input_shapes": ((4,),), "output_shapes": ((8,),)}, False, "another operation"),
]


@pytest.mark.parametrize(("op", "shares", "is_uneven", "reason"), UNEVEN)
def test_calls_whose_equal_arguments_are_not_enough(
    op: str, shares: dict[str, Any], is_uneven: bool, reason: str
) -> None:
    """A call with a share for each rank, if the shares have several sizes."""
    equal = [CallRecord(rank, calls("a")[0].group, 1, op, **shares) for rank in (0, 1)]
    assert (check_meeting(equal) is not None) is is_uneven, reason
