"""Records as damage, lost beginnings and half-written rings leave them: a diagnosis may say little, and never fails."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from distsim.debug.diagnosis.diagnose import diagnose
from distsim.debug.divergence.divergence import hypotheses
from distsim.debug.matching.agreement import split_conflicts
from distsim.debug.records import Evidence, Phase, RankState
from distsim.debug.records.diagnosis import diagnoses_to_json
from distsim.debug.records.kinds import Kind
from distsim.debug.report.render import render_diagnoses
from tests.debug import builders as b
from tests.debug.odd import cut_short, odd_evidence


@pytest.mark.parametrize("draw", [odd_evidence, cut_short])
def test_no_records_make_a_diagnosis_fail(draw: Callable[[int], Evidence]) -> None:
    """Whatever the records say, there is a diagnosis, and it can be shown and written."""
    for seed in range(300):
        evidence = draw(seed)
        try:
            found = diagnose(evidence)
            render_diagnoses(found, evidence)
            diagnoses_to_json(found)
        except Exception as error:
            raise AssertionError(f"{draw.__name__}({seed})") from error


def test_an_empty_stretch_contradicts_nothing() -> None:
    """Laid beside nothing, a stretch of calls is explained by no call left out, added or swapped."""
    calls = b.play(1, {0: [b.all_reduce(1)]}).records[0]
    for mine, theirs in ((calls, []), ([], calls), ([], [])):
        assert {kind for score, kind in hypotheses(mine, theirs, least=1) if score} == set()


def test_a_ring_that_has_kept_only_the_end_of_a_group() -> None:
    """Of a rank whose ring holds no call of a group but its destruction, the others' wait is still diagnosed."""
    evidence = b.play(2, {0: [b.all_reduce(1), b.all_reduce(2)], 1: [b.all_reduce(1), _destroy(9), b.finish()]})
    evidence.records = {0: evidence.records[0], 1: evidence.records[1][1:]}
    evidence.ranks[1].phase, evidence.ranks[1].waits = Phase.FINISHED, ()
    found = diagnose(evidence)[0]
    assert found.culprits == (1,)
    assert found.victims == (0,)


def test_a_rank_that_the_world_has_not() -> None:
    """A message to rank 5 of a world of two (damaged records) is told; of rank 5 no more than that nothing is known."""
    evidence = b.play(2, {0: [b.send(1, 1)], 1: [b.finish()]}, hang_after_s=0.0)
    evidence.records[0][0].peer = 5
    text = " ".join(d.explanation for d in diagnose(evidence))
    assert "rank 5" in text.lower()
    assert "left no record" in text


def test_a_group_whose_members_cannot_be_read() -> None:
    """Calls on a group that damage has left without members are compared with nothing."""
    nobody = b.group(name="?")
    evidence = b.play(2, {0: [b.all_reduce(1, nobody)], 1: [b.barrier(1, nobody)]})
    assert not [d for d in diagnose(evidence) if d.kind is Kind.OP_MISMATCH]


def test_splits_of_ranks_that_are_not_in_the_group() -> None:
    """Splits are compared between members only."""
    two = b.group(0, 1)
    step = b.coll("all_to_all_single", 1, two, input_splits=(2, 2), output_splits=(2, 2))
    calls = [b.Play(4, {}, False).issue(rank, step) for rank in (2, 3)]
    assert split_conflicts(calls) == []


def test_a_rank_that_died_in_a_call_of_its_own_is_told() -> None:
    """Killed at its very end, in a call that a rank which still moves has not come to."""
    evidence = b.play(2, {0: [b.barrier(1)], 1: [b.run(2)]})
    evidence.ranks = {
        0: RankState(0, Phase.KILLED, evidence.ranks[0].waits, over=True, signal="SIGKILL"),
        1: RankState(1, Phase.BLOCKED),
    }
    assert Kind.RANK_KILLED in {d.kind for d in diagnose(evidence)}


def _destroy(line: int) -> b.Step:
    return b.coll("destroy_process_group", line)
