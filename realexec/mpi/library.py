"""mpi4py, loaded with the first group, and the end of MPI with the process.

MPI ends with a meeting of all ranks. A rank that raised must not come to it: the others may be in a call that waits
for this very rank, and all would wait for ever. It leaves without, whereupon mpirun ends the job.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["found", "mpi"]

REMEDY = "pip install 'torch-distsim[mpi]', and an MPI (Debian: apt install openmpi-bin)"
OTHER_NAME = (
    "that is MPICH, which Debian's package has under another name: pip install mpich brings it with its mpirun, "
    "or use Open MPI's (apt install openmpi-bin)"
)
BEFORE_THE_END: list[Callable[[], None]] = []
"""Called before MPI ends, in any case: what else is inside MPI."""
_MPI: Any = None


def found() -> bool:
    """Whether mpi4py is installed; nothing is imported."""
    return importlib.util.find_spec("mpi4py") is not None


def mpi() -> Any:
    """`mpi4py.MPI`, initialised; RuntimeError in one line where it or the MPI below it is not there."""
    global _MPI
    if _MPI is None:
        try:
            import mpi4py

            mpi4py.rc.finalize = False
            if "OMPI_COMM_WORLD_RANK" in os.environ:  # several MPIs may be installed: the one whose mpirun this was
                os.environ.setdefault("MPI4PY_MPIABI", "openmpi")
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            said = " ".join(str(error).split())
            remedy = OTHER_NAME if "libmpi.so.12" in said else REMEDY
            raise RuntimeError(f"backend 'mpi': no MPI can be loaded ({said}); {remedy}") from None
        if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
            raise RuntimeError(
                "backend 'mpi': this MPI was initialised for one thread only; import mpi4py without rc.threads = False"
            )
        _MPI = MPI
    return _MPI


def finalize_at_exit(may_end: Callable[[], bool]) -> None:
    """Register the end of MPI, to which this process comes if *may_end* says so. Functions registered after this one
    run before it."""
    atexit.register(_finalize, may_end)


def _finalize(may_end: Callable[[], bool]) -> None:
    if _MPI is None or _MPI.Is_finalized():
        return
    for stop in BEFORE_THE_END:
        stop()
    if may_end() and getattr(sys, "last_value", None) is None:
        _MPI.Finalize()
