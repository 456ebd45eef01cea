"""The simulator: the ranks of a program as threads over simpy, and torch.distributed in virtual time.

How to read it: `kernel/` has time, tasks and the baton; `world/` one simulated job; `isolation/` what each rank has
of its own; `processes/` how a process starts and ends; `c10d/` where torch's calls arrive and meet;
`device/` what computation costs; `faults/` injected faults; `observe/` measurements;
`orders/` what an exploration reorders;
`run.py` the two entry points.
"""

import sys

from distsim.errors import UsageError
from distsim.torch_compat.releases import check_simulation, unsupported

if sys.platform == "win32":
    raise UsageError("expected Linux or macOS, got Windows: run distsim in WSL (wsl --install), which is Linux")
try:
    check_simulation()
    from distsim.sim.outcome import Outcome, Progress
    from distsim.sim.run import run_program, simulate
    from distsim.sim.world.conditions import RunRequest
except (ImportError, AttributeError) as error:
    raise unsupported(error) from error

__all__ = ["Outcome", "Progress", "RunRequest", "run_program", "simulate"]
