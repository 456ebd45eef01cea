"""The simulator: a program's ranks as threads over simpy, torch.distributed answered in virtual time.

How to read it: `world.py` is the scheduler; `task.py` a thread and the baton; `process.py` what a
rank sees as its own; `backend.py` and `group.py` where torch's calls arrive; `communicator.py` where
they meet; `program.py` the two ways in.
"""

from distsim.sim.outcome import Outcome, Progress
from distsim.sim.program import RunRequest, run_program, simulate

__all__ = ["Outcome", "Progress", "RunRequest", "run_program", "simulate"]
