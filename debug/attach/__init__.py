"""A job that was started without distsim: its ranks are found in /proc, their stacks read by py-spy, and judged.

Read `ranks.py` (which processes are ranks, and two samples of each), `positions.py` (a stack as a position in
torch.distributed), `judge.py` (from positions to diagnoses; pure), `ras.py` and `joined.py` (what other services of the
job say), `hosts.py` (all of it, host by host), `watch.py` (again and again).
"""

from __future__ import annotations

from distsim.debug.attach.hosts import HostPositions, judge_hosts, look_at_host
from distsim.debug.attach.joined import (
    Joined,
    ask_debug_server,
    ask_flight_recorders,
    find_debug_server,
    join,
    ras_facts,
)
from distsim.debug.attach.judge import Judged, judge
from distsim.debug.attach.positions import Doing, Position, position_of
from distsim.debug.attach.ranks import StackWatch, find_ranks
from distsim.debug.attach.ras import RasStatus, ask_ras, read_status
from distsim.debug.attach.watch import JobWatch, LookCounts, watch_job

__all__ = [
    "Doing",
    "HostPositions",
    "JobWatch",
    "Joined",
    "Judged",
    "LookCounts",
    "Position",
    "RasStatus",
    "StackWatch",
    "ask_debug_server",
    "ask_flight_recorders",
    "ask_ras",
    "find_debug_server",
    "find_ranks",
    "join",
    "judge",
    "judge_hosts",
    "look_at_host",
    "position_of",
    "ras_facts",
    "read_status",
    "watch_job",
]
