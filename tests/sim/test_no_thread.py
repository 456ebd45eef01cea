"""A machine that gives no thread more: one line, and the run ends."""

from __future__ import annotations

import _thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import distsim
from distsim.errors import UsageError
from distsim.sim.kernel import baton


@pytest.mark.parametrize("given", [0, 3])
def test_a_rank_without_a_thread(given: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that have one are ended; nobody waits for one that never began."""
    left = given

    def start(*args: Any) -> int:
        nonlocal left
        left -= 1
        if left < 0:
            raise RuntimeError("can't start new thread")
        return _thread.start_new_thread(*args)

    def body() -> None:
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))

    monkeypatch.setattr(baton, "_thread", SimpleNamespace(start_new_thread=start, allocate_lock=_thread.allocate_lock))
    with pytest.raises(UsageError, match=r"each simulated rank is a thread, 8 in all, and this machine gives no more"):
        distsim.simulate(body, on="ethernet-cpu:4")
    monkeypatch.undo()
    assert not distsim.simulate(body, on="ethernet-cpu:4").diagnoses
