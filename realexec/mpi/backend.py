"""Where torch meets the backend "mpi": its own functions make the groups, and find `MpiGroup` where a torch that was
built with MPI has its C++ class.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch.distributed.distributed_c10d as c10d

from distsim.realexec.mpi import introduction, library
from distsim.realexec.mpi.group import MpiGroup
from distsim.torch_compat import groups
from distsim.torch_compat.patches import Patches

__all__ = ["disable", "enable"]


class ProcessGroupMPI:
    """What `torch.distributed` calls where it was built with MPI."""

    @staticmethod
    def create(ranks: Sequence[int]) -> MpiGroup | None:
        """The group of *ranks* (none: the world), or None where this process is not in it. All members must call;
        RuntimeError where there is no MPI, or mpirun started another number of ranks than the environment says."""
        mpi = library.mpi()
        world = mpi.COMM_WORLD
        if not ranks:
            _refuse_other_size(world.Get_size())
            introduction.meet(world)
            return MpiGroup(world.Dup())
        members = world.Get_group().Incl(list(ranks))
        if members.Get_rank() == mpi.UNDEFINED:
            return None
        return MpiGroup(world.Create_group(members))


def _refuse_other_size(size: int) -> None:
    said = os.environ.get("WORLD_SIZE", "")
    if said.isdigit() and int(said) != size:
        raise RuntimeError(
            f"backend 'mpi': MPI knows {size} rank{'s' * (size != 1)}, WORLD_SIZE is {said}: start them with mpirun "
            f"(mpirun -n {said} distsim run --on mpi SCRIPT), by the MPI that mpi4py loads"
        )


_patches = Patches()


def enable(may_end: Callable[[], bool] = lambda: True) -> None:
    """Make backend "mpi" available in this process, where torch has none of its own and mpi4py is installed. At the end
    of the process *may_end* is asked whether it should wait there for all others, as MPI wants it."""
    if groups.MPI_AVAILABLE.get(True) or not library.found():
        return
    library.finalize_at_exit(may_end)
    _patches.put(c10d, groups.MPI_AVAILABLE.attribute, True)
    _patches.put(c10d, "ProcessGroupMPI", ProcessGroupMPI)


def disable() -> None:
    """Take it away again; groups that exist go on."""
    _patches.remove()
