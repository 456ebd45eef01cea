"""What mpirun says to the processes that it starts, in their environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Started", "started_by_mpirun"]

_NAMES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
"""Open MPI; MPICH, Intel MPI and others whose mpirun is Hydra."""
_JOBS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID", "HYDRA_JOBID")


@dataclass(frozen=True)
class Started:
    """One process of a job of mpirun."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    job: str
    """The same for all of its processes on a host."""

    def environment(self) -> dict[str, str]:
        """torchrun's variables for the same place."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
        }


def started_by_mpirun(environ: Mapping[str, str]) -> Started | None:
    """The place of this process in the job of mpirun that started it; None where none did."""
    for rank, size, local_rank, local_size in _NAMES:
        try:
            place, number = int(environ[rank]), int(environ[size])
        except (KeyError, ValueError):
            continue
        job = next((environ[name] for name in _JOBS if environ.get(name)), f"parent {os.getppid()}")
        return Started(
            place,
            number,
            _number(environ, local_rank, place),
            _number(environ, local_size, number),
            f"mpirun {job}",
        )
    return None


def _number(environ: Mapping[str, str], name: str, otherwise: int) -> int:
    said = environ.get(name, "")
    return int(said) if said.isdigit() else otherwise
