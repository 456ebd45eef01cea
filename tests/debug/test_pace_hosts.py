"""The pace of a job on several hosts: their monitors send the calls, and compare their clocks."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from distsim.debug.diagnosis.pace.job import JobPace, outlook_text
from distsim.debug.diagnosis.pace.turns import RankCalls
from distsim.debug.monitor.sent_calls import HostClock, SentCalls, packed
from distsim.debug.monitor.straggler_watch import PaceWatch
from distsim.debug.records import Group
from distsim.text.codec import pack, unpack
from tests.debug.pace_families import Floats, own_work

HOUR_S = 3600.0
EXACT = HostClock(HOUR_S, 1e-4)


def calls_of(work_s: Floats, is_async: bool) -> list[RankCalls]:
    """One collective in each step, in which all wait for the last one; asynchronous ones are waited for, too."""
    ranks, steps = work_s.shape
    released_s = np.concatenate(([0.0], np.cumsum(work_s.max(axis=0) + 0.01)))
    zeros, seq = np.zeros(steps, np.int64), np.arange(1, steps + 1)
    meets = np.ones(steps, bool)
    issued_s = released_s[:-1] + work_s
    return [
        RankCalls(zeros, seq, zeros, issued_s[rank], released_s[1:], meets, meets & is_async) for rank in range(ranks)
    ]


class OtherHosts:
    """All hosts of a job, as the monitor of one without ranks sees them; a number of ranks on each."""

    def __init__(
        self, calls: Sequence[RankCalls], on_each: int, clock: HostClock | None, portion: int = 1 << 20
    ) -> None:
        self.calls, self.on_each, self.clock, self.portion = calls, on_each, clock, portion
        self.group = Group("0", "default_pg", tuple(range(len(calls))))

    def __call__(self, since: Any) -> list[tuple[SentCalls, HostClock | None]]:
        job = JobPace()
        job.numbers[self.group, 0] = 0
        answers = []
        for first in range(0, len(self.calls), self.on_each):
            host = first // self.on_each
            sent = {}
            for rank in range(first, first + self.on_each):
                begin, mine = since.get(rank, 0), self.calls[rank]
                end = min(begin + self.portion, len(mine.seq))
                fields = {name: value[begin:end] for name, value in vars(mine).items()}
                fields |= {name: fields[name] + HOUR_S * host for name in ("issued_s", "ended_s")}
                sent[rank] = end, RankCalls(**fields)
            clock = None if self.clock is None else HostClock(HOUR_S * host, self.clock.error_s)
            answers.append((unpack(pack(packed(f"gpu-{host}", job, sent)), SentCalls), clock))
        return answers


def watched(others: OtherHosts, looks: int = 1) -> tuple[PaceWatch, Any]:
    host: Any = SimpleNamespace(readers={}, world_size=len(others.calls), notes=[])
    watch = PaceWatch()
    for _ in range(looks):
        watch.look(host, others)
    return watch, host


def test_a_slow_host_of_four_is_found_by_what_the_others_send() -> None:
    """By name, and none of its ranks; each host's clock is off by hours, and blocking calls need none."""
    work_s = own_work("jitter of 2%", 0, ranks=16)
    work_s[4:8] *= 1.1
    watch, _ = watched(OtherHosts(calls_of(work_s, is_async=False), 4, None))
    assert watch.findings() == []
    looks = [[note.text for note in watch.new_notes([])] for _ in range(3)]
    assert looks[:2] == [[], []]
    assert [text.partition(":")[0] for text in looks[2]] == ["slow host gpu-1"]


@pytest.mark.parametrize("portion", [1 << 20, 13])
def test_a_slow_rank_on_another_host_is_named(portion: int) -> None:
    """Without its line, which is in a ring on that host; also where each look brings a few calls more."""
    work_s = own_work("jitter of 2%", 0)
    work_s[3] *= 1.1
    watch, _ = watched(OtherHosts(calls_of(work_s, is_async=False), 2, None, portion), 1 + 200 // portion)
    assert [finding.ranks for finding in watch.findings()] == [(3,)]


@pytest.mark.parametrize(
    ("clock", "named", "unknown"),
    [
        (EXACT, [(3,)], ""),
        (HostClock(0.0, 0.05), [], "clocks is known to 50 ms only, so that asynchronous calls cannot be compared"),
        (None, [], "the difference of the hosts' clocks is not known"),
    ],
)
def test_asynchronous_calls_need_the_difference_of_the_clocks(
    clock: HostClock | None, named: list[tuple[int, ...]], unknown: str
) -> None:
    """Known to a hundredth of a step; otherwise nobody is named, and it is said why."""
    work_s = own_work("jitter of 2%", 0)
    work_s[3] *= 1.1
    watch, _ = watched(OtherHosts(calls_of(work_s, is_async=True), 2, clock))
    assert [finding.ranks for finding in watch.findings()] == named
    outlook = watch.job.outlook()
    assert outlook is not None
    assert unknown in outlook_text(outlook[1])


def test_calls_that_do_not_fit_are_left_out() -> None:
    """With a note; the monitor goes on."""
    others = OtherHosts(calls_of(own_work("jitter of 2%", 0), is_async=False), 2, None)
    broken = SentCalls("gpu-9", [], [], {9: (1, b"seven bytes"[:7])})
    host: Any = SimpleNamespace(readers={}, world_size=4, notes=[])
    PaceWatch().look(host, lambda since: [*others(since), (broken, None)])
    assert len(host.notes) == 1
    assert host.notes[0].startswith("host gpu-9 sent invalid calls, which are ignored")
