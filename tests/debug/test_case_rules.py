"""What a diagnosis says of ranks, how diagnoses are ordered, and how long a running rank is trusted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from distsim.debug.diagnosis import absence
from distsim.debug.diagnosis.context import Case
from distsim.debug.diagnosis.ranking import merge_findings, order
from distsim.debug.diagnosis.waits.assess_proof import Weigher, lateness, longest_waits, patience
from distsim.debug.diagnosis.waits.wait_graph import Contradictions, WaitGraph
from distsim.debug.matching.index import EvidenceIndex
from distsim.debug.records import Evidence, Phase, RankState, Site
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.records.kinds import Kind, Proof
from tests.debug.builders import all_reduce, finding, finish, group, host, killed, play, recv, run, send, store

HERE = Site("train.py", 77, "main")


def case_of(evidence: Evidence) -> Case:
    index = EvidenceIndex(evidence)
    return Case(index, WaitGraph(index, ()), [], [])


# --- numbers and texts


@pytest.mark.parametrize(
    ("n", "text"),
    [(1, "1st"), (2, "2nd"), (3, "3rd"), (4, "4th"), (10, "10th"), (11, "11th"), (12, "12th"), (13, "13th"),
     (21, "21st"), (22, "22nd"), (23, "23rd"), (101, "101st"), (111, "111th"), (1012, "1012th")],
)  # fmt: skip
def test_ordinals(n: int, text: str) -> None:
    """As in English."""
    assert absence._ordinal(n) == text


@pytest.mark.parametrize(
    ("errors", "text"),
    [
        ([], ""),
        ([None, "no number"], ""),
        (["Timed out waiting 1000ms for recv"], " (it was 1 s)"),
        (["Timeout(ms)=600000", None], " (it was 600 s)"),
        (["timeout after 1500 ms", "waiting 2000ms"], " (it was 2 s)"),
    ],
)
def test_the_limit_that_exceptions_name(errors: Sequence[str | None], text: str) -> None:
    """The largest, in seconds."""
    assert absence._limit_text(errors) == text


@pytest.mark.parametrize(
    ("line", "alone"),
    [
        ("dist.barrier()", True),
        ("barrier(); barrier()", False),
        ("my_barrier()", False),
        ("x = [barrier() for _ in y]", False),
        ("dist.all_reduce(x)", False),
    ],
)
def test_a_line_with_one_call(line: str, alone: bool) -> None:
    """Each time it runs."""
    assert absence._alone(line, "barrier") is alone


# --- where ranks are


def where(state: RankState, now_s: float = 9.0, **kw: Any) -> str:
    return case_of(Evidence(1, {0: state}, {}, now_s=now_s, **kw)).where(0)


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize(("since_s", "shown"), [(8.0, True), (8.95, False), (None, False), (8.875, True)])
def test_how_long_a_rank_is_there(phase: Phase, since_s: float | None, shown: bool) -> None:
    """From a tenth of a second on, for ranks that may move."""
    moves = phase in (Phase.FROZEN, Phase.HOST_STUCK, Phase.RUNNING)
    assert (", for " in where(RankState(0, phase, site=HERE, since_s=since_s))) is (shown and moves)


def test_what_is_known_of_a_rank_that_does_not_move() -> None:
    """That it holds the GIL, why, and that nothing is known of it."""
    assert "for 3.0 s: one call holds the GIL" in where(RankState(0, Phase.RUNNING, site=HERE, silent_s=3.0))
    assert "GIL" not in where(RankState(0, Phase.FROZEN, site=HERE, silent_s=3.0))
    assert where(RankState(0, Phase.KILLED, reason="it recurses")).endswith("; it recurses")
    assert where(RankState(0), unrecorded=frozenset({0})) == "left no record"
    assert where(RankState(0, Phase.KILLED), unrecorded=frozenset({0})) != "left no record"


def test_the_line_of_a_rank() -> None:
    """Of the call that it waits in, else its own, else of its last call if it does not run on."""
    evidence = play(2, lambda r: [all_reduce(5), *([all_reduce(6)] if r else [run()])])
    case = case_of(evidence)
    assert (case.site(0), case.sites([1, 0, 1])) == (None, {1: Site("train.py", 6, "main")})
    evidence.ranks[0].site = HERE
    evidence.ranks[1].site = HERE
    assert case_of(evidence).sites([0, 1]) == {0: HERE, 1: Site("train.py", 6, "main")}
    evidence.ranks[0] = RankState(0, Phase.KILLED)
    assert case_of(evidence).site(0) == Site("train.py", 5, "main")


def test_what_a_blocked_rank_is_stuck_in() -> None:
    """A call with its group, a store, a wait on the host, or something unknown; another rank in nothing."""
    steps = {
        0: [store("key", 3)],
        1: [host("a lock", 4)],
        2: [recv(0, 5)],
        3: [all_reduce(6)],
        4: [run(7)],
        5: [finish()],
    }
    evidence = play(6, steps)
    stuck = case_of(evidence).stuck([5, 4, 3, 2, 1, 0])
    assert {rank: (at.op, at.line) for rank, at in stuck.items()} == {
        0: ("store wait", 3),
        1: ("a lock", 4),
        2: ("recv", 5),
        3: ("all_reduce", 6),
    }
    assert [stuck[rank].group for rank in (2, 3)] == ["", "default_pg"]
    evidence.ranks[4] = RankState(4, Phase.BLOCKED)
    assert case_of(evidence).stuck([4])[4].op == "unknown"


@pytest.mark.parametrize(
    ("others", "size", "ranks", "text"),
    [
        ([Phase.RAISED, Phase.RAISED], 3, [0], "Every other rank has raised."),
        ([Phase.RAISED, Phase.RUNNING], 3, [0], "No other rank waits for it."),
        ([Phase.RAISED], 2, [0, 1], "That is every rank."),
        ([], 1, [0], ""),
        ([Phase.RUNNING, Phase.RUNNING], 3, [0, 1], "No other rank waits for them."),
    ],
)
def test_who_waits_for_nobody(others: list[Phase], size: int, ranks: list[int], text: str) -> None:
    """The other ranks have raised, go on, or there are none."""
    states = {0: RankState(0), **{rank: RankState(rank, phase) for rank, phase in enumerate(others, 1)}}
    case = case_of(Evidence(size, states, {}, now_s=1.0))
    assert case.waiting(None, ranks, []) == text


def test_ranks_that_raised_beside_another() -> None:
    """Too."""
    case = case_of(Evidence(2, {rank: RankState(rank, Phase.RAISED) for rank in (0, 1)}, {}, now_s=1.0))
    assert case.waiting(None, [0], []) == "Every other rank has raised, too."
    assert case.waiting(None, [0], [1]) == "Rank 1 waits for it."
    few = case_of(Evidence(2, {0: RankState(0)}, {}, now_s=1.0, not_run=frozenset({1})))
    assert few.waiting(None, [0], []) == "No other rank waits for it."


def test_the_address_of_a_rendezvous() -> None:
    """If all have one."""
    states = {rank: RankState(rank, meets_at=at) for rank, at in enumerate(("a:1", "a:1", "b:1", None))}
    case = case_of(Evidence(4, states, {}, now_s=1.0))
    texts = [case.store_text(ranks) for ranks in ([0, 1], [0, 2], [3], [0, 3], [])]
    assert texts == [" The store of their rendezvous is at a:1.", "", "", "", ""]


def test_the_first_wait_for_a_rank() -> None:
    """The earliest collective, whatever messages there are; else the message of the lowest rank."""
    three, four = group(0, 3, name="3"), group(0, 4, name="4")
    steps = {0: [run(9)], 1: [recv(0, 5)], 2: [recv(0, 6)], 3: [all_reduce(7, three)], 4: [all_reduce(8, four)]}
    evidence = play(5, steps)
    first = case_of(evidence).first_wait([0])
    assert first is not None
    assert (first.rank, first.op) == (3, "all_reduce")
    messages = case_of(play(3, {rank: steps[rank] for rank in (0, 1, 2)})).first_wait([0])
    assert messages is not None
    assert messages.rank == 1
    assert case_of(evidence).first_wait([4]) is None


def test_a_diagnosis_is_filled_in_from_its_ranks() -> None:
    """Ranks once, in order, culprits before victims; its age is never negative."""
    case = case_of(play(3, lambda r: [run(9)] if r == 0 else [all_reduce(11)]))
    call = case.index.call_waits(1)[0]
    common: dict[str, Any] = {"explanation": "", "suggestion": ""}
    d = case.diagnosis(Kind.MISSING_RANK, [0, 0], [2, 1, 0], call=call, since_s=0.0, **common)
    assert (d.culprits, d.victims, d.group, d.call and d.call.seq) == ((0,), (1, 2), call.group, 1)
    assert d.detected_after_s == case.index.evidence.now_s
    other = group(0, 1)
    late = case.diagnosis(Kind.MISSING_RANK, [0], [], call=None, since_s=99.0, group=other, sites={0: HERE}, **common)
    assert (late.detected_after_s, late.group, late.call, late.sites) == (0.0, other, None, {0: HERE})


# --- which diagnosis comes first


def named(kind: Kind, *culprits: int, age_s: float | None = None, victims: int = 0) -> Diagnosis:
    return Diagnosis(kind, culprits, tuple(range(1, 1 + victims)), detected_after_s=age_s)


FIRST: list[tuple[str, Diagnosis, Diagnosis]] = [
    ("an error before a warning", named(Kind.MISSING_RANK, 5), named(Kind.STRAGGLER, 0, age_s=9.0, victims=3)),
    ("a fact before a guess", named(Kind.MISSING_RANK, 5), named(Kind.MISSING_RANK, 7, age_s=9.0, victims=3)),
    ("a fault before a loss", named(Kind.MISSING_RANK, 5), named(Kind.RANK_RAISED, 2, age_s=9.0, victims=3)),
    ("an exception of its own", named(Kind.RANK_RAISED, 1, age_s=9.0), named(Kind.MISSING_RANK, 0, age_s=1.0)),
    ("what happened first", named(Kind.MISSING_RANK, 5, age_s=2.0), named(Kind.MISSING_RANK, 0, age_s=1.0, victims=3)),
    ("and what has a time", named(Kind.MISSING_RANK, 5, age_s=0.0), named(Kind.MISSING_RANK, 0, victims=3)),
    ("more victims", named(Kind.MISSING_RANK, 5, victims=2), named(Kind.MISSING_RANK, 0, victims=1)),
    ("the lower rank", named(Kind.MISSING_RANK, 4), named(Kind.MISSING_RANK, 5)),
]


@pytest.mark.parametrize(("law", "first", "second"), FIRST, ids=[row[0] for row in FIRST])
def test_the_order_of_diagnoses(law: str, first: Diagnosis, second: Diagnosis) -> None:
    """Each rule before those below it."""
    states = {rank: RankState(rank) for rank in range(20)}
    states[1] = RankState(1, Phase.RAISED, exception="ValueError: bad batch")
    states[2] = RankState(2, Phase.RAISED, exception="RuntimeError: Connection closed by peer [127.0.0.1]:1")
    index = EvidenceIndex(Evidence(20, states, {}, unrecorded=frozenset({7})))
    assert order(index, [second, first]) == order(index, [first, second]) == [first, second]


def test_a_finding_takes_the_place_of_what_it_explains() -> None:
    """With its victims; a guess that explains nothing is not told, and one of the same kind and rank is one."""
    evidence = play(3, lambda r: [run(9)] if r == 0 else [all_reduce(11)])
    missing, other = named(Kind.MISSING_RANK, 0, age_s=3.0, victims=2), named(Kind.SHAPE_MISMATCH, 1, age_s=2.0)
    evidence.findings = [finding(Kind.PROCESS_FROZEN, 0, text="it stands")]
    merged = merge_findings(case_of(evidence), [other, missing])
    assert [(d.kind, d.culprits, d.victims) for d in merged] == [
        (Kind.PROCESS_FROZEN, (0,), missing.victims),
        (Kind.SHAPE_MISMATCH, (1,), ()),
    ]
    assert merged[0].detected_after_s == 3.0
    assert merged[0].explanation.startswith("It stands.")
    evidence.findings = [finding(Kind.PROCESS_FROZEN, 2, text="it stands.", at_s=0.0)]
    unrelated = merge_findings(case_of(evidence), [missing])
    assert [d.kind for d in unrelated] == [Kind.PROCESS_FROZEN, Kind.MISSING_RANK]
    assert unrelated[0].explanation == "It stands."
    assert unrelated[0].detected_after_s == evidence.now_s
    evidence.findings = [replace(evidence.findings[0], guess=True)]
    assert merge_findings(case_of(evidence), [missing]) == [missing]
    evidence.findings = [finding(Kind.SHAPE_MISMATCH, 1), finding(Kind.SHAPE_MISMATCH, 2)]
    assert [d.culprits for d in merge_findings(case_of(evidence), [other])] == [(1,), (2,)]


def test_a_network_fault_blocks_who_waits_with_its_ranks() -> None:
    """In a call of a group that they are in."""
    other = group(2, 3, name="2")
    evidence = play(4, {0: [run(9)], 1: [all_reduce(5, group(0, 1))], 2: [all_reduce(6, other)], 3: [run(9)]})
    evidence.findings = [finding(Kind.NETWORK_FAULT, 0)]
    assert [d.victims for d in merge_findings(case_of(evidence), [])] == [(1,)]


# --- how long a rank is trusted


def waiting(*issued_s: float, size: int = 3, now_s: float = 100.0, **kw: Any) -> Evidence:
    """Rank 0 runs; the others wait in one all_reduce since these times."""
    evidence = play(size, lambda r: [run(9)] if r == 0 else [all_reduce(11)], **kw)
    for rank, at_s in enumerate(issued_s, 1):
        evidence.records[rank][-1].issued_s = at_s
    evidence.now_s = now_s
    return evidence


def test_the_longest_wait_for_a_rank() -> None:
    """Of all who wait for it, the first; nobody waits for the others."""
    index = EvidenceIndex(waiting(7.0, 5.0))
    late = longest_waits(index, [0, 1])
    assert {rank: call.rank for rank, call in late.items()} == {0: 2}


@pytest.mark.parametrize(
    ("straggler_after_s", "hang_after_s", "trusted", "slow"),
    [
        (None, None, True, False),
        (96.0, None, True, False),
        (95.0, None, True, True),
        (None, 95.0, False, False),
        (None, 96.0, True, False),
        (1.0, 95.0, False, False),
        (1.0, 96.0, True, True),
    ],
)
def test_when_a_running_rank_is_late_and_when_missing(
    straggler_after_s: float | None, hang_after_s: float | None, trusted: bool, slow: bool
) -> None:
    """When others have waited for it as long as the limits say; the second limit is the last."""
    evidence = waiting(7.0, 5.0, straggler_after_s=straggler_after_s, hang_after_s=hang_after_s)
    index = EvidenceIndex(evidence)
    late = lateness(index)
    assert set(late) == ({0} if straggler_after_s or hang_after_s else set())
    moving, stragglers = patience(index, late)
    assert moving == ([0] if trusted else [])
    found = stragglers(case_of(evidence))
    assert [(d.culprits, d.victims, d.kind) for d in found] == [((0,), (1, 2), Kind.STRAGGLER)] * slow
    assert all("2 ranks wait at train.py:11 for 95.0 s so far" in d.explanation for d in found)


def test_a_process_that_was_not_started_may_come() -> None:
    """It is no straggler, as its host may still boot."""
    evidence = waiting(7.0, 5.0, straggler_after_s=1.0, unseen=frozenset({0}))
    assert lateness(EvidenceIndex(evidence)) == {}


@pytest.mark.parametrize(
    ("kind", "phase", "victims", "hang_after_s", "proof"),
    [
        (Kind.MISSING_RANK, Phase.FINISHED, (1,), 0.0, None),
        (Kind.MISSING_RANK, Phase.FINISHED, (1,), None, None),
        (Kind.MISSING_RANK, Phase.FINISHED, (1,), 60.0, Proof.GONE),
        (Kind.RANK_KILLED, Phase.KILLED, (1,), 60.0, Proof.GONE),
        (Kind.STRAGGLER, Phase.RUNNING, (1,), 60.0, Proof.NOTHING),
    ],
)
def test_the_ground_of_a_diagnosis(
    kind: Kind, phase: Phase, victims: tuple[int, ...], hang_after_s: float | None, proof: Proof | None
) -> None:
    """None at the end of a job; what has ended needs no wait, and a warning proves nothing."""
    evidence = play(
        2, {0: [killed() if phase is Phase.KILLED else finish()], 1: [all_reduce(11)]}, hang_after_s=hang_after_s
    )
    evidence.ranks[0].phase = phase
    index = EvidenceIndex(evidence)
    weigher = Weigher(index, (), Contradictions({}, {}))
    assert weigher.proof(Diagnosis(kind, (0,), victims)) == proof


def test_messages_wait_for_their_sender() -> None:
    """A send waits for its receiver, which runs."""
    late = longest_waits(EvidenceIndex(play(2, {0: [run(9)], 1: [send(0, 5)]})), [0])
    assert {rank: call.op for rank, call in late.items()} == {0: "send"}
