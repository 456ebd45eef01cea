"""Strict: how long a rank that was refused waits for the same to come at another, which took the call."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from distsim.debug.records import Group
from distsim.realexec.guard.recorder import GroupLog
from distsim.realexec.strict import queue as strict_queue

TICK_S = 0.001


class Taken:
    """A peer whose backend took the call."""

    rank = 1

    def refused(self, *_: Any) -> bool:
        return False

    def gone(self) -> bool:
        return False


def test_where_others_are_not_refused_it_waits_less_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that is refused at one rank in each step, and makes the call again, is not slowed down for long."""
    ticks = count()
    monkeypatch.setattr(strict_queue, "monotonic", lambda: next(ticks) * TICK_S)
    monkeypatch.setattr(strict_queue, "sched_yield", lambda: None)
    peers: list[Any] = [Taken()]
    rings_of: Any = None
    queue = strict_queue.Queue(GroupLog("0", (0, 1), 0), None, peers, Group("0", "", (0, 1)), 0, rings_of)
    waited = []
    for seq in range(1, 11):
        queue.again = seq, {1: (7, seq)}
        before = next(ticks)
        queue.settle(seq)
        waited.append((next(ticks) - before) * TICK_S)
    assert waited[0] > 0.4
    assert sum(waited) < 1, waited
