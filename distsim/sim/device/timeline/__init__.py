"""A GPU's time. `timeline.py` is its streams in virtual time, `items.py` what they hold, `account.py` what that time
was, `steps.py` the training steps in it."""

from __future__ import annotations

from distsim.sim.device.timeline.items import Comm, Kernel, Load, Mark, Wait
from distsim.sim.device.timeline.timeline import Stream, Timeline

__all__ = ["Comm", "Kernel", "Load", "Mark", "Stream", "Timeline", "Wait"]
