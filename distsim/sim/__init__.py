"""The simulator: a program's ranks as threads over simpy, torch.distributed answered in virtual time.

How to read it: `kernel/` is time, tasks and the baton; `world.py` one simulated job; `isolation/` what a
rank sees as its own; `processes/` how it lives and ends; `c10d/` where torch's calls arrive and meet; `rpc/` remote
calls and their gradients; `device/` what computing costs; `faults/` what goes wrong; `observe/` what is seen of it;
`run.py` the two ways in.
"""

import sys

from distsim.errors import UsageError
from distsim.torch_compat.releases import check_simulation, unsupported

if sys.platform == "win32":
    raise UsageError("expected Linux or macOS, got Windows: run distsim in WSL (wsl --install), which is Linux")
try:
    check_simulation()
    from distsim.sim.outcome import Outcome, Progress
    from distsim.sim.run import RunRequest, run_program, simulate
except (ImportError, AttributeError) as error:
    raise unsupported(error) from error

__all__ = ["Outcome", "Progress", "RunRequest", "run_program", "simulate"]
