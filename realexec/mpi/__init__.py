"""Backend "mpi" on a torch that was built without it, as all wheels are: mpi4py and an installed MPI do the work.

`group.enable()` makes torch's own `init_process_group("mpi")` and `new_group(backend="mpi")` come here; under
guard that is done where mpirun has started the process, and nowhere else.
A group (`group.py`) starts MPI's non-blocking calls; `library.py` brings all of a process forward, and it alone imports
mpi4py, not before the first group is made. `launch.py` starts mpirun, `rank.py` is what mpirun starts.
"""

from __future__ import annotations

__all__ = ["group", "launch", "library", "rank"]
