"""The pace of a job on several hosts: their monitors send the calls, and clocks are not compared."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from distsim.debug.monitor.straggler_watch import PaceWatch
from distsim.debug.records import Evidence, RankState
from tests.debug.pace_families import own_work
from tests.debug.test_pace_notes import records_of


def test_a_slow_host_of_four_is_found_by_what_the_others_send() -> None:
    """By name, and none of its ranks; each host's clock is off by hours."""
    work_s = own_work("jitter of 2%", 0, ranks=16)
    work_s[4:8] *= 1.1
    records = records_of(work_s)
    for rank, calls in records.items():
        for call in calls:
            call.issued_s += 3600.0 * (rank // 4)
            call.completed_s = (call.completed_s or 0.0) + 3600.0 * (rank // 4)
    states = {rank: RankState(rank, host=f"gpu-{rank // 4}") for rank in range(16)}
    host: Any = SimpleNamespace(readers={}, world_size=16)
    watch = PaceWatch()
    assert watch.look(host, lambda: Evidence(16, states, records)) is False
    looks = [[note.text for note in watch.new_notes([])] for _ in range(3)]
    assert looks[:2] == [[], []]
    assert [text.partition(":")[0] for text in looks[2]] == ["slow host gpu-1"]


def test_a_slow_rank_on_another_host_is_named() -> None:
    """Without its line, which is in a ring on that host."""
    work_s = own_work("jitter of 2%", 0, ranks=4)
    work_s[3] *= 1.1
    host: Any = SimpleNamespace(readers={}, world_size=4)
    states = {rank: RankState(rank, host=f"gpu-{rank // 2}") for rank in range(4)}
    watch = PaceWatch()
    assert watch.look(host, lambda: Evidence(4, states, records_of(work_s))) is True
    assert [finding.ranks for finding in watch.findings()] == [(3,)]
