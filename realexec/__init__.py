"""Real runs: torch elastic with every rank guarded, and the guard inside each rank.

`launch.py` is `distsim run --on gloo`; `install.py` installs the guard in a process; `guard/` records calls, `rpc/`
remote calls, and `mpi/` is the backend "mpi" by mpi4py.
"""

from __future__ import annotations

__all__ = ["guard", "install", "launch", "mpi", "process", "rpc", "strict"]
