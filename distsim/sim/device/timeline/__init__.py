"""Time of a GPU: its streams in virtual time, the account of its seconds, and the training steps.

`timeline.py` has the streams, `account.py` the account, `steps.py` the steps, `fusion.py` the kernels of
compiled functions.
"""

from __future__ import annotations

from distsim.sim.device.timeline.timeline import Comm, Kernel, Load, Mark, StreamTimeline, StreamWait, Timeline

__all__ = ["Comm", "Kernel", "Load", "Mark", "StreamTimeline", "StreamWait", "Timeline"]
