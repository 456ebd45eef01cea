"""Where the rings of a job lie, and what else lies beside them.

One folder holds one job on one host: `rank00003.PID.a0.JOB.ring` for each process, `rank00003.PID.a0.JOB.stacks`
where faulthandler writes, `rank00003.PID.a0.JOB.silent` with what the search for silent faults records,
`exit.00003.a0.json` from the launcher, `monitor.json` and `verdict.json` from the monitor, `verdict.JOB.json` where it
was started for that job alone.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

__all__ = ["default_directory", "facts_path", "job_name", "ring_path", "stack_path", "verdict_path"]


def job_name(environ: Mapping[str, str], where: str = "") -> str:
    """The same short name on every rank of a job: from its rendezvous (*where*, or the environment)."""
    parts = [
        where or f"{environ.get('MASTER_ADDR', '')}:{environ.get('MASTER_PORT', '')}",
        environ.get("TORCHELASTIC_RUN_ID", ""),
        environ.get("SLURM_JOB_ID", ""),
        environ.get("SLURM_STEP_ID", ""),
        environ.get("PMIX_NAMESPACE", "") or environ.get("PMI_JOBID", ""),
    ]
    return hashlib.blake2b("|".join(parts).encode(), digest_size=6).hexdigest()


def default_directory(job: str) -> Path:
    """In memory where the system has it: rings are written at every call and need no disk."""
    shared = Path("/dev/shm")
    base = shared if shared.is_dir() and os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
    return base / f"distsim-{os.geteuid()}" / job


def ring_path(directory: Path, rank: int, attempt: int, job: str) -> Path:
    """The ring of this process. *rank* helps whoever lists the folder; several processes may be given the same."""
    return directory / f"rank{rank:05d}.{os.getpid()}.a{attempt}.{job}.ring"


def stack_path(ring: Path) -> Path:
    """Where faulthandler writes for the process that has this ring."""
    return ring.with_suffix(".stacks")


def facts_path(ring: Path) -> Path:
    """Where the process that has this ring records what it trains, for the search for silent faults."""
    return ring.with_suffix(".silent")


def verdict_path(directory: Path, job: str) -> Path:
    return directory / f"verdict.{job}.json"
