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
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.records.kinds import Kind

pytestmark = pytest.mark.smoke

T = torch.ones


def start() -> int:
    dist.init_process_group("gloo")
    return int(dist.get_rank())


def skip() -> None:
    if start() != 2:
        dist.all_reduce(T(2))  # here


def root_cause(fn: Callable[..., Any], num_ranks: int = 3) -> tuple[Diagnosis, int]:
    outcome = ranks(fn, num_ranks, check=False)
    assert outcome.diagnoses, f"{fn.__name__}: nothing found; exit code {outcome.exit_code}"
    return outcome.diagnoses[0], outcome.exit_code


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


PARALLEL = (
    HEAD
    + """
pairs = [dist.new_group([i, i + 1]) for i in range(0, size, 2)]
columns = [dist.new_group(list(range(i, size, 2))) for i in range(2)]
pair, column = pairs[rank // 2], columns[rank % 2]

def pair_sum(t):
    dist.all_reduce(t, group=pair)

for step in range(4):
    if not (SKIPS and rank == 5 and step == 2):
        pair_sum(torch.ones(4))
    if not SKIPS and torch.tensor([rank == 4 and step == 2]).any():
        pair_sum(torch.ones(4))
    dist.all_reduce(torch.ones(8), group=TRAINS)
    dist.barrier()
"""
)


@pytest.mark.parametrize("trains", ["dist.group.WORLD", "column"])
def test_circle_of_a_call_that_no_one_expects(script: Scripts, trains: str) -> None:
    """The culprit of a circle is the rank whose group alone has made one call more than the groups beside it, and not
    the rank that it waits for; if that rank has left out a call, it is the culprit.
    """
    extra = script(PARALLEL.replace("TRAINS", trains).replace("SKIPS", "False"), 8).outcome.diagnoses[0]
    assert (extra.kind, extra.culprits, extra.victims) == (Kind.EXTRA_COLLECTIVE, (4,), (0, 1, 2, 3, 5, 6, 7))
    assert "the other groups of 2 ranks have made 3 calls" in extra.explanation
    skipped = script(PARALLEL.replace("TRAINS", "dist.group.WORLD").replace("SKIPS", "True"), 8).outcome.diagnoses[0]
    assert (skipped.kind, skipped.culprits) == (Kind.MISSING_RANK, (5,))


def test_circle_of_one_call_on_two_groups(script: Scripts) -> None:
    """One call on two groups: the culprit is the rank that is alone in its group, however the circle goes."""
    ran = script(
        HEAD
        + """
pair = dist.new_group([2, 3])
dist.all_reduce(torch.ones(4), group=pair if rank == 2 else None)
dist.all_reduce(torch.ones(8), group=pair if rank == 2 else None)
""",
        4,
    )
    assert ran.outcome.diagnoses[0].culprits == (2,)
