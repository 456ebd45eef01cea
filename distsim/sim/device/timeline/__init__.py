"""A GPU's time: streams in virtual time, the account of that time, and the training steps in it.

`timeline.py` is the streams and their account, `steps.py` the steps, `fusion.py` what a compiled function launches.
"""

from __future__ import annotations

from distsim.sim.device.timeline.timeline import Comm, Kernel, Load, Mark, StreamTimeline, StreamWait, Timeline

__all__ = ["Comm", "Kernel", "Load", "Mark", "StreamTimeline", "StreamWait", "Timeline"]
