"""Futures of calls on GPUs: who waits for one makes a stream wait, as torch's futures with devices do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import distsim

NUMEL = 1 << 28
"""1 GiB of float32: some milliseconds of an all_reduce."""


def ran(body: Any, **options: Any) -> list[float]:
    """What *body* returns on the first of two GPUs."""
    outcome = distsim.simulate(body, "dgx-h100:1", nproc_per_node=2, **options)
    assert outcome.exit_code == 0, outcome.failures
    found: list[float] = outcome.results[0]
    return found


def begin() -> tuple[torch.Tensor, Any, Any]:
    """A large tensor, and a function that notes the moment in the current stream, in a list of events."""
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank())
    x = torch.empty(NUMEL, device="cuda")
    dist.barrier(device_ids=[dist.get_rank()])
    noted: list[Any] = []

    def note() -> None:
        noted.append(torch.cuda.Event(enable_timing=True))
        noted[-1].record()

    return x, note, noted


def milliseconds(noted: list[Any]) -> list[float]:
    """Of each event after the first."""
    torch.cuda.synchronize()
    return [noted[0].elapsed_time(event) for event in noted[1:]]


def test_waiting_for_a_future_makes_the_stream_wait() -> None:
    """The host goes on at once; the current stream stands behind the all_reduce from the wait on, not before; value()
    has nobody wait."""

    def body() -> list[float]:
        x, note, noted = begin()
        note()
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        future = work.get_future()
        assert future.done()
        assert future.value()[0] is x
        note()
        future.wait()
        note()
        return milliseconds(noted)

    before, after = ran(body)
    assert before < 1.0
    assert after > 2.0


def test_what_then_was_given_runs_on_a_stream_that_waits() -> None:
    """The callback's kernels are behind the all_reduce and not in the current stream, which stands behind them once the
    second future was waited for, alone or among others."""

    def body(together: bool) -> list[float]:
        x, note, noted = begin()
        note()
        work = dist.all_reduce(x, async_op=True)
        assert work is not None

        def halve(future: Any) -> torch.Tensor:
            half: torch.Tensor = future.value()[0].div_(2)
            note()
            return half

        halved = work.get_future().then(halve)
        note()
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        if together:
            torch.futures.wait_all([halved])
        else:
            halved.wait()
        note()
        return milliseconds(noted)

    for together in (False, True):
        callback, current, waited = ran(lambda together=together: body(together))
        assert current < 1.0
        assert callback > 2.0
        assert waited >= callback


def test_a_future_of_the_program_has_a_moment_in_its_stream() -> None:
    """Future(devices=) stands for what the current stream had when its result was set; one without devices for
    nothing."""

    def body(devices: list[str] | None) -> list[float]:
        x, note, noted = begin()
        note()
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(8):
                x.mul_(2)
            future.set_result(x)
        future.wait()
        note()
        return milliseconds(noted)

    (with_devices,) = ran(lambda: body([f"cuda:{n}" for n in range(2)]))
    (without,) = ran(lambda: body(None))
    assert with_devices > 2.0
    assert without < 1.0


def test_a_hook_of_ddp_is_over_when_backward_is() -> None:
    """Each bucket's callback comes after its all_reduce, and what follows backward in the stream after them all, with
    a static graph or without."""

    def body(static: bool) -> list[float]:
        _, note, noted = begin()
        net = torch.nn.Sequential(*(torch.nn.Linear(8192, 8192, bias=False, device="cuda") for _ in range(3)))
        ddp = torch.nn.parallel.DistributedDataParallel(
            net, device_ids=[dist.get_rank()], bucket_cap_mb=1, static_graph=static, gradient_as_bucket_view=True
        )
        called: list[Any] = []

        def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP looks at annotations, and not at strings
            work = dist.all_reduce(bucket.buffer(), async_op=True)
            assert work is not None

            def divide(future: Any) -> torch.Tensor:
                mean: torch.Tensor = future.value()[0].div_(2)
                called.append(torch.cuda.Event(enable_timing=True))
                called[-1].record()
                return mean

            return work.get_future().then(divide)

        ddp.register_comm_hook(None, hook)
        for _ in range(3):  # buckets are made anew in the second, or third with a static graph
            called.clear()
            noted.clear()
            note()
            ddp(torch.empty(64, 8192, device="cuda")).sum().backward()
            note()
        dist.all_reduce(net[0].weight.grad)
        note()
        torch.cuda.synchronize()
        alone = noted[1].elapsed_time(noted[2])
        return [alone, *(noted[0].elapsed_time(event) for event in (noted[1], *called))]

    for static in (False, True):
        alone, after, *callbacks = ran(lambda static=static: body(static))
        assert len(callbacks) == 3
        for place, moment in enumerate(callbacks, 1):
            assert place * alone * 0.9 < moment <= after


def test_what_cannot_be_called_is_refused_as_by_torch() -> None:
    """A callback of None is torch's own error, in a rank too."""

    def body() -> None:
        future: torch.futures.Future[int] = torch.futures.Future()
        for take in (future.then, future.add_done_callback):
            with pytest.raises(TypeError, match="incompatible function arguments"):
                take(None)

    assert distsim.simulate(body, "dgx-h100:1", nproc_per_node=2).exit_code == 0


def test_the_result_of_a_call_is_known_when_its_kernel_has_ended() -> None:
    """NCCL's watchdog completes it with WorkResult.SUCCESS; the host waits for it, not a stream."""

    def body() -> list[float]:
        x, _, _ = begin()
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        future = work.get_future_result()
        assert not future.done()
        result = future.wait()
        assert work.is_completed()
        return [float(result)]

    assert ran(body) == [0.0]
