"""The real mode: torch elastic with every rank under guard, and what the guard is inside a rank.

`launch.py` is `distsim run --on gloo`; `install.py` puts the guard on in a process; `guard/` is what it does to a call,
`rpc/` to a remote one, `mpi/` the backend "mpi" by mpi4py.
"""

from __future__ import annotations

__all__ = ["flags", "guard", "install", "launch", "mpi", "process", "rpc", "strict"]
