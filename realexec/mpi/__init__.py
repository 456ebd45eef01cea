"""Backend "mpi" on a torch that was built without it, as all wheels are: mpi4py and an installed MPI do the work.

`enable()` makes torch's own `init_process_group("mpi")` and `new_group(backend="mpi")` come here (`backend.py`).
A group (`group.py`) starts MPI's non-blocking call, an `MpiWork` (`work.py`) is its handle, `progress.py` brings all
of a process forward. `mpirun.py` is what a process knows of the mpirun that started it, `launch.py` starts one.
Only `library.py` imports mpi4py, and not before the first group is made.
"""

from __future__ import annotations

from distsim.realexec.mpi.backend import disable, enable

__all__ = ["disable", "enable"]
