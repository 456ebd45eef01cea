"""Laws of the wait-for graph, over evidence of every make: nothing has to make sense for them to hold."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from distsim.debug.diagnosis.diagnose import diagnose
from distsim.debug.diagnosis.waits.wait_graph import WaitGraph
from distsim.debug.matching.index import EvidenceIndex
from distsim.debug.records import CallRecord, CallWait, Evidence, Group, Phase, RankState, Site, State
from distsim.debug.records.kinds import Kind

STILL = (Phase.RAISED, Phase.KILLED, Phase.FINISHED, Phase.EXITED, Phase.FROZEN, Phase.HOST_STUCK, Phase.RUNNING)
ERRORS = ("ValueError: wrong size", "RuntimeError: Timed out waiting 1000ms", "RuntimeError: Connection closed by peer")
OPS = ("all_reduce", "all_gather", "barrier")


def anything(rng: random.Random) -> Evidence:
    """Ranks with calls on one to three groups that ended in any way, at any time, and a state that may fit them."""
    size = rng.randint(2, 6)
    groups = [Group("0", "default_pg", tuple(range(size)))]
    for name in range(1, rng.randint(1, 3)):
        groups.append(Group(str(name), "", tuple(sorted(rng.sample(range(size), rng.randint(2, size))))))
    records: dict[int, list[CallRecord]] = {}
    states: dict[int, RankState] = {}
    for rank in range(size):
        numbers = dict.fromkeys(range(len(groups)), 0)
        calls: list[CallRecord] = []
        now_s = rng.random()
        for _ in range(rng.randint(0, 5)):
            at = rng.choice([i for i, group in enumerate(groups) if rank in group.ranks])
            state = rng.choice((State.COMPLETED, State.COMPLETED, State.FAILED))
            rejected = state is State.FAILED and bool(calls) and rng.random() < 0.5
            now_s += rng.random()
            calls.append(
                CallRecord(
                    rank,
                    groups[at],
                    numbers[at] + 1,
                    rng.choice(OPS) if rng.random() < 0.1 else OPS[0],
                    site=Site("train.py", rng.randint(1, 3), "main"),
                    issued_s=now_s,
                    completed_s=now_s + rng.random(),
                    state=state,
                    error=rng.choice(ERRORS) if state is State.FAILED else None,
                    rejected=rejected,
                    index=len(calls),
                )
            )
            numbers[at] += not rejected
        records[rank] = calls
        states[rank] = RankState(rank, rng.choice(STILL), exception=rng.choice((None, *ERRORS)), signal="SIGKILL")
        if calls and not calls[-1].rejected and rng.random() < 0.7:  # it is in its last call, alive or not
            calls[-1] = replace(calls[-1], state=State.ISSUED, completed_s=None, error=None)
            waits = (CallWait(calls[-1]),)
            phase = rng.choice((Phase.BLOCKED, Phase.BLOCKED, Phase.KILLED, Phase.RAISED))
            states[rank] = replace(states[rank], phase=phase, waits=waits, since_s=calls[-1].issued_s)
    return Evidence(size, states, records, now_s=20.0, hang_after_s=rng.choice((None, 0.0, 1.0, 60.0)))


@pytest.mark.parametrize("seed", range(400))
def test_members_of_one_call_are_in_no_circle(seed: int) -> None:
    """Ranks that wait for each other wait in at least two calls, and a deadlock that is told names two."""
    evidence = anything(random.Random(seed))
    index = EvidenceIndex(evidence)
    graph = WaitGraph(index, [rank for rank, state in index.states.items() if state.phase is Phase.RUNNING])
    for root in graph.roots():
        inside = [call for rank in root.ranks for call in index.call_waits(rank)]
        if len(root.ranks) > 1:
            assert len({(call.group, call.seq) for call in inside}) > 1, (seed, root)
    for told in diagnose(evidence):
        if told.kind is Kind.DEADLOCK_CYCLE:
            inside = [call for rank in told.culprits for call in index.call_waits(rank)]
            assert len({(call.group, call.seq) for call in inside}) > 1, (seed, told)


@pytest.mark.parametrize("seed", range(400))
def test_a_rejected_call_has_not_arrived(seed: int) -> None:
    """What its own rank refused changes no verdict but who is missing: a rank whose own call was refused."""
    evidence = anything(random.Random(1000 + seed))
    without = replace(
        evidence,
        ranks=dict(evidence.ranks),
        records={rank: [call for call in calls if not call.rejected] for rank, calls in evidence.records.items()},
    )
    found, expected = diagnose(evidence), diagnose(without)
    verdicts = [(d.kind, d.culprits, d.victims, d.call, d.proof) for d in expected]
    for told in found:
        if (told.kind, told.culprits, told.victims, told.call, told.proof) not in verdicts:
            assert told.kind is Kind.MISSING_RANK
            assert "refused by torch" in told.explanation
            assert all(any(call.rejected for call in evidence.records[rank]) for rank in told.culprits)
    stuck = [{rank for d in several for rank in (*d.culprits, *d.victims)} for several in (found, expected)]
    refusing = {rank for rank, calls in evidence.records.items() if any(call.rejected for call in calls)}
    assert stuck[0] - refusing == stuck[1] - refusing


def test_a_retry_goes_where_the_refused_call_would_have_gone() -> None:
    """Rank 1's second all_gather is refused, caught, and it goes on to its third: it misses one, in no circle."""
    world = Group("0", "default_pg", (0, 1))

    def call(rank: int, seq: int, line: int, **kw: object) -> CallRecord:
        site = Site("train.py", line, "main")
        return CallRecord(rank, world, seq, "all_gather", site=site, issued_s=seq + rank / 10, **kw)  # type: ignore[arg-type]

    records = {
        0: [
            call(0, 1, 10, state=State.COMPLETED),
            call(0, 2, 11, state=State.COMPLETED, index=1),
            call(0, 3, 12, index=2),
        ],
        1: [
            call(1, 1, 10, state=State.COMPLETED),
            call(1, 2, 11, state=State.FAILED, error=ERRORS[0], rejected=True, index=1),
            call(1, 2, 12, state=State.COMPLETED, index=2),
        ],
    }
    states = {0: RankState(0, Phase.BLOCKED, (CallWait(records[0][-1]),)), 1: RankState(1, Phase.FINISHED, exit_code=0)}
    (told,) = diagnose(Evidence(2, states, records, now_s=5.0))
    assert (told.kind, told.culprits, told.victims) == (Kind.MISSING_RANK, (1,), (0,))
