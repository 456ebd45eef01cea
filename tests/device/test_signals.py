"""Signals between GPUs: of symmetric memory, and of torch 2.14's windows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import distsim
from distsim.debug.records.kinds import Kind


def run(body: Callable[[int], Any], nproc: int = 2, on: str = "dgx-h100:1") -> Any:
    def main() -> Any:
        dist.init_process_group("nccl")
        torch.cuda.set_device(dist.get_rank())
        answer = body(dist.get_rank())
        torch.cuda.synchronize()
        return answer

    return distsim.simulate(main, on=on, nproc_per_node=nproc, check=False)


def handle() -> Any:
    """A handle of symmetric memory of all ranks."""
    from torch.distributed import _symmetric_memory

    return _symmetric_memory.rendezvous(_symmetric_memory.empty(1024, device="cuda"), dist.group.WORLD)


def test_signals_are_matched_by_channel() -> None:
    """Both ranks signal before they wait, on two channels, and the later channel first; the table has each signal."""

    def body(me: int) -> None:
        signals = handle()
        for channel in (0, 3):
            signals.put_signal(1 - me, channel)
        for channel in (3, 0):
            signals.wait_signal(1 - me, channel)

    outcome = run(body)
    assert (outcome.exit_code, outcome.diagnoses) == (0, []), outcome
    groups = {total.group: total.count for total in outcome.collectives if "signals" in total.group}
    assert set(groups) == {
        f"default_pg (signals {way}{where})" for way in ("0->1", "1->0") for where in (", channel 0", ", channel 3")
    }


def test_a_lost_signal_is_named() -> None:
    """The third signal never comes: the verdict has its number, who waits, who never sent it, and no advice on tags."""

    def body(me: int) -> None:
        signals = handle()
        for step in range(3):
            if me == 0 and step < 2:
                signals.put_signal(1)
            if me == 1:
                signals.wait_signal(0)
        signals.put_signal(1 - me, channel=2)

    (diagnosis,) = run(body).diagnoses
    assert (diagnosis.kind, diagnosis.culprits, diagnosis.victims) == (Kind.P2P_UNMATCHED, (0,), (1,))
    assert diagnosis.explanation.startswith(
        "Rank 1 waits for signal 3 of rank 0 (channel 0), at device/test_signals.py:"
    )
    assert "Rank 0 never sent it" in diagnosis.explanation
    assert diagnosis.suggestion.startswith("Make rank 0 send it, or drop the wait at device/test_signals.py:")


needs_windows = pytest.mark.skipif(not hasattr(dist.ProcessGroup, "new_window"), reason="torch has no windows (2.14)")


@needs_windows
@pytest.mark.parametrize("on", ["dgx-h100:1", "dgx-h100:2"])
def test_a_put_takes_the_time_of_its_bytes(on: str) -> None:
    """A put of 256 MiB signals its end: the wait for it ends after the bytes have crossed NVLink, or the network."""

    def body(me: int) -> float:
        window = dist._new_window(torch.empty(1 << 27, dtype=torch.bfloat16, device="cuda"))
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        if me == 0:
            window.put(torch.empty(1 << 27, dtype=torch.bfloat16, device="cuda"), 1, 0, False)
        else:
            window.wait_signal(0, False)
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)

    def main() -> float:
        dist.init_process_group("nccl")
        torch.cuda.set_device(0 if on.endswith("2") else dist.get_rank())
        return body(dist.get_rank())

    nproc = 1 if on.endswith("2") else 2
    outcome = distsim.simulate(main, on=on, nproc_per_node=nproc, check=False)
    assert outcome.exit_code == 0, outcome
    milliseconds = (1 << 28) / (370e9 if nproc == 2 else 48e9) * 1e3
    for took in outcome.results:
        assert milliseconds <= took < 1.3 * milliseconds + 0.1


@needs_windows
def test_a_lost_signal_of_a_window_is_named() -> None:
    """A rank that does not put is the culprit."""

    def body(me: int) -> None:
        window = dist._new_window(torch.empty(8, device="cuda"))
        if me == 1:
            window.wait_signal(0, False)

    (diagnosis,) = run(body).diagnoses
    assert (diagnosis.kind, diagnosis.culprits) == (Kind.P2P_UNMATCHED, (0,))
    assert "waits for signal 1 of rank 0" in diagnosis.explanation


@needs_windows
def test_what_a_window_refuses() -> None:
    """No tensor, one on the CPU, too many elements, a rank that is not there, and a group of gloo."""

    def body(me: int) -> list[str]:
        window = dist._new_window()
        errors = []
        small, large = torch.empty(8, device="cuda"), torch.empty(9, device="cuda")
        for call in (
            lambda: window.signal(0, False),
            lambda: window.tensor_register(torch.empty(8)),
            lambda: window.tensor_register(small),
            lambda: window.put(large, 1, 0, False),
            lambda: window.signal(2, False),
            lambda: dist.new_group(backend="gloo").new_window(),
        ):
            try:
                call()
            except (RuntimeError, distsim.DistsimError) as error:
                errors.append(str(error))
        return errors

    for errors in run(body).results:
        words = (
            "tensor_register first",
            "on a GPU",
            "at most 8 elements",
            "from 0 to 1",
            "does not support new_window",
        )
        assert all(word in error for word, error in zip(words, errors, strict=True)), errors
