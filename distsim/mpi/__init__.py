"""Backend "mpi" for a torch that was built without MPI, as all wheels are, by mpi4py and an installed MPI.

`group.enable()` makes torch's own `init_process_group("mpi")` and `new_group(backend="mpi")` use this backend. The
guard does so only if mpirun has started the process. A group (`group.py`) starts MPI's non-blocking calls;
`library.py` makes progress on all calls of a process. Only `library.py` imports mpi4py, when the first group is
created. `launch.py` starts mpirun, and `rank.py` is the program that mpirun starts.
"""

from __future__ import annotations

__all__ = ["group", "launch", "library", "rank"]
