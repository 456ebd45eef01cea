"""Calls on simulated GPUs that never end are told, though no host waits for them."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import distsim
from distsim.sim.device.memory import current_stream
from distsim.sim.device.timeline import Mark
from distsim.sim.isolation.process import require_task


def begin(**given: Any) -> int:
    dist.init_process_group("nccl", **given)
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    return rank


def ones(count: int = 100) -> torch.Tensor:
    return torch.ones(count, device="cuda")


def run(body: Callable[..., Any], num_ranks: int = 3, **how: Any) -> distsim.Outcome:
    return distsim.simulate(body, on="dgx-h100:1", nproc_per_node=num_ranks, **how)


def alone_before_the_end() -> None:
    if begin() != 2:
        dist.all_reduce(ones())
    dist.destroy_process_group()


def alone_at_the_end() -> None:
    if begin() != 2:
        dist.all_reduce(ones())


def of_another_size() -> None:
    dist.all_reduce(ones(101 if begin() == 2 else 100))
    dist.destroy_process_group()


def looks_at_a_work() -> None:
    if begin() != 2:
        work = dist.all_reduce(ones(), async_op=True)
        assert work is not None
        while not work.is_completed():
            pass


def looks_and_computes() -> None:
    if begin() != 2:
        work, x = dist.all_reduce(ones(), async_op=True), ones(1)
        assert work is not None
        while not work.is_completed():
            x += 1


def looks_at_an_event() -> None:
    event = torch.cuda.Event()
    if begin() != 2:
        dist.all_reduce(ones())
        event.record()
        while not event.query():
            pass


def naps_and_looks_at_a_stream() -> None:
    if begin() != 2:
        dist.all_reduce(ones())
        while not torch.cuda.current_stream().query():
            time.sleep(0.001)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (alone_before_the_end, "missing_rank"),
        (alone_at_the_end, "missing_rank"),
        (of_another_size, "shape_mismatch"),
        (looks_at_a_work, "missing_rank"),
        (looks_and_computes, "missing_rank"),
        (looks_at_an_event, "missing_rank"),
        (naps_and_looks_at_a_stream, "missing_rank"),
    ],
)
def test_a_call_that_cannot_end_is_told(body: Callable[[], None], kind: str) -> None:
    """Where a host does not wait for its GPU, or looks again and again, as where it waits: rank 2 is named."""
    found = run(body).diagnoses[0]
    assert (str(found.kind), found.culprits, found.call and found.call.op) == (kind, (2,), "all_reduce")


def reads_again_and_again() -> None:
    x = torch.zeros(1, device="cuda")
    if begin() == 0:
        while not (x > 0).all():
            time.sleep(0.1)


def test_a_value_that_nothing_changes() -> None:
    """A loop that waits for a value on its GPU to change, which nobody writes to, is a hang; the report says which."""
    outcome = run(reads_again_and_again, 2)
    (found,) = outcome.diagnoses
    assert (str(found.kind), found.culprits, outcome.exit_code) == ("host_stuck", (0,), 3)
    assert "not (x > 0).all() to change" in found.explanation


def test_loops_that_end() -> None:
    """Values that another thread writes, or that the host counts up to; calls and kernels that end while somebody
    looks."""

    def body() -> Any:
        rank = begin()
        x, limit, counted = torch.zeros(1, device="cuda"), torch.tensor(3_000, device="cuda"), 0

        def write() -> None:
            time.sleep(3)
            x.fill_(1)

        writer = threading.Thread(target=write)
        writer.start()
        while x.item() == 0:
            time.sleep(0.001)
        while counted < limit.item():
            counted += 1
        if rank == 1:
            time.sleep(5)
        work = dist.all_reduce(ones(), async_op=True)
        assert work is not None
        while not work.is_completed():
            pass
        torch.randn(8192, 8192, device="cuda") @ torch.randn(8192, 8192, device="cuda")
        while not torch.cuda.current_stream().query():
            pass
        return counted, 8.0 < time.monotonic() - started < 9.0

    started = 0.0

    def timed() -> Any:
        nonlocal started
        started = time.monotonic()
        return body()

    assert run(timed, 2).results == [(3_000, True)] * 2


def comes_late(timeout_s: float, late_s: float) -> str:
    if begin(timeout=timedelta(seconds=timeout_s)) == 1:
        time.sleep(late_s)
    dist.all_reduce(ones())
    torch.cuda.synchronize()
    return "came"


def test_the_watchdog(capfd: pytest.CaptureFixture[str]) -> None:
    """A call beyond its group's timeout takes its process down in torch's words, and who did not come is named; the
    host that works on beside it is taken down as well."""

    def works_on() -> None:
        if begin() == 1:
            time.sleep(1_000)
        dist.all_reduce(ones(), async_op=True)
        for _ in range(50):
            time.sleep(20)
            ones()

    assert run(comes_late, 2, args=(30, 29)).results == ["came"] * 2
    for body, args, limit_s in ((comes_late, (30.0, 100.0), 30), (works_on, (), 600)):
        outcome = run(body, 2, args=args)
        (found,) = outcome.diagnoses
        assert (str(found.kind), found.culprits, outcome.exit_code) == ("missing_rank", (1,), 3)
        told = capfd.readouterr().err
        assert (
            "[Rank 0] Watchdog caught collective operation timeout: all_reduce #1 ran for "
            f"{limit_s}000 milliseconds before timing out." in told
        )
        assert "we are taking the entire process down" in told
        assert outcome.evidence is not None
        assert outcome.evidence.ranks[0].signal == "SIGABRT"


def test_why_a_run_that_only_polls_was_ended_is_told() -> None:
    """A loop on is_completed for a call that nobody else will make: how long it looked on stands in the report."""

    def body() -> None:
        if begin() == 0:
            work = dist.all_reduce(ones(), async_op=True)
            assert work is not None
            while not work.is_completed():
                pass

    outcome = run(body, 2)
    assert [str(found.kind) for found in outcome.diagnoses] == ["missing_rank"]
    (note,) = [note for note in outcome.notes if note.startswith("the run was ended: for ")]
    assert "rank 0 polled" in note.lower()
    assert outcome.virtual_time_s > 60


def test_torchrun_ends_the_others_of_the_node() -> None:
    """Once the watchdog has taken a rank down its launcher ends the node's other ranks; other nodes' go on."""

    def body() -> Any:
        rank = begin(timeout=timedelta(seconds=30))
        if rank == 1:
            signal.signal(signal.SIGTERM, lambda *_: None)
        if rank == 0:
            dist.all_reduce(ones())
            torch.cuda.synchronize()
        for _ in range(100):
            time.sleep(1)
        return "came to its end"

    outcome = distsim.simulate(body, on="dgx-h100:2", nnodes=2, nproc_per_node=3, check=False)
    assert outcome.results == [None] * 3 + ["came to its end"] * 3
    assert outcome.evidence is not None
    ranks = outcome.evidence.ranks
    assert [ranks[rank].signal for rank in range(6)] == ["SIGABRT", "SIGKILL", "SIGTERM", None, None, None]
    assert [str(found.kind) for found in outcome.diagnoses] == ["missing_rank"]
    assert [note for note in outcome.notes if note.startswith("torchrun ended rank 2 with SIGTERM")]


def test_a_program_that_asks_for_no_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    """TORCH_NCCL_ASYNC_ERROR_HANDLING=0: nothing is done about a late call; with TORCH_NCCL_BLOCKING_WAIT=1, and a
    timeout given to `wait`, the program gets the error itself."""

    def waits(limit: timedelta | None) -> Any:
        rank = begin(timeout=timedelta(seconds=30))
        if rank == 1:
            time.sleep(100)
        work = dist.all_reduce(ones(), async_op=True)
        assert work is not None
        try:
            work.wait() if limit is None else work.wait(limit)
        except dist.DistBackendError as error:
            return str(error).partition("blocking wait, ")[2]
        return "came"

    assert run(waits, 2, args=(timedelta(seconds=3),), check=False).results[0] == "after 3000 ms."
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    assert run(waits, 2, args=(None,)).results[0] == "after 30000 ms."
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT")
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    assert run(comes_late, 2, args=(30.0, 100.0)).results == ["came"] * 2


def test_microseconds_late_in_a_long_run() -> None:
    """Kernels end where the clock's numbers are so large that what is left of one is less than their last digit."""

    def body() -> Any:
        begin()
        time.sleep(1e5)
        x = ones()
        for _ in range(20):
            x += 1
        dist.all_reduce(x)
        return x[0].item()

    assert run(body, 2).results == [42.0, 42.0]


def test_a_rank_whose_gpu_never_ends_has_not_finished() -> None:
    """No call is open, and nothing is left that could wake it: a wait for kernels is a hang, too."""

    def body() -> None:
        ones()
        task = require_task()
        gpu = task.process.accelerators.devices[0]
        gpu.wait_for(current_stream(task, gpu), Mark(0.0), task.now_s())
        ones()
        torch.cuda.synchronize()

    outcome = run(body, 2, check=False)
    assert outcome.exit_code == 3
    (diagnosis,) = outcome.diagnoses
    assert diagnosis.kind.value == "host_stuck"
    assert diagnosis.explanation.startswith("Ranks 0,1 wait on the host: the kernels of its GPU")
