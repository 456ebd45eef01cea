"""What else costs time in a job's steps: slow hosts, pauses with a period, steps and transfers that became longer."""

from __future__ import annotations

import numpy as np
import pytest

from distsim.debug.diagnosis.pace.changes import longer_since, pauses
from distsim.debug.diagnosis.pace.job import JobPace, PaceNote
from distsim.debug.diagnosis.pace.statistic import StepHistory
from distsim.debug.records import CallRecord, Group, Site, State
from tests.debug.pace_families import FAMILIES, STEP_S, Floats, own_work


def history_of(work_s: Floats) -> StepHistory:
    history = StepHistory(tuple(range(len(work_s))))
    history.add(work_s, work_s.max(axis=0) + 0.02)
    return history


def records_of(work_s: Floats, moved_s: Floats | None = None) -> dict[int, list[CallRecord]]:
    """Calls of a job with one blocking all_reduce a step, whose transfer takes *moved_s*."""
    ranks, steps = work_s.shape
    group = Group("0", "default_pg", tuple(range(ranks)))
    records: dict[int, list[CallRecord]] = {rank: [] for rank in range(ranks)}
    now_s = 0.0
    for step in range(steps):
        end_s = now_s + float(work_s[:, step].max()) + (0.01 if moved_s is None else float(moved_s[step]))
        for rank in range(ranks):
            records[rank].append(
                CallRecord(
                    rank, group, step + 1, "all_reduce", ((4,),), ((4,),), ("float32",), site=Site("t.py", 1, "f"),
                    issued_s=now_s + float(work_s[rank, step]), completed_s=end_s, state=State.COMPLETED,
                )
            )  # fmt: skip
        now_s = end_s
    return records


def notes_of(
    work_s: Floats, moved_s: Floats | None = None, each: int | None = None
) -> tuple[list[PaceNote], list[int]]:
    """Return the notes of a job and its slow ranks; *each*: ranks of a host."""
    job = JobPace()
    job.hosts = {} if each is None else {rank: f"gpu-{rank // each:02}" for rank in range(len(work_s))}
    job.take_records(records_of(work_s, moved_s))
    return job.notes(), sorted(job.slow_ranks())


@pytest.mark.parametrize("name", [name for name in FAMILIES if "rank 0" not in name])
def test_a_healthy_job_has_no_notes(name: str) -> None:
    """Noise of no kind is a pause with a period, a slow host, or a change of the steps."""
    if name in ("a loader that refills each seventh step", "a slow turn that goes round"):
        assert {note.kind for note in notes_of(own_work(name, 0), each=2)[0]} <= {"periodic_pause"}
    else:
        assert notes_of(own_work(name, 0), each=2)[0] == []


@pytest.mark.parametrize(
    ("name", "rank", "every"),
    [("checkpoints of rank 0", 0, 25), ("an evaluation of rank 0", 0, 40), ("rank 0 logs each tenth step", None, 0)],
)
def test_a_pause_with_a_period(name: str, rank: int | None, every: int) -> None:
    """The rank, the steps from one to the next, and the share of the time; half a step is too little."""
    found = pauses(history_of(own_work(name, 1, steps=400)))
    assert [(one.rank, one.every) for one in found] == ([] if rank is None else [(rank, every)])
    assert all(0.1 < one.share < 0.5 for one in found)


def test_a_pause_now_and_then_has_no_period() -> None:
    """Nobody is named for it."""
    work_s = own_work("jitter of 2%", 0, steps=400)
    work_s[1, np.random.default_rng(0).random(400) < 0.08] += 2.0
    assert pauses(history_of(work_s)) == []


def test_a_slow_host_is_named_and_not_its_ranks() -> None:
    """All its ranks work longer."""
    work_s = own_work("jitter of 2%", 0, ranks=16)
    work_s[4:8] *= 1.1
    notes, ranks = notes_of(work_s, each=4)
    assert [(note.kind, note.figures["host"]) for note in notes] == [("slow_host", "gpu-01")]
    assert notes[0].text.startswith("slow host gpu-01: its 4 ranks work 5")
    assert ranks == []


def test_a_slow_rank_of_a_host_is_named_and_not_the_host() -> None:
    """One rank has all of it."""
    work_s = own_work("jitter of 2%", 0, ranks=16)
    work_s[5] *= 1.3
    assert notes_of(work_s, each=4) == ([], [5])


def test_steps_that_became_longer() -> None:
    """Since when, by how much, and that all ranks work longer."""
    work_s = own_work("jitter of 2%", 0)
    work_s[:, 120:] *= 1.16
    ((note,), ranks) = notes_of(work_s)
    assert (note.kind, ranks) == ("slow_steps", [])
    assert note.figures["since_step"] == pytest.approx(120, abs=6)
    assert "every step takes 15% longer on all ranks" in note.text or "every step takes 16% longer" in note.text
    assert "all ranks work longer" in note.text


def test_transfers_that_became_longer() -> None:
    """Own work as before: it is the network."""
    moved_s = np.where(np.arange(200) < 100, 0.05, 0.15)
    ((note,), ranks) = notes_of(own_work("jitter of 2%", 0), moved_s)
    assert (note.kind, ranks) == ("slow_transfers", [])
    assert note.text.endswith("take longer (50 -> 150 ms): the network")


@pytest.mark.parametrize("name", FAMILIES)
def test_noise_is_no_change(name: str) -> None:
    """Steps of a healthy job become longer now and then, not from some step on."""
    for seed in range(3):
        lengths = own_work(name, seed, steps=400).max(axis=0)
        assert longer_since(lengths, 0.05 * STEP_S) is None, seed


def test_a_group_beside_others_that_is_slower() -> None:
    """Three groups make equal calls; the transfers of one take longer."""
    records: dict[int, list[CallRecord]] = {}
    for number in range(3):
        work_s = own_work("jitter of 2%", number, ranks=2, steps=60)
        group = Group(str(number + 1), f"tp{number}", (2 * number, 2 * number + 1))
        for rank, calls in records_of(work_s, np.full(60, 0.05 if number == 1 else 0.03)).items():
            for call in calls:
                call.rank, call.group = 2 * number + rank, group
            records[2 * number + rank] = calls
    job = JobPace()
    job.take_records(records)
    (note,) = job.notes()
    assert (note.kind, note.figures["group"]) == ("slow_group", "2")
    assert "take 50 ms a step after the last arrival, those of 2 groups beside it at most 30 ms" in note.text
