"""What ends a job in which some ranks still make calls."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distsim.debug.diagnosis.diagnose import diagnose
from distsim.debug.monitor.ends import among_moving, without_guesses
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.records.kinds import Proof
from distsim.debug.settings import Settings
from tests.debug.builders import all_reduce, play, run


def long_wait() -> Diagnosis:
    """Rank 1 has computed for longer than the others may wait for it."""
    evidence = play(2, {0: [all_reduce(11)], 1: [run(12)]}, hang_after_s=60.0)
    evidence.now_s += 70.0
    (hang,) = diagnose(evidence)
    assert (hang.proof, hang.ends_job) == (Proof.PATIENCE, True)
    return hang


@pytest.mark.parametrize(("still_s", "proofs"), [(0.5, [Proof.NOT_YET]), (30.0, []), (60.0, [Proof.PATIENCE])])
def test_a_long_wait_ends_no_job_that_goes_on(still_s: float, proofs: list[Proof]) -> None:
    """Steps of half a second: a warning. Nothing for half a minute: not judged yet. A minute: a hang."""
    assert [d.proof for d in without_guesses([long_wait()], Settings(), still_s)] == proofs


def test_it_does_by_the_limit_that_the_user_has_set() -> None:
    """And the report says that this is no proof."""
    settings = Settings(hang_after_s=60.0)
    (hang,) = among_moving(without_guesses([long_wait()], settings, 0.5), settings)
    assert hang.ends_job
    assert "not proof" in hang.explanation
    assert not among_moving([long_wait()], Settings())[0].ends_job


def test_a_circle_is_proof_whoever_goes_on() -> None:
    """Patience is the only guess."""
    circle = replace(long_wait(), proof=Proof.CIRCLE)
    assert without_guesses([circle], Settings(), 0.5) == [circle]


def test_a_wait_that_torch_has_ended_is_no_guess() -> None:
    """The ranks in it have raised: nothing of the job goes on, however short the timeout was."""
    (d,) = without_guesses([long_wait()], Settings(), 20.0, given_up=[0])
    assert d.proof is Proof.PATIENCE
    assert without_guesses([long_wait()], Settings(), 20.0, given_up=[2]) == []
