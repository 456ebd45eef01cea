"""An abort needs proof: what each kind rests on, what may still go on by itself, and when patience is over."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distsim.debug.diagnosis.diagnose import diagnose
from distsim.debug.records import CallWait, Evidence, Phase, RankState, Site, State
from distsim.debug.records.diagnosis import Diagnosis, diagnoses_from_json, diagnoses_to_json
from distsim.debug.records.kinds import END_A_JOB, INCONSISTENT, PROOFS, WARNINGS, Kind, Proof, ends
from distsim.debug.report.render import render_diagnoses
from tests.debug.builders import (
    Step,
    all_reduce,
    barrier,
    coll,
    fail,
    finding,
    frozen,
    group,
    host,
    killed,
    leave,
    play,
    recv,
    run,
    send,
    spin,
    store,
)

pytestmark = pytest.mark.smoke

PATIENCE_S = 60.0


@pytest.mark.parametrize("kind", Kind)
def test_every_kind_has_a_row(kind: Kind) -> None:
    """The table says of every kind what proves it; what only warns can end no job, and the rest has an exit code."""
    row = PROOFS[kind]
    assert row
    assert Proof.NOT_YET not in row
    assert (kind in WARNINGS or kind in (Kind.HEALTHY, Kind.JOB_ENDED)) == (Proof.NOTHING in row)
    told = Diagnosis(kind, (0,), (1,))
    if row <= {Proof.NOTHING, Proof.SEEN}:
        assert not told.ends_job
    if kind in INCONSISTENT:
        assert row & {Proof.MET, Proof.SEEN}
    assert not ends(kind, Proof.NOT_YET, (1,))


def test_the_table_has_no_row_too_many() -> None:
    """Kinds that are gone leave the table."""
    assert set(PROOFS) == set(Kind)
    assert END_A_JOB.isdisjoint({Proof.SEEN, Proof.REFUSED, Proof.NOT_YET, Proof.NOTHING})


def live(last: Step, *before: Step, waited_s: float = 5.0, size: int = 3) -> Evidence:
    """Rank 0 ends in *last*; the others wait in an all_reduce for it, for so long; patience lasts a minute."""
    evidence = play(size, lambda r: [*before, last] if r == 0 else [*before, all_reduce(11)])
    evidence.now_s = max(call.issued_s for calls in evidence.records.values() for call in calls) + waited_s
    evidence.hang_after_s = PATIENCE_S
    return evidence


@pytest.mark.parametrize(
    ("last", "kind"),
    [
        (frozen(10), Kind.PROCESS_FROZEN),
        (spin(10), Kind.HOST_STUCK),
        (host("a lock", 10), Kind.HOST_STUCK),
        (store("key", 10), Kind.MISSING_RANK),
    ],
)
def test_what_may_go_on_is_a_warning_until_patience_is_over(last: Step, kind: Kind) -> None:
    """Stopped, in a loop, on a lock, at a store: told at once, without an exit code, and proven after a minute."""
    (early,) = diagnose(live(last))
    assert (early.kind, early.culprits, early.victims) == (kind, (0,), (1, 2))
    assert (early.proof, early.exit_code, early.ends_job) == (Proof.NOT_YET, 0, False)
    (late,) = diagnose(live(last, waited_s=PATIENCE_S + 1))
    assert (late.kind, late.culprits) == (kind, (0,))
    assert late.proof in END_A_JOB
    assert late.ends_job
    assert late.exit_code == 3


@pytest.mark.parametrize("last", [fail("ValueError: x", 10), leave(3, 10), killed()])
def test_a_dead_member_is_proof_where_it_is_needed(last: Step) -> None:
    """A rank that is over ends the job as soon as others wait for it, and not before."""
    (needed,) = diagnose(live(last))
    assert (needed.proof, needed.ends_job) == (Proof.GONE, True)
    alone = live(last)
    alone.ranks = {rank: RankState(rank) if rank else state for rank, state in alone.ranks.items()}
    alone.records = {0: alone.records[0]}
    (unneeded,) = diagnose(alone)
    assert (unneeded.kind, unneeded.victims) == (needed.kind, ())
    assert unneeded.exit_code == 1
    assert not unneeded.ends_job


def test_a_closed_circle_is_proof() -> None:
    """Two ranks receive first: nothing that moves could end it."""
    evidence = play(3, {0: [recv(1, 10)], 1: [recv(0, 10)], 2: [run(12)]}, hang_after_s=PATIENCE_S)
    (told,) = diagnose(evidence)
    assert (told.kind, told.proof, told.ends_job) == (Kind.DEADLOCK_CYCLE, Proof.CIRCLE, True)


def test_a_circle_with_a_thread_at_large_is_none_yet() -> None:
    """Another thread of one of the two may make the call that the other waits for."""
    evidence = play(2, {0: [recv(1, 10)], 1: [recv(0, 10)]}, hang_after_s=PATIENCE_S)
    evidence.ranks[0].at_large = True
    evidence.ranks[0].since_s = 0.0
    (told,) = diagnose(evidence)
    assert (told.kind, told.provisional, told.exit_code) == (Kind.DEADLOCK_CYCLE, True, 0)
    evidence.now_s += PATIENCE_S
    (told,) = diagnose(evidence)
    assert (told.kind, told.ends_job) == (Kind.DEADLOCK_CYCLE, True)
    evidence.ranks[0].since_s = evidence.now_s - 1.0  # the wait that began first counts
    (told,) = diagnose(evidence)
    assert told.ends_job


def test_calls_that_met_are_proof() -> None:
    """Shapes that differ can not go together, whoever else still runs."""
    evidence = play(4, lambda r: [run(9)] if r == 3 else [all_reduce(10, group(0, 1, 2), shape=(4 + (r == 1),))])
    evidence.hang_after_s = PATIENCE_S
    (told,) = diagnose(evidence)
    assert (told.kind, told.culprits, told.proof, told.ends_job) == (Kind.SHAPE_MISMATCH, (1,), Proof.MET, True)


REFUSED = "CollectiveMismatch: shape_mismatch: ..."


@pytest.mark.parametrize("of_two", [False, True])
def test_what_strict_refused_a_program_may_catch(of_two: bool) -> None:
    """The contradiction is told; that somebody is late later on is no proof that the job cannot go on. Where the
    exception has ended a rank, or the calls went out, it is one."""

    def body(r: int) -> list[Step]:
        shape = (4 + r,)
        if not of_two:
            bad = all_reduce(10, is_async=True, shape=shape)
        else:
            bad = send(1, 10, shape=shape, is_async=True) if r == 0 else recv(0, 10, shape=shape, is_async=True)
        return [bad, all_reduce(12) if r == 0 else run(11)]

    def told(error: str | None, raised: bool = False) -> tuple[Kind, Proof | None, bool, int]:
        evidence = play(2, body)
        evidence.hang_after_s = PATIENCE_S
        for rank in (0, 1):
            if error:
                call = evidence.records[rank][0]
                call.state, call.error = State.FAILED, error
        if raised:
            evidence.ranks[1].phase, evidence.ranks[1].exception = Phase.RAISED, REFUSED
        first = diagnose(evidence)[0]
        return first.kind, first.proof, first.ends_job, first.exit_code

    kind = Kind.P2P_SIZE_MISMATCH if of_two else Kind.SHAPE_MISMATCH
    assert told(REFUSED) == (kind, Proof.REFUSED, False, 4)
    assert told(REFUSED, raised=True) == (kind, Proof.MET, True, 4)
    assert told(None) == (kind, Proof.MET, True, 4)


def test_lines_alone_prove_nothing() -> None:
    """Equal calls from swapped lines are told, and everybody goes on."""
    usual = [all_reduce(10), all_reduce(11)]
    evidence = play(3, lambda r: usual * 2 + (usual if r else usual[::-1]) + [run(12)])
    evidence.hang_after_s = PATIENCE_S
    (told,) = diagnose(evidence)
    assert (told.kind, told.culprits, told.proof, told.exit_code) == (Kind.WRONG_ORDER, (0,), Proof.SEEN, 4)
    assert not told.ends_job


def test_nothing_is_judged_on_time_that_nobody_watched() -> None:
    """A container's pause stops the monitor as well: the wait of those who were stopped does not count."""
    evidence = live(frozen(10), waited_s=PATIENCE_S + 10)
    evidence.away_s = ((evidence.now_s - 30.0, evidence.now_s - 1.0),)
    (told,) = diagnose(evidence)
    assert told.provisional
    runs = live(run(10), waited_s=PATIENCE_S + 10)
    assert [d.kind for d in diagnose(runs)] == [Kind.MISSING_RANK]
    runs.away_s = ((runs.now_s - 65.0, runs.now_s - 1.0),)
    assert diagnose(runs) == []


def test_where_nothing_moves_any_more_everything_is_proven() -> None:
    """A simulation, and the records of a dead job, know of no patience."""
    for patience_s in (None, 0.0):
        evidence = live(frozen(10))
        evidence.hang_after_s = patience_s
        (told,) = diagnose(evidence)
        assert (told.provisional, told.exit_code, told.ends_job) == (False, 3, True)


def test_a_host_that_is_not_heard_of_may_answer_again() -> None:
    """Its ranks are told at once and given up after a minute."""
    evidence = live(run(10))
    lost = finding(Kind.NETWORK_FAULT, 0, text="nothing was heard from host b (rank 0) for 3.0 s")
    evidence.findings = [lost]
    evidence.ranks = {**evidence.ranks, 0: RankState(0, Phase.ABSENT)}
    told = diagnose(evidence)[0]
    assert (told.kind, told.culprits, told.victims, told.provisional) == (Kind.NETWORK_FAULT, (0,), (1, 2), True)
    evidence.now_s += PATIENCE_S
    assert diagnose(evidence)[0].ends_job


@pytest.mark.parametrize("kind", [Kind.NETWORK_FAULT, Kind.NEVER_JOINED])
def test_who_is_cut_off_in_a_call_that_all_have_reached_is_given_up(kind: Kind) -> None:
    """Nobody is missing in the call; that it never ends is proof when patience is over, and not before."""
    evidence = live(run(10))
    own = replace(evidence.records[1][-1], rank=0)
    evidence.records = {**evidence.records, 0: [own]}
    evidence.ranks = {**evidence.ranks, 0: replace(evidence.ranks[1], rank=0, waits=(CallWait(own),))}
    evidence.findings = [finding(kind, 0, text="rank 0 looks for the store on another machine")]
    told = diagnose(evidence)[0]
    assert (told.kind, told.culprits, told.provisional) == (kind, (0,), True)
    evidence.now_s += PATIENCE_S
    assert diagnose(evidence)[0].ends_job


def test_a_guess_explains_and_is_not_told_by_itself() -> None:
    """That a gradient is missing while a rank stands still says why others wait too long, and else nothing."""
    evidence = live(run(10), waited_s=PATIENCE_S + 1)
    guess = finding(
        Kind.DDP_UNUSED_PARAMETER, 0, text="DDP parameter b got no gradient", site=Site("train.py", 10, "f")
    )
    evidence.findings = [replace(guess, guess=True)]
    (told,) = diagnose(evidence)
    assert (told.kind, told.culprits, told.victims) == (Kind.DDP_UNUSED_PARAMETER, (0,), (1, 2))
    assert told.ends_job
    evidence.now_s -= PATIENCE_S
    assert diagnose(evidence) == []
    evidence.straggler_after_s = 0.5
    (told,) = diagnose(evidence)
    assert (told.kind, told.provisional, told.exit_code) == (Kind.DDP_UNUSED_PARAMETER, True, 0)


def test_a_rank_that_nobody_needs_is_not_stuck() -> None:
    """It computes on outside of any call, and others wait for somebody else."""
    evidence = play(3, {0: [spin(10)], 1: [recv(2, 11)], 2: [run(12)]}, hang_after_s=PATIENCE_S)
    assert diagnose(evidence) == []


def test_a_warning_says_so_and_keeps_it_in_json() -> None:
    """The text says that it may go on, and until when; the report of another host's monitor reads the same."""
    evidence = live(frozen(10))
    found = diagnose(evidence)
    text = " ".join(render_diagnoses(found, evidence).plain(100).split())
    assert text.startswith("WARNING process frozen rank 0")
    assert "counts as a hang once others have waited 60 s (--hang-after)" in text
    assert [d.provisional for d in diagnoses_from_json(diagnoses_to_json(found))] == [True]
    assert "provisional" not in diagnoses_to_json([replace(found[0], proof=Proof.PATIENCE)])["diagnoses"][0]


def test_groups_of_one_rank_contradict_nobody() -> None:
    """`new_subgroups(group_size=1, group=half)` makes other groups on each side under one number."""
    evidence = play(4, lambda r: [coll("new_group", 10, new_ranks=(r // 2 * 2,)), barrier(11)], silent=True)
    assert diagnose(evidence) == []
    evidence = play(4, lambda r: [coll("new_group", 10, new_ranks=(0, 1) if r < 2 else (2, 3)), barrier(11)])
    assert [d.kind for d in diagnose(evidence)] == [Kind.GROUP_CREATION_ORDER]


def test_members_alone_wait_in_new_group() -> None:
    """Rank 2 waits for a message that rank 0 sends after its new_group with rank 1, which comes later: no circle."""
    made = coll("new_group", 10, new_ranks=(0, 1))
    evidence = play(3, {0: [made, send(2, 11)], 1: [run(9)], 2: [recv(0, 12), made]}, hang_after_s=PATIENCE_S)
    assert diagnose(evidence) == []
