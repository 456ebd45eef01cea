"""A job that was started without distsim: its ranks are found in /proc, their stacks read by py-spy, and judged.

Read `processes.py` (which processes are ranks), `stacks.py` (two samples of each), `places.py` (a stack as a place in
torch.distributed), `judge.py` (from places to diagnoses; pure), `hosts.py` (all of it, host by host).
"""

from __future__ import annotations

from distsim.debug.attach.hosts import HostPlaces, judge_hosts, look_at_host
from distsim.debug.attach.judge import Judged, judge
from distsim.debug.attach.places import Doing, Place, place_of

__all__ = ["Doing", "HostPlaces", "Judged", "Place", "judge", "judge_hosts", "look_at_host", "place_of"]
