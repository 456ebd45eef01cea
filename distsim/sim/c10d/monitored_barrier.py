"""monitored_barrier: rank 0 waits for everyone and names who did not come."""

from __future__ import annotations

from datetime import timedelta

import simpy

from distsim.debug.records import CallRecord, CallWait, State
from distsim.sim.isolation.process import require_task

__all__ = ["MonitoredBarrier", "monitored_barrier"]


class MonitoredBarrier:
    """The n-th monitored barrier of a group: who has come, and the word that lets them go."""

    def __init__(self, env: simpy.Environment, size: int) -> None:
        self.size = size
        self.records: dict[int, CallRecord] = {}
        self.complete = env.event()
        self.released = env.event()
        self.failed = False

    def arrive(self, group_rank: int, record: CallRecord) -> None:
        self.records[group_rank] = record
        if len(self.records) == self.size and not self.complete.triggered:
            self.complete.succeed()


def monitored_barrier(
    record: CallRecord,
    meetings: dict[int, MonitoredBarrier],
    me: int,
    size: int,
    timeout: timedelta,
    wait_all_ranks: bool,
) -> None:
    """Semantics and words of ProcessGroupGloo::monitoredBarrier in torch 2.13: rank 0 raises naming the
    first missing rank (all of them with *wait_all_ranks*); the others learn that rank 0 failed. *record* is the call
    of the calling member, number *me* of *size*; *meetings* are those of its group."""
    task = require_task()
    meeting = meetings.setdefault(record.seq, MonitoredBarrier(task.world.env, size))
    meeting.arrive(me, record)
    limit_s = timeout.total_seconds()
    milliseconds = int(limit_s * 1000)
    if me == 0 and limit_s <= 0 and not wait_all_ranks and size > 1:  # gloo has no time left for the first
        record.state = State.FAILED
        record.error = f"[Rank 0]: Rank 1 failed to pass monitoredBarrier in {milliseconds} ms"
        meeting.failed = True
        meeting.released.succeed()
        raise RuntimeError(
            f"{record.error}\n Original exception: \nRank 0 timed out in monitoredBarrier after {milliseconds} ms.\n"
            "No ranks successfully processed in monitoredBarrier."
        )
    if me == 0:
        in_time = task.wait_until(meeting.complete, CallWait(record), limit_s)
        if in_time:
            meeting.released.succeed()
    else:
        # the others outlive rank 0's own timeout, as in torch, where rank 0's verdict ends them
        in_time = task.wait_until(meeting.released, CallWait(record), None if 0 in meeting.records else limit_s)
    if not in_time:
        record.state = State.FAILED
        missing = [rank for rank in range(size) if rank not in meeting.records]
        if me != 0:
            raise RuntimeError(_others(me, milliseconds))
        meeting.failed = True
        meeting.released.succeed()
        named = missing if wait_all_ranks else missing[:1]
        if wait_all_ranks:
            text = f"[Rank 0]: Ranks {', '.join(map(str, named))} failed to pass monitoredBarrier in {milliseconds} ms"
        else:
            text = f"[Rank 0]: Rank {named[0]} failed to pass monitoredBarrier in {milliseconds} ms"
        raise RuntimeError(text)
    if meeting.failed:
        record.state = State.FAILED
        raise RuntimeError(_others(me, milliseconds))
    record.started_s = record.completed_s = task.now_s()
    record.state = State.COMPLETED
    record.waited = True


def _others(rank: int, milliseconds: int) -> str:
    return (
        f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv from "
        f"rank 0. Please check rank 0 logs for faulty rank. (timeout {milliseconds} ms)"
    )
