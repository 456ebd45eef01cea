"""What a hang or mismatch looks like through distsim.simulate: kind, culprits, line, cycle; timeouts."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sim.running import HEAD, Scripts, ranks

import distsim
from distsim.debug.diagnosis.diagnose import Diagnosis
from distsim.debug.records.kinds import Kind

T = torch.ones


def start() -> int:
    dist.init_process_group("gloo")
    return int(dist.get_rank())


def skip() -> None:
    if start() != 2:
        dist.all_reduce(T(2))  # here


def extra() -> None:
    if start() == 1:
        dist.all_reduce(T(2))  # here
    dist.barrier()


def reordered() -> None:
    if start() == 1:
        dist.barrier()  # here
        dist.all_reduce(T(2))
    else:
        dist.all_reduce(T(2))
        dist.barrier()


def other_op() -> None:
    if start() == 1:
        dist.broadcast(T(2), 0)  # here
    else:
        dist.all_reduce(T(2))


def other_shape() -> None:
    dist.all_reduce(T(3 if start() == 1 else 2))  # here


def other_dtype() -> None:
    dist.all_reduce(T(2, dtype=torch.float64 if start() == 1 else torch.float32))  # here


def other_reduce_op() -> None:
    dist.all_reduce(T(2), op=dist.ReduceOp.MAX if start() == 1 else dist.ReduceOp.SUM)  # here


def other_root() -> None:
    dist.broadcast(T(2), src=1 if start() == 1 else 0)  # here


def other_splits() -> None:
    rank = start()
    splits = [1, 1, 1] if rank != 1 else [2, 1, 0]
    dist.all_to_all_single(torch.zeros(3), T(3), [1, 1, 1], splits)  # here


def unmatched_recv() -> None:
    if start() == 1:
        dist.recv(T(1), src=0)


def wrong_tag() -> None:
    rank = start()
    if rank == 0:
        dist.send(T(1), 1, tag=7)
    elif rank == 1:
        dist.recv(T(1), 0, tag=8)


def other_size() -> None:
    rank = start()
    if rank == 0:
        dist.send(T(2), 1)
    elif rank == 1:
        dist.recv(T(3), 0)


def crossed() -> None:
    rank = start()
    if rank < 2:
        dist.recv(T(1), 1 - rank)
        dist.send(T(1), 1 - rank)


def two_groups() -> None:
    rank = start()
    one, two = dist.new_group([0, 1]), dist.new_group([0, 1])
    if rank < 2:
        for group in (one, two) if rank == 0 else (two, one):
            dist.all_reduce(T(1), group=group)


def three_groups() -> None:
    rank = start()
    groups = [dist.new_group(pair) for pair in ([0, 1], [1, 2], [0, 2])]
    order = {0: (0, 2), 1: (1, 0), 2: (2, 1)}[rank]
    for number in order:
        dist.all_reduce(T(1), group=groups[number])


def group_order() -> None:
    rank = start()
    for pair in ([0, 1], [1, 2]) if rank != 1 else ([1, 2], [0, 1]):
        dist.new_group(pair)


CASES: list[tuple[Callable[[], None], str, tuple[int, ...] | None, int]] = [
    (skip, "missing_rank", (2,), 3),
    (extra, "extra_collective", (1,), 4),
    (reordered, "wrong_order", (1,), 4),
    (other_op, "op_mismatch", (1,), 4),
    (other_shape, "shape_mismatch", (1,), 4),
    (other_dtype, "dtype_mismatch", (1,), 4),
    (other_reduce_op, "reduce_op_mismatch", (1,), 4),
    (other_root, "root_mismatch", (1,), 4),
    (other_splits, "splits_mismatch", (1,), 4),
    (unmatched_recv, "p2p_unmatched", None, 3),
    (wrong_tag, "p2p_unmatched", None, 3),
    (other_size, "p2p_size_mismatch", None, 4),
    (crossed, "deadlock_cycle", (0, 1), 3),
    (two_groups, "deadlock_cycle", (0, 1), 3),
    (three_groups, "deadlock_cycle", (0, 1, 2), 3),
    (group_order, "group_creation_order", (1,), 4),
]


def root_cause(fn: Callable[..., Any], num_ranks: int = 3) -> tuple[Diagnosis, int]:
    outcome = ranks(fn, num_ranks, check=False)
    assert outcome.diagnoses, f"{fn.__name__}: nothing found; exit code {outcome.exit_code}"
    return outcome.diagnoses[0], outcome.exit_code


@pytest.mark.parametrize(("body", "kind", "culprits", "code"), CASES, ids=[c[0].__name__ for c in CASES])
def test_fault(body: Callable[[], None], kind: str, culprits: tuple[int, ...] | None, code: int) -> None:
    """Each fault has its kind, its culprit, its line and its exit code, without waiting for a timeout."""
    outcome = ranks(body, 3, check=False)
    assert outcome.diagnoses, outcome.failures
    found = outcome.diagnoses[0]
    assert (str(found.kind), outcome.exit_code) == (kind, code), found.explanation
    assert outcome.virtual_time_s < 1
    if culprits is not None:
        assert found.culprits == culprits
    lines, first = inspect.getsourcelines(body)
    marked = [first + number for number, line in enumerate(lines) if "# here" in line]
    if marked and found.kind != "missing_rank":
        assert found.sites[found.culprits[0]].line in marked
    if found.kind == "deadlock_cycle":
        assert found.cycle is not None
        assert set(found.cycle) == set(found.culprits)


def test_victims_know_where_they_wait() -> None:
    """Every stuck rank has its call, its group, its number and its line."""
    found, _ = root_cause(skip)
    lines, first = inspect.getsourcelines(skip)
    here = first + next(number for number, line in enumerate(lines) if "# here" in line)
    assert found.victims == (0, 1)
    for rank in (0, 1):
        stuck = found.stuck[rank]
        assert (stuck.op, stuck.seq, stuck.line) == ("all_reduce", 1, here)
        assert tuple(stuck.group_ranks) == (0, 1, 2)


def test_a_timeout_is_torchs_error_and_may_be_caught() -> None:
    """A group's own timeout strikes in virtual time, exactly then; a program that recovers is healthy."""

    def body() -> tuple[str, float, float]:
        dist.init_process_group("gloo", timeout=timedelta(seconds=5))
        rescue = dist.new_group()
        begun, error = time.perf_counter(), "none"
        if dist.get_rank() == 0:
            try:
                dist.all_reduce(T(1))
            except RuntimeError as exc:
                error = str(exc)
        waited = time.perf_counter() - begun
        dist.barrier(group=rescue)
        return error, waited, time.perf_counter()

    outcome = ranks(body, 2)
    error, waited, _ = outcome.results[0]
    assert "Timed out waiting 5000ms" in error
    assert waited == pytest.approx(5, abs=1e-3)
    assert outcome.exit_code == 0
    assert outcome.diagnoses == []
    assert any("caught the error" in note for note in outcome.notes)


def test_wait_with_a_timeout() -> None:
    """Work.wait(timeout) gives up after just that; the handle keeps its error."""

    def body() -> Any:
        rank = start()
        if rank == 1:
            time.sleep(60)
            return None
        work = dist.all_reduce(T(1), async_op=True)
        with pytest.raises(RuntimeError, match="Timed out waiting 2000ms"):
            work.wait(timedelta(seconds=2))
        return round(time.perf_counter(), 3)

    assert ranks(body).results == [2.0, None]


def test_a_timeout_nobody_catches(script: Scripts) -> None:
    """The rank that made others wait is the root, not the one that raised."""
    ran = script(
        HEAD
        + """
slow = dist.new_group(timeout=timedelta(seconds=5))
if rank == 1:
    time.sleep(60)
dist.all_reduce(torch.ones(1), group=slow)
"""
    )
    assert ran.outcome.diagnoses[0].culprits == (1,)
    assert ran.kinds == ["missing_rank"]
    assert ran.outcome.diagnoses[0].sites[1].line == 9
    assert ran.outcome.exit_code == 3
    assert "Timed out waiting 5000ms" in ran.outcome.failures[0].message


def test_monitored_barrier_names_the_missing() -> None:
    """Rank 0 names the first that did not come, or all with wait_all_ranks; the others hear of it."""

    def body(everyone: bool) -> str:
        rank = start()
        try:
            if rank in (0, 2):
                dist.monitored_barrier(timeout=timedelta(seconds=3), wait_all_ranks=everyone)
        except RuntimeError as error:
            return str(error)
        return ""

    first = ranks(body, 4, False).results
    assert "Rank 1 failed to pass monitoredBarrier in 3000 ms" in first[0]
    assert "Please check rank 0 logs" in first[2]
    assert "Ranks 1, 3 failed to pass" in ranks(body, 4, True).results[0]


@pytest.mark.parametrize(
    "loop",
    [
        "work = dist.all_reduce(torch.ones(1), async_op=True)\n    while not work.is_completed():\n        pass",
        "store = dist.TCPStore('localhost', 29800, 1, True)\n    while not store.check(['never']):\n        pass",
        "store = dist.TCPStore('localhost', 29800, 1, True)\n"
        "    while not store.check(['never']):\n        time.sleep(1)",
        "while not os.path.exists('/never/there'):\n        time.sleep(5)",
        "store = dist.TCPStore('localhost', 29800, 1, True)\n    store.get('never')",
    ],
    ids=["work", "store", "store and sleep", "file", "get"],
)
def test_a_loop_that_waits_for_what_never_comes(script: Scripts, loop: str) -> None:
    """Polling for ever is a hang, found in bounded time."""
    ran = script(HEAD + f"if rank == 0:\n    {loop}\n    dist.barrier()\n")
    assert ran.outcome.exit_code == 3
    found = ran.outcome.diagnoses[0]
    assert 0 in (*found.culprits, *found.victims)


def test_a_cluster_too_small_and_unknown() -> None:
    """Bad input is one line of UsageError."""
    for on, per_node in (("ethernet-cpu:0", None), ("nowhere:2", None), ("ethernet-cpu:1", 10_000), ("no.toml", None)):
        with pytest.raises(distsim.UsageError) as caught:
            distsim.simulate(skip, on=on, nproc_per_node=per_node)
        assert "\n" not in str(caught.value)


def test_a_world_larger_than_what_was_started_is_never_joined() -> None:
    """As on gloo: the ranks that nobody has started are named, and how many there are."""

    def body() -> None:
        dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=4)

    outcome = ranks(body, check=False)
    first = outcome.diagnoses[0]
    assert (first.kind, first.culprits, outcome.exit_code) == (Kind.NEVER_JOINED, (2, 3), 3)
    assert "world_size=4), but its launcher here has started a job of 2" in first.explanation
    assert first.suggestion.startswith("Take world_size from WORLD_SIZE")
