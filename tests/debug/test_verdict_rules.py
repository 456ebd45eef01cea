"""What verdicts say, since when, and which ranks they pass over: each on the fewest records."""

from __future__ import annotations

from typing import Any

import pytest

from distsim.debug.diagnosis import absence, explain
from distsim.debug.diagnosis import contradiction as contradictions
from distsim.debug.diagnosis.contradiction import contradiction
from distsim.debug.diagnosis.deadlock import knot
from distsim.debug.diagnosis.diagnose import diagnose
from distsim.debug.diagnosis.point_to_point import disagreeing, disagreement, unmatched
from distsim.debug.divergence.find import find_divergences
from distsim.debug.records import CallRecord, CallWait, Evidence, Group, Phase, RankState, Site, State
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.records.kinds import Kind
from tests.debug.builders import (
    Step,
    all_reduce,
    barrier,
    coll,
    fail,
    finish,
    group,
    host,
    leave,
    play,
    recv,
    run,
    send,
    spin,
    store,
)
from tests.debug.test_case_rules import case_of

pytestmark = pytest.mark.smoke

NOW_S = 100.0
LATE = "RuntimeError: Timed out waiting 1000ms for recv operation to complete"
CLOSED = "RuntimeError: Connection closed by peer [127.0.0.1]:16811"


def at_times(evidence: Evidence, *issued_s: float) -> Evidence:
    """The last call of each rank was made at these times."""
    for rank, at_s in enumerate(issued_s):
        evidence.records[rank][-1].issued_s = at_s
    evidence.now_s = NOW_S
    return evidence


# --- since when


@pytest.mark.parametrize("issued_s", [(10.0, 40.0), (40.0, 10.0)])
def test_a_contradiction_is_as_old_as_its_later_call(issued_s: tuple[float, float]) -> None:
    """Before that nothing contradicted anything: between calls, groups, and the ends of a message."""
    calls = at_times(play(2, lambda r: [coll("broadcast", 10, root=r)]), *issued_s)
    case = case_of(calls)
    (divergence,) = find_divergences(case.index, case.index.group_logs[0])
    assert contradiction(case, divergence, ()).detected_after_s == 60.0
    case = case_of(at_times(play(2, {0: [send(1, 5)], 1: [recv(0, 6, shape=(9,))]}), *issued_s))
    (pair,) = disagreeing(case.index)
    assert disagreement(case, pair, ()).detected_after_s == 60.0
    case = case_of(at_times(play(2, lambda r: [all_reduce(5 + r, group(r, name=str(r)))]), *issued_s))
    mine, other = (case.index.records(rank)[0] for rank in (0, 1))
    assert absence.group_mismatch(case, mine, other, [0], [1], []).detected_after_s == 60.0


def test_a_circle_is_as_old_as_its_last_call() -> None:
    """It had not closed before."""
    one, two = group(0, 1, name="1"), group(0, 1, name="2")
    evidence = at_times(play(2, {0: [all_reduce(5, one)], 1: [all_reduce(6, two)]}), 40.0, 10.0)
    found = knot(case_of(evidence), [0, 1], [])
    assert (found.kind, found.detected_after_s, found.cycle) == (Kind.DEADLOCK_CYCLE, 60.0, (0, 1))


def test_a_long_circle_is_told_in_short() -> None:
    """Six steps: the first five, how many are left out, and the last."""
    for size, more in ((6, None), (7, 1), (9, 3)):
        evidence = play(size, lambda r, size=size: [send((r + 1) % size, 5 + r)])
        found = knot(case_of(evidence), list(range(size)), [])
        assert found.explanation.count("waits in") == 6
        assert (f"and so on over {more} more ranks" in found.explanation) is (more is not None)


# --- ranks that wait for each other

A, B = group(0, 1, name="1"), group(0, 1, name="2")
LEFT = "if x:\n    all_reduce(small)\nelse:\n    all_reduce(large)\n"


@pytest.mark.parametrize(
    ("past", "kind", "culprits"),
    [((A,), Kind.GROUP_MISMATCH, (0,)), ((A, B), Kind.DEADLOCK_CYCLE, (0, 1)), ((B,), Kind.GROUP_MISMATCH, (1,)),
     ((), Kind.DEADLOCK_CYCLE, (0, 1))],
)  # fmt: skip
def test_a_rank_on_a_group_that_it_never_used_there(
    past: tuple[Group, ...], kind: Kind, culprits: tuple[int, ...]
) -> None:
    """Is the culprit if it is awaited on its usual one; by other habits the two wait in a circle."""
    evidence = play(2, lambda r: [*(all_reduce(5, one) for one in past), all_reduce(5, B if r == 0 else A)])
    found = knot(case_of(evidence), [0, 1], [])
    assert (found.kind, found.culprits) == (kind, culprits)


@pytest.mark.parametrize(
    ("op", "few", "many", "lines", "kind", "culprits"),
    [
        ("all_reduce", (0, 1), (0, 1, 2, 3), (5, 5), Kind.GROUP_MISMATCH, (0,)),
        ("all_reduce", (0, 1), (0, 1, 2, 3), (2, 4), Kind.GROUP_MISMATCH, (0,)),
        ("all_reduce", (0, 1), (0, 1, 2, 3), (2, 5), Kind.DEADLOCK_CYCLE, (0, 1)),
        ("barrier", (0, 1), (0, 1, 2, 3), (5, 5), Kind.DEADLOCK_CYCLE, (0, 1)),
        ("all_reduce", (0, 1), (1, 2, 3), (5, 5), Kind.DEADLOCK_CYCLE, (0, 1)),
    ],
)
def test_one_call_on_a_group_and_on_a_part_of_it(
    op: str, few: tuple[int, ...], many: tuple[int, ...], lines: tuple[int, int], kind: Kind, culprits: tuple[int, ...]
) -> None:
    """At one line or in two branches; the smaller side is at fault."""
    small, large = group(*few, name="s"), group(*many, name="l")
    steps = {r: [coll(op, lines[1], large, function="<module>")] for r in range(1, 4)}
    steps[0] = [all_reduce(lines[0], small, function="<module>")]
    if 0 not in many:
        steps[2] = [all_reduce(lines[1], group(0, 2, name="m"), function="<module>")]
    found = knot(case_of(play(4, steps, sources={"train.py": LEFT})), [0, 1, 2, 3], [])
    assert found.kind is kind
    assert found.culprits == culprits or (0 not in many and set(culprits) < set(found.culprits))


@pytest.mark.parametrize(("members", "kind"), [((0, 1), Kind.P2P_UNMATCHED), ((1, 2), Kind.DEADLOCK_CYCLE)])
def test_a_message_whose_other_end_is_in_a_collective(members: tuple[int, ...], kind: Kind) -> None:
    """Of this rank, too: then the message is one too many. Else the collective waits for somebody else first."""
    steps = {0: [recv(1, 5)], 1: [all_reduce(6, group(*members, name="1"))], 2: [all_reduce(7, group(0, 2, name="2"))]}
    found = knot(case_of(play(3, steps)), [0, 1] if members == (0, 1) else [0, 1, 2], [])
    assert found.kind is kind


# --- what is said of ranks that never came


@pytest.mark.parametrize(
    ("waiting", "size", "even"), [(2, 4, True), (3, 4, False), (3, 6, True), (1, 2, True), (2, 3, False)]
)
def test_a_group_that_is_split_evenly(waiting: int, size: int, even: bool) -> None:
    """Then the other ranks may also have made a call too many."""
    d = diagnose(play(size, lambda r: [all_reduce(11)] if r < waiting else [finish()]))[0]
    assert d.kind is Kind.MISSING_RANK
    assert ("The group is split evenly: the other ranks may" in d.explanation) is even


@pytest.mark.parametrize(
    ("errors", "longer"), [((LATE, CLOSED), True), ((CLOSED, CLOSED), False), ((LATE, LATE), True)]
)
def test_a_longer_timeout_is_advised_if_one_was_over(errors: tuple[str, ...], longer: bool) -> None:
    """For a rank that still runs."""
    evidence = play(3, lambda r: [run(9)] if r == 2 else [all_reduce(11)])
    evidence.hang_after_s = 0.0
    for rank, words in enumerate(errors):
        call, state = evidence.records[rank][-1], evidence.ranks[rank]
        call.state, call.error = State.FAILED, words
        state.phase, state.waits, state.exception = Phase.RAISED, (), words
    (d,) = diagnose(evidence)
    assert (d.kind, d.culprits) == (Kind.MISSING_RANK, (2,))
    assert ("longer timeout= (it was 1 s)" in d.suggestion) is longer


@pytest.mark.parametrize(
    ("phase", "facts", "is_over"),
    [
        (Phase.FINISHED, {}, True),
        (Phase.RUNNING, {}, False),
        (Phase.RUNNING, {"leaving": True}, True),
        (Phase.KILLED, {}, False),
        (Phase.KILLED, {"over": True}, True),
        (Phase.BLOCKED, {"leaving": True}, False),
    ],
)
def test_a_program_that_has_ended(phase: Phase, facts: dict[str, Any], is_over: bool) -> None:
    """Even if its process exists."""
    case = case_of(Evidence(1, {0: RankState(0, phase, **facts)}, {}, now_s=1.0))
    assert case.is_over(0) is is_over


def test_rounds_that_were_passed_over() -> None:
    """A line of the loop that came twice without the call: by that the call was left out."""
    text = "for step in range(9):\n    barrier()\n    all_reduce()\n    if x:\n        broadcast()\n"
    lines = {"b": barrier(2, function="<module>"), "a": all_reduce(3, function="<module>")}
    for calls, passed in (("bababa", 0), ("babba", 1), ("bbba", 2), ("babb", 1), ("ba", 0), ("bbabb", 2)):
        evidence = play(1, {0: [lines[letter] for letter in calls]}, sources={"train.py": text})
        case = case_of(evidence)
        call = next(record for record in case.index.records(0) if record.op == "all_reduce")
        assert absence._passed_by(case, 0, call) == passed, calls
    alone = case_of(play(1, {0: [lines[letter] for letter in "bba"]}, sources={"train.py": "f()\nbarrier()\n\n"}))
    assert absence._passed_by(alone, 0, alone.index.records(0)[2]) == 0


# --- messages


WORDS: list[tuple[str, list[Step], list[Step], str]] = [
    ("another tag", [recv(1, 5)], [send(0, 6, tag=7)], "Rank 1 sends to rank 0 with tag 7, not 0, at train.py:6."),
    ("tag 0", [recv(1, 5, tag=7)], [send(0, 6)], "Rank 1 sends to rank 0 with tag 0, not 7, at train.py:6."),
    ("another rank", [recv(1, 5)], [send(2, 6)], "Rank 1 sends to rank 2, at train.py:6."),
    ("the receiver tells it", [send(1, 5)], [recv(0, 6, tag=7)],
     "Rank 1 waits in recv from rank 0 (tag 7), at train.py:6. Rank 0 sends to rank 1 with tag 0, not 7, at "
     "train.py:5."),
    ("from any", [send(1, 5)], [recv(None, 6, tag=7)],
     "Rank 1 never received it: it waits in recv from any rank (tag 7), at train.py:6."),
    ("nothing", [recv(1, 5)], [run(6)], "Rank 1 never sent it: it is at train.py:6 in main, for 0.5 s."),
    ("nothing received", [send(1, 5)], [run(6)], "Rank 1 never received it: it is at train.py:6 in main, for 0.5 s."),
]  # fmt: skip


@pytest.mark.parametrize(("law", "mine", "other", "text"), WORDS, ids=[row[0] for row in WORDS])
def test_what_is_said_of_a_lonely_message(law: str, mine: list[Step], other: list[Step], text: str) -> None:
    """The nearest other end, and in what it differs."""
    case = case_of(play(3, {0: mine, 1: other, 2: [run(9)]}))
    call = case.index.call_waits(0)[0]
    d = unmatched(case, call, [0])
    assert d.explanation.endswith(text)


def test_a_send_that_has_ended_was_sent() -> None:
    """A small message is under way before its receive is there."""
    case = case_of(play(3, {0: [recv(1, 5)], 1: [send(0, 6, tag=7, is_async=True), run(7)], 2: [run(9)]}))
    case.index.records(1)[0].state = State.COMPLETED
    assert "Rank 1 sent to rank 0 with tag 7" in unmatched(case, case.index.call_waits(0)[0], [0]).explanation


# --- which verdicts are left out


def test_swapped_groups_are_one_group_mismatch() -> None:
    """Of the same ranks; other kinds stay."""
    kinds = [Kind.GROUP_MISMATCH, Kind.OP_MISMATCH, Kind.GROUP_MISMATCH, Kind.GROUP_MISMATCH, Kind.OP_MISMATCH]
    culprits = [(0,), (0,), (0,), (1,), (0,)]
    every = [Diagnosis(kind, ranks, ()) for kind, ranks in zip(kinds, culprits, strict=True)]
    assert explain._one_group_mismatch(every) == [every[n] for n in (0, 1, 3, 4)]


@pytest.mark.parametrize(
    ("codes", "calls", "size", "refused"),
    [((2, 2), False, 2, True), ((2, 3), False, 2, False), ((2, 2), True, 2, False), ((2, 2), False, 3, False),
     ((2, 0), False, 2, False)],
)  # fmt: skip
def test_a_program_that_refused_to_begin(codes: tuple[int, ...], calls: bool, size: int, refused: bool) -> None:
    """All ranks exited with one code before any call: it has told why."""
    evidence = play(2, lambda r: [*([all_reduce(4)] if calls else []), leave(codes[r], 5) if codes[r] else finish()])
    evidence.world_size = size
    case = case_of(evidence)
    if size > 2:
        del case.index.states[2]
    assert explain._refused_to_begin(case) is refused


def test_ranks_that_were_not_run_refused_nothing() -> None:
    """Those that ran are all that there is."""
    evidence = play(3, lambda r: [leave(2, 5)])
    evidence.not_run = frozenset({2})
    evidence.ranks = {rank: evidence.ranks[rank] for rank in (0, 1)}
    assert explain._refused_to_begin(case_of(evidence))


@pytest.mark.parametrize(
    ("step", "kind"),
    [(spin(9), Kind.HOST_STUCK), (host("a lock", 9), Kind.HOST_STUCK), (store("key", 9), Kind.MISSING_RANK)],
)
def test_what_keeps_a_rank_from_a_call(step: Step, kind: Kind) -> None:
    """Its host, or a key, for which it is missing from the call."""
    (d,) = diagnose(play(3, lambda r: [step] if r == 0 else [all_reduce(11)], hang_after_s=0.0))
    assert (d.kind, d.culprits, d.victims) == (kind, (0,), (1, 2))


def test_the_last_word_of_a_simulation() -> None:
    """Where nothing moves and nothing explains it, the first rank that is blocked is named with its message or host."""
    evidence = play(2, {0: [send(1, 5)], 1: [recv(0, 6)]})
    for rank, calls in evidence.records.items():
        calls[-1].state = State.STARTED
        evidence.ranks[rank] = RankState(rank, Phase.BLOCKED, (CallWait(calls[-1]),))
    assert diagnose(evidence) == []
    (last,) = diagnose(evidence, nothing_moves=True)
    assert (last.kind, last.culprits, last.victims) == (Kind.HOST_STUCK, (0,), (1,))


@pytest.mark.parametrize(
    ("own", "others", "named"),
    [("ValueError: x", None, (0,)), ("ValueError: x", "ValueError: x", (0, 1)), (CLOSED, None, (0,))],
)
def test_ranks_that_raised_alike_are_one_diagnosis(own: str, others: str | None, named: tuple[int, ...]) -> None:
    """Though nobody waits for them."""
    evidence = play(3, lambda r: [fail(own, 5)] if r == 0 else [fail(others, 5)] if others and r == 1 else [finish()])
    assert [d.culprits for d in diagnose(evidence) if d.kind is Kind.RANK_RAISED] == [named]


@pytest.mark.parametrize(
    ("waiting", "over", "kind"), [(1, 4, Kind.EXTRA_COLLECTIVE), (1, 3, Kind.MISSING_RANK), (3, 2, Kind.MISSING_RANK)]
)
def test_few_that_wait_for_ranks_that_have_ended(waiting: int, over: int, kind: Kind) -> None:
    """Have made a call too many, if all of the others have ended: one that runs may still come."""
    evidence = play(5, lambda r: [all_reduce(11)] if r < waiting else [finish() if r < waiting + over else run(9)])
    evidence.hang_after_s = 0.0
    assert diagnose(evidence)[0].kind is kind


def test_only_who_never_joined_is_told_where_the_others_meet() -> None:
    """The address of the store says nothing of a rank that left out a call."""
    evidence = play(2, lambda r: [all_reduce(11)] if r else [finish()])
    for state in evidence.ranks.values():
        state.meets_at = "a:1"
    assert "store of their rendezvous" not in diagnose(evidence)[0].explanation


@pytest.mark.parametrize(
    ("one", "other", "differ"),
    [
        ((5, 6), (5, 6), None),
        ((5, 6), (5,), None),
        ((5, 6), (5, 7), (6, 7)),
        ((4, 6), (5, 7), (4, 5)),
        ((5,), (5, 6), None),
    ],
)
def test_ways_to_one_line(one: tuple[int, ...], other: tuple[int, ...], differ: tuple[int, int] | None) -> None:
    """They part at the innermost frame that is not the same; a longer one may only have lost fewer."""

    def call(*lines: int) -> CallRecord:
        return CallRecord(0, A, 1, "barrier", stack=tuple(Site("train.py", line, "f") for line in lines))

    found = contradictions._callers(call(*one), call(*other))
    assert (found and tuple(site.line for site in found)) == differ


def by_process(kind: Kind, culprits: tuple[int, ...], **facts: Any) -> Diagnosis:
    d = Diagnosis(kind, culprits, (9,), group=group(*range(10)), explanation="E.", suggestion="S.")
    return explain._with_processes(Evidence(10, {}, {}, **facts), d)


NUMBERS = {rank: f"pid {rank} of its launcher" for rank in range(9)}


@pytest.mark.parametrize(
    ("culprits", "processes", "text"),
    [
        ((0,), {}, ""),
        ((0,), NUMBERS, " By process: rank 0 is pid 0 of its launcher."),
        ((0, 3), {3: "pid 7"}, " By process: rank 3 is pid 7."),
        ((8,), {3: "pid 7"}, ""),
    ],
)
def test_which_processes_the_culprits_are(culprits: tuple[int, ...], processes: dict[int, str], text: str) -> None:
    """Where their numbers differ outside of the program; four at most."""
    assert by_process(Kind.MISSING_RANK, culprits, processes=processes).explanation == f"E.{text}"
    many = by_process(Kind.MISSING_RANK, tuple(range(6)), processes=NUMBERS).explanation
    assert many.count("is pid") == 4


@pytest.mark.parametrize(("launched", "told"), [(0, False), (1, True), (9, True), (10, False), (12, False)])
def test_a_world_that_is_larger_than_the_launchers(launched: int, told: bool) -> None:
    """Ranks that never joined may not have been started."""
    d = by_process(Kind.NEVER_JOINED, (0,), launched=launched)
    assert ("waits for 10 ranks (world_size=10)" in d.explanation) is told
    assert d.suggestion.startswith("Take world_size from WORLD_SIZE") is told
    assert d.suggestion.endswith("S.")
    assert by_process(Kind.MISSING_RANK, (0,), launched=launched).explanation == "E."


def test_ranks_that_never_joined_and_go_on_elsewhere() -> None:
    """Have a process with another number, unless their launcher says which, or nobody has seen them."""
    one_world = "Give every rank the same world_size and address"
    assert by_process(Kind.NEVER_JOINED, (0,), processes={0: "pid 7"}).suggestion.startswith(one_world)
    assert by_process(Kind.NEVER_JOINED, (0,), processes=NUMBERS).suggestion == "S."
    assert by_process(Kind.MISSING_RANK, (0,), processes={0: "pid 7"}).suggestion == "S."
    unseen = by_process(Kind.NEVER_JOINED, (0,), processes={0: "pid 7"}, unseen=frozenset({0}))
    assert (unseen.explanation, unseen.suggestion) == ("E.", "S.")


@pytest.mark.parametrize(
    ("kind", "confused"), [(Kind.MISSING_RANK, True), (Kind.SHAPE_MISMATCH, True), (Kind.RANK_RAISED, False)]
)
def test_calls_of_two_processes_that_are_one_rank(kind: Kind, confused: bool) -> None:
    """Say nothing of the others, if one of the two is among them; what a rank raised stays."""
    doubles = ["two processes are rank 1 (pid 5, pid 6): give each its own rank"]
    d = by_process(kind, (1, 2), doubles=doubles, double_ranks={1: 1, 7: 1})
    assert (d.kind is Kind.NEVER_JOINED) is confused
    if confused:
        assert (d.culprits, d.victims) == ((1,), (2, 9))
        assert d.explanation.startswith("Two processes are rank 1 (pid 5, pid 6). Each may receive")
        assert d.suggestion == "Give each its own rank; if these are two jobs, give each an address of its own."
    assert by_process(kind, (3,), doubles=doubles, double_ranks={1: 1, 7: 1}).kind is kind
