"""Calls that every rank has reached and that do not end."""

from __future__ import annotations

import pytest

from distsim.debug.diagnosis.diagnose import diagnose
from distsim.debug.records import CallWait, Evidence, Phase, State
from distsim.debug.records.kinds import Kind
from tests.debug.builders import all_reduce, play


def stuck_together(waited_s: float, op: str = "all_reduce", inside: tuple[int, ...] = (0, 1, 2)) -> Evidence:
    """Three ranks have made one call; it has ended for those that are not *inside*."""
    evidence = play(3, lambda rank: [all_reduce(5)], hang_after_s=60.0)
    for rank, state in evidence.ranks.items():
        (call,) = evidence.records[rank]
        call.op, call.issued_s = op, 1.0
        if rank in inside:
            call.state, call.completed_s = State.STARTED, None
            state.phase, state.waits, state.since_s = Phase.BLOCKED, (CallWait(call),), 1.0
        else:
            state.phase = Phase.RUNNING
    evidence.now_s = 1.0 + waited_s
    return evidence


@pytest.mark.parametrize("inside", [(0, 1, 2), (1,)])
def test_a_call_that_all_have_reached_and_that_does_not_end_is_a_warning(inside: tuple[int, ...]) -> None:
    """It names the call and what to look at, and ends nothing: the transfer may be slow."""
    assert diagnose(stuck_together(59.0, inside=inside)) == []
    (warning,) = diagnose(stuck_together(61.0, inside=inside))
    assert (warning.kind, warning.culprits, warning.provisional) == (Kind.NETWORK_FAULT, inside, True)
    assert (warning.exit_code, warning.ends_job, warning.nobody_waits) == (0, False, True)
    assert "all_reduce #1" in warning.explanation
    assert "ethtool" in warning.suggestion


def test_on_gpus_nccl_is_to_be_asked() -> None:
    """Its RAS knows which rank has launched what."""
    evidence = stuck_together(61.0)
    for calls in evidence.records.values():
        calls[0].device = "cuda"
    (warning,) = diagnose(evidence)
    assert "ncclras" in warning.suggestion


def test_a_rendezvous_that_all_have_reached_ends_by_the_users_limit_alone() -> None:
    """Connecting thousands of ranks is slow. Whoever is inside is named, also who came later than the limit ago."""
    evidence = stuck_together(61.0, "init_process_group", inside=(1, 2))
    evidence.records[2][0].issued_s = 5.0
    (warning,) = diagnose(evidence)
    assert (warning.kind, warning.culprits, warning.provisional) == (Kind.NEVER_JOINED, (1, 2), True)
    evidence.quiet_after_s = 60.0
    (hang,) = diagnose(evidence)
    assert (hang.kind, hang.culprits, hang.exit_code, hang.ends_job) == (Kind.NEVER_JOINED, (1, 2), 3, True)


def test_a_rank_that_is_stopped_in_the_call_explains_it() -> None:
    """Then its peers are told of that, not of the network."""
    evidence = stuck_together(61.0)
    evidence.ranks[1].phase, evidence.ranks[1].waits = Phase.FROZEN, ()
    assert Kind.NETWORK_FAULT not in {d.kind for d in diagnose(evidence)}
