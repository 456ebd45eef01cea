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

from distsim.debug.rings.layout import file_bytes

__all__ = [
    "default_bases",
    "default_directory",
    "facts_path",
    "job_name",
    "ring_path",
    "room_note",
    "stack_path",
    "verdict_path",
]


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


SHARED = Path("/dev/shm")


def default_directory(job: str, ranks: int = 1) -> Path:
    """In memory where the system has it, and room for the rings of *ranks*: they are written at every call and need no
    disk. All ranks of a host come to the same answer, whichever of them have their rings already."""
    shared, disk = default_bases()
    return (shared if _has_room(shared, job, ranks) else disk) / job


def default_bases() -> tuple[Path, Path]:
    """The folders of jobs in memory and on disk."""
    return SHARED / f"distsim-{os.geteuid()}", Path(tempfile.gettempdir()) / f"distsim-{os.geteuid()}"


def room_note(directory: Path, ranks: int) -> str:
    """One line where the flight records are not in memory; empty where they are, or the user has chosen."""
    if directory.parent != default_bases()[1]:
        return ""
    need_mib = ranks * file_bytes() / 2**20
    try:
        room = os.statvfs(SHARED)
        why = f"{SHARED} has {room.f_bavail * room.f_frsize / 2**20:.0f} MiB free"
        if not os.access(SHARED, os.W_OK):
            why = f"{SHARED} is not writable"
    except OSError:
        why = f"there is no {SHARED}"
    return (
        f"{why}, so the flight records ({need_mib:.0f} MiB, {file_bytes() / 2**20:.0f} a rank) are in {directory}; "
        "DISTSIM_DIR chooses another place"
    )


def _has_room(base: Path, job: str, ranks: int) -> bool:
    shared = base.parent
    if not (shared.is_dir() and os.access(shared, os.W_OK)):
        return False
    try:
        room = os.statvfs(shared)
    except OSError:
        return False
    # What its other ranks have by now, or else the last of them would find too little.
    taken = sum(Path(f"/proc/{ring.name.split('.')[1]}").exists() for ring in (base / job).glob("rank*.ring"))
    return room.f_bavail * room.f_frsize >= max(ranks - taken, 0) * file_bytes()


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
