"""Processes that NCCL's watchdog has aborted, and circles that timeouts have ended: the hang before them is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from distsim.debug.diagnosis.diagnose import diagnose
from distsim.debug.records import Evidence, Phase, RankState, Site, State
from distsim.debug.records.kinds import Kind
from tests.debug.builders import FILE, Step, all_reduce, group, play, recv, run
from tests.debug.test_ends import die_inside


def aborted(evidence: Evidence, *ranks: int, after_s: float = 30.0) -> Evidence:
    """NCCL's watchdog has aborted *ranks* this long after their last calls; torchrun then sent rank 2 SIGTERM."""
    for rank in ranks:
        evidence.ranks[rank].seen_s = evidence.records[rank][-1].issued_s + after_s
        die_inside(evidence, rank, Phase.KILLED, signal="SIGABRT")
    if evidence.ranks.get(2) is not None and evidence.ranks[2].phase is Phase.RUNNING:
        ended = RankState(2, Phase.KILLED, signal="SIGTERM", site=Site(FILE, 11, "main"))
        evidence.ranks[2] = replace(ended, seen_s=after_s + 1.0, stood_s=after_s - 1.0)
    evidence.now_s = after_s + 10.0
    return evidence


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    "wait", [lambda **kw: all_reduce(12, **kw), lambda **kw: recv(2, 12, **kw)], ids=["all_reduce", "recv"]
)
def test_a_wait_that_nccls_watchdog_ended_is_the_hang_that_it_was(wait: Callable[..., Step], is_async: bool) -> None:
    """It aborts the process (SIGABRT), whose host may be anywhere: the rank that never came is the culprit, and neither
    who waited for it nor the launcher's signal is.
    """
    programs = {rank: [wait(device="cuda", is_async=is_async)] for rank in (0, 1)} | {2: [run(11)]}
    (d,) = diagnose(aborted(play(3, programs, hang_after_s=60.0), 0, 1))
    assert (d.kind, d.culprits, d.victims, d.exit_code) == (Kind.HOST_STUCK, (2,), (0, 1), 3)
    assert "Later rank 2 was ended by SIGTERM" in d.explanation


@pytest.mark.parametrize(
    ("device", "after_s", "joined"), [("cuda", 1.0, False), ("cuda", 30.0, True), ("cpu", 30.0, False)]
)
def test_an_abort_that_is_no_timeout_is_its_ranks_own(device: str, after_s: float, joined: bool) -> None:
    """The watchdog also aborts for an error of CUDA: soon after a call, or in one that lacks nobody. gloo has none."""
    call = all_reduce(12, device=device, is_async=True)
    evidence = aborted(play(2, {0: [call], 1: [call, run(11)] if joined else [run(11)]}), 0, after_s=after_s)
    evidence.records[0][0].state = State.ISSUED
    assert diagnose(evidence)[0].kind is Kind.RANK_KILLED


@pytest.mark.parametrize("by_watchdog", [False, True])
def test_a_circle_that_timeouts_ended_is_a_circle(by_watchdog: bool) -> None:
    """Each rank gave up on the other in its own call: none of the two exceptions is the cause of the other."""
    groups = group(0, 1, name="a"), group(0, 1, name="b")
    calls = [[all_reduce(10 + n, groups[n], device="cuda") for n in order] for order in ((0, 1), (1, 0))]
    evidence = play(2, lambda rank: calls[rank])
    if by_watchdog:
        aborted(evidence, 0, 1)
    else:
        for rank, (call, *_) in evidence.records.items():
            call.error = "RuntimeError: Timed out waiting 30000ms for recv operation to complete"
            die_inside(evidence, rank, Phase.RAISED, call.issued_s + 30.0, exception=call.error)
    (d,) = diagnose(evidence)
    assert (d.kind, d.culprits, d.cycle, d.exit_code) == (Kind.DEADLOCK_CYCLE, (0, 1), (0, 1), 3)
