"""The real mode: torch elastic with every rank under guard, and what the guard is inside a rank.

`launch.py` is `distsim run --on gloo`, `run_folder.py` where its rings are; `install.py` puts the guard on in a
process; `guard/` is what it does to a call, `rpc/` to a remote one, `mpi/` the backend "mpi" by mpi4py.
"""

from __future__ import annotations

__all__ = ["flags", "guard", "install", "last_line", "launch", "mpi", "process", "rpc", "run_folder", "strict"]
