"""Backend "mpi" on a torch that was built without it, as all wheels are: mpi4py and an installed MPI do the work.

`backend.enable()` makes torch's own `init_process_group("mpi")` and `new_group(backend="mpi")` come here; under
guard that is done where mpirun has started the process, and nowhere else.
A group (`group.py`) starts MPI's non-blocking call, an `MpiWork` (`work.py`) is its handle, `progress.py` brings all
of a process forward, `introduction.py` is what hosts tell each other. `mpirun.py` is what a process knows of the
mpirun that started it, `launch.py` starts one.
Only `library.py` imports mpi4py, and not before the first group is made.
"""

from __future__ import annotations

__all__ = ["backend", "group", "introduction", "launch", "library", "mpirun", "progress", "rank", "types", "work"]
