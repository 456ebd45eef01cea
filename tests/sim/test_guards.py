"""What every simulation looks for unasked, and only warns of."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import distsim
from distsim.sim.faults.tensors import Guards


def nan() -> None:
    dist.init_process_group("gloo")
    t = torch.ones(4)
    for step in range(3):
        if dist.get_rank() == 1 and step == 1:
            t[0] = float("nan")
        dist.all_reduce(t)


def infinity() -> None:
    dist.init_process_group("gloo")
    t = torch.tensor([float("inf"), float("-inf")])
    dist.all_reduce(t, op=dist.ReduceOp.MIN)
    dist.all_reduce(torch.ones(3, dtype=torch.int64))
    dist.all_reduce(torch.ones(0))


def opposite_infinities() -> float:
    """Their sum is NaN, though none was sent."""
    dist.init_process_group("gloo")
    t = torch.full((4,), float("inf") if dist.get_rank() else float("-inf"))
    dist.all_reduce(t)
    return float(t[0])


def in_flight() -> None:
    dist.init_process_group("gloo")
    t = torch.ones(8)
    work = dist.all_reduce(t, async_op=True)
    t[0] = 5.0
    work.wait()


def in_time() -> None:
    dist.init_process_group("gloo")
    t = torch.ones(1 << 19)
    work = dist.all_reduce(t, async_op=True)
    work.wait()
    t.add_(1.0)
    work = dist.all_reduce(t[: 1 << 18], async_op=True)
    t[1 << 18 :].zero_()
    work.wait()


def inference() -> None:
    dist.init_process_group("gloo")
    with torch.inference_mode():
        dist.all_reduce(torch.ones(4), async_op=True).wait()
        dist.all_reduce(torch.ones(1 << 19), async_op=True).wait()
        send = dist.get_rank() == 0
        work = (dist.isend if send else dist.irecv)(torch.ones(4), 1 - dist.get_rank())
        assert work is not None
        work.wait()


def sparse() -> None:
    dist.init_process_group("gloo")
    t = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.tensor([1.0, 2.0]), (4,), check_invariants=True)
    dist.all_reduce(t, async_op=True).wait()


def inference_in_flight() -> None:
    dist.init_process_group("gloo")
    with torch.inference_mode():
        t = torch.ones(1 << 19)
        work = dist.all_reduce(t, async_op=True)
        t[0] = 5.0
        work.wait()


def late() -> None:
    dist.init_process_group("gloo")
    for _ in range(10):
        time.sleep(2.0 if dist.get_rank() == 2 else 1.0)
        dist.barrier()


def profiled() -> list[str]:
    dist.init_process_group("gloo")
    t = torch.ones(8)
    with torch.profiler.profile() as profile:
        work = dist.all_reduce(t, async_op=True)
        assert work is not None
        work.wait()
    return [event.name for event in profile.events() if event.name.startswith("aten::")]


def kinds(outcome: distsim.Outcome) -> list[tuple[str, tuple[int, ...]]]:
    return [(d.kind.value, d.culprits) for d in outcome.diagnoses]


def test_the_first_nan_is_a_warning_with_rank_and_call() -> None:
    """Nobody asked for it, so it fails nothing; in the JSON it is marked as a warning."""
    outcome = distsim.simulate(nan, nproc_per_node=3)
    assert (outcome.exit_code, kinds(outcome)) == (0, [("nan", (1,))])
    assert str(outcome.diagnoses[0].call) == "all_reduce #2"
    assert outcome.diagnoses[0].to_json()["warning"] is True


def test_infinity_is_no_nan() -> None:
    """The start of a minimum, a mask: sent on purpose."""
    assert distsim.simulate(infinity, nproc_per_node=2).diagnoses == []


def test_infinities_that_cancel_are_no_nan() -> None:
    """What comes out is NaN, as on machines; nobody sent one."""
    outcome = distsim.simulate(opposite_infinities, nproc_per_node=2)
    assert [math.isnan(result) for result in outcome.results] == [True, True]
    assert outcome.diagnoses == []


@pytest.mark.filterwarnings("ignore:.*all_reduce_coalesced:FutureWarning")
@pytest.mark.parametrize("how", ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "scatter", "coalesced", "sparse"])
def test_a_nan_is_found_in_what_the_inputs_come_to(how: str) -> None:
    """Of the reductions, whichever it is, the rank that brought it is named."""

    def body() -> None:
        dist.init_process_group("gloo")
        t = torch.ones(4)
        if dist.get_rank() == 1:
            t[3] = float("nan")
        if how == "scatter":
            dist.reduce_scatter_single(torch.empty(2), t)
        elif how == "coalesced":
            dist.all_reduce_coalesced([torch.ones(2), t])
        elif how == "sparse":
            dist.all_reduce(torch.ones(4).to_sparse())
            dist.all_reduce(t)
        else:
            dist.all_reduce(t, op=getattr(dist.ReduceOp, how))

    assert kinds(distsim.simulate(body, nproc_per_node=2)) == [("nan", (1,))]


def test_a_buffer_written_in_flight_is_a_warning() -> None:
    """Ranks that do the same at the same line are one."""
    outcome = distsim.simulate(in_flight, nproc_per_node=2)
    assert (outcome.exit_code, kinds(outcome)) == (0, [("buffer_modified_in_flight", (0, 1))])


@pytest.mark.parametrize("program", [inference, sparse])
def test_tensors_without_a_count_of_writes_or_without_plain_bytes_are_fine(program: Callable[[], None]) -> None:
    """`torch.inference_mode` counts no writes to a tensor, a sparse one has no bytes to add up."""
    assert kinds(distsim.simulate(program, nproc_per_node=2)) == []


def test_a_large_buffer_written_in_flight_is_seen_without_a_count_of_writes() -> None:
    """Where torch does not count, the bytes themselves are looked at, however many."""
    assert kinds(distsim.simulate(inference_in_flight, nproc_per_node=2)) == [("buffer_modified_in_flight", (0, 1))]


def test_writing_after_the_wait_or_beside_the_buffer_is_fine() -> None:
    """Also where torch's count of writes goes up for another part of the same storage."""
    assert distsim.simulate(in_time, nproc_per_node=2).diagnoses == []


def test_guards_cost_no_virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is looked at is not what the program computes."""
    looked = distsim.simulate(in_flight, nproc_per_node=2).virtual_time_s
    monkeypatch.setattr(Guards, "on_arrival", lambda self, arrival: None)
    monkeypatch.setattr(Guards, "on_finish", lambda self, members, folded: None)
    assert distsim.simulate(in_flight, nproc_per_node=2).virtual_time_s == looked


def test_guards_are_not_in_the_programs_profile() -> None:
    """To look at a buffer's bytes takes no operator of torch's."""
    assert distsim.simulate(profiled, nproc_per_node=2).results == [[], []]


def test_a_rank_that_is_a_second_late_at_every_step_is_a_warning() -> None:
    """Half of the time is lost, and no single wait is long."""
    outcome = distsim.simulate(late, nproc_per_node=4)
    assert (outcome.exit_code, kinds(outcome)) == (0, [("straggler", (2,))])
    assert "47% of the time" in outcome.diagnoses[0].explanation


def test_an_outcome_shows_itself_in_three_lines() -> None:
    """At a prompt: what ran, how it ended, what is wrong or what came of it."""
    healthy = repr(distsim.simulate(infinity, nproc_per_node=2)).splitlines()
    assert len(healthy) == 3
    assert healthy[0] == "<Outcome of infinity on dgx-h100:1: 2 ranks, seed 0"
    assert healthy[2] == " results: [None, None]>"
    assert repr(distsim.simulate(late, nproc_per_node=4)).splitlines()[2].startswith(" straggler: Rank 2 came late")


def test_outputs_that_are_one_tensor_are_a_warning() -> None:
    """`[tensor] * n` as the outputs of all_gather leaves the last part alone; a tensor each is right."""

    def gathers(repeated: bool) -> None:
        dist.init_process_group("gloo")
        parts = [torch.zeros(2)] * 2 if repeated else [torch.zeros(2), torch.zeros(2)]
        dist.all_gather(parts, torch.ones(2))

    outcome = distsim.simulate(gathers, args=(True,), nproc_per_node=2)
    assert (outcome.exit_code, kinds(outcome)) == (0, [("aliased_outputs", (0, 1))])
    assert not distsim.simulate(gathers, args=(False,), nproc_per_node=2).diagnoses
