"""Every kind of fault that records can show, played out on four ranks or so."""

from __future__ import annotations

from typing import Any

import pytest

from distsim.debug.diagnosis.diagnose import diagnose
from distsim.debug.records import CallWait, Phase, RankState, Site, State
from distsim.debug.records.kinds import Kind
from tests.debug.builders import FILE, Step, all_reduce, barrier, coll, fail, finish, play, run
from tests.debug.faults import FAULTS, STEP, odd

pytestmark = pytest.mark.smoke


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_named(name: str) -> None:
    """One diagnosis, which names kind and culprits; test_whole has all that it says."""
    fault = FAULTS[name]
    (d,) = diagnose(play(fault.size, fault.programs, **fault.evidence))
    assert (d.kind, d.culprits) == (fault.kind, fault.culprits), d.explanation
    assert d.suggestion
    assert d.detected_after_s is not None or d.kind is Kind.NEVER_JOINED
    assert set(d.stuck) <= {*d.culprits, *d.victims}


@pytest.mark.parametrize("kw", [{"shape": (8,)}, {"dtypes": ("float64",)}, {"reduce_op": "MAX"}])
def test_who_has_not_yet_waited_for_its_handle_is_a_victim_of_a_mismatch(kw: Any) -> None:
    """The program computes beside a call that cannot end; of calls that ended all the same nobody is one."""
    programs = {rank: [all_reduce(10, is_async=True, **(kw if rank == 1 else {})), run(11)] for rank in range(3)}
    evidence = play(3, programs)
    (d,) = diagnose(evidence)
    assert (d.culprits, d.victims) == ((1,), (0, 2))
    for (call,) in evidence.records.values():
        call.state, call.completed_s = State.COMPLETED, 1.0
    (d,) = diagnose(evidence)
    assert (d.culprits, d.victims) == ((1,), ())


def test_exception_on_its_way_through_finally() -> None:
    """A rank that raised and then calls barrier in a finally block is told as the raiser."""
    evidence = play(4, odd([all_reduce(10)], [barrier(90)]))
    evidence.ranks[1].exception = "ValueError: boom"
    (d,) = diagnose(evidence)
    assert (d.kind, d.culprits, d.exit_code) == (Kind.RANK_RAISED, (1,), 1)
    assert "ValueError: boom" in d.explanation
    assert "train.py:90" in d.explanation


def test_site_of_culprit_is_given() -> None:
    """The culprit's own line is among the sites, not only the victims'."""
    (d,) = diagnose(play(4, odd(STEP, [all_reduce(10), fail("ValueError: x", 33)])))
    assert d.sites[1] == Site(FILE, 33, "main")
    assert d.sites[0] == Site(FILE, 11, "main")


def gather_of(size: int) -> Step:
    """An all_gather of *size* numbers, into as many from each of three."""
    return coll("all_gather", 6, shape=(size,), output_shapes=((size,),) * 3)


def test_lists_of_another_size_at_one_line_are_one_call() -> None:
    """Of two all_gathers at one line that differ in nothing but size, neither is said to be missing: also where
    earlier rounds of the loop tell how it goes on."""
    evidence = play(3, lambda r: [gather_of(4), gather_of(4), gather_of(5 if r == 1 else 4)])
    for rank in range(3):
        evidence.records[rank][-1].state = State.FAILED if rank else State.ISSUED
    (d,) = diagnose(evidence)
    assert (d.kind, d.culprits, d.call and d.call.seq) == (Kind.SHAPE_MISMATCH, (1,), 3)


def test_no_two_ranks_agree() -> None:
    """Each one's size is told, and nobody is said to agree with anybody."""
    (d,) = diagnose(play(3, lambda r: [gather_of(21 + r)]))
    assert (d.kind, d.culprits) == (Kind.SHAPE_MISMATCH, (0, 1, 2))
    assert "with float32[21] (rank 0), float32[22] (rank 1) and float32[23] (rank 2). No two" in d.explanation
    (d,) = diagnose(play(4, lambda r: [all_reduce(5, shape=(max(r, 1),))]))
    assert (d.kind, d.culprits) == (Kind.SHAPE_MISMATCH, (2, 3))
    assert "with float32[2] (rank 2) and float32[3] (rank 3). Ranks 0,1 are in" in d.explanation


def test_other_calls_inside_one_line_have_advice_that_can_be_followed() -> None:
    """A model that is wrapped otherwise on one rank makes other calls at the very line of the others."""
    step = ["all_gather_into_tensor", "reduce_scatter_tensor"]
    (d,) = diagnose(play(3, lambda r: [coll(op, 9) for op in step + step[r == 1 :]]))
    assert (d.kind, d.culprits) == (Kind.MISSING_RANK, (1,))
    assert "wrap the model in the same way" in d.suggestion


def test_ranks_blocked_for_ever_are_a_finding_even_where_nobody_knows_what_they_lack() -> None:
    """Two ranks wait for a call that all records say is over: while the job may move that is nothing, in a simulation
    that has come to its end it is a hang."""
    evidence = play(2, {rank: [all_reduce(3), finish()] for rank in range(2)})
    waits = [CallWait(evidence.records[rank][0]) for rank in range(2)]
    evidence.ranks = {
        r: RankState(r, Phase.BLOCKED, (wait,), site=Site(FILE, 3, "main")) for r, wait in enumerate(waits)
    }
    assert diagnose(evidence) == []
    (found,) = diagnose(evidence, nothing_moves=True)
    assert (found.kind, found.exit_code, {*found.culprits, *found.victims}) == (Kind.HOST_STUCK, 3, {0, 1})


@pytest.mark.parametrize(("arrived", "is_even"), [(1, False), (2, True), (3, False)])
def test_an_even_split_leaves_open_who_is_wrong(arrived: int, is_even: bool) -> None:
    """Of ranks that ended without a call as many as came to it: one call too few, or one too many."""
    (d,) = diagnose(play(4, lambda r: [all_reduce(10), *([barrier(11)] if r < arrived else [finish()])]))
    assert ("The group is split evenly" in d.explanation) == is_even
