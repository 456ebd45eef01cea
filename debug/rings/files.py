"""Location of a job's rings and of the files next to them, protected from other users.

One folder holds one job on one host: `rank00003.PID.a0.JOB.ring` for each process, `rank00003.PID.a0.JOB.stacks` for
stacks by faulthandler, `rank00003.PID.a0.JOB.silent` for the facts of the search for silent faults,
`exit.00003.a0.json` from the launcher, `monitor.json` and `verdict.json` from the monitor, and `verdict.JOB.json` if
it was started for that job alone.

Folders of jobs have names that anyone can guess (`/dev/shm/distsim-UID/JOB`). Another user who creates one first
could put links into it, so that a rank would write to a file of that user's choice. Therefore a folder that does not
belong to this user alone is refused, and files are created (`O_EXCL`), never opened if they exist.

A process belongs to the operating system (host, pid); a *world* is one rendezvous: `init_process_group`, or a group
with its own ranks that a framework constructs. Ranks are numbers within a world. A launcher's RANK is a number in a
world that the program need not use.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import hashlib
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from distsim.debug.records import Site
from distsim.debug.rings.layout import file_bytes
from distsim.text.codec import Rank, Whole
from distsim.text.untrusted_input import MOST_RANKS

OTHERS = stat.S_IRWXG | stat.S_IRWXO
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"
"""Variable with the address that all replicas of a job of torchft have in common."""


def job_name(environ: Mapping[str, str], where: str = "") -> str:
    """Return a short name of the job, equal on all its ranks, from its rendezvous (*where*, or the environment)."""
    if lighthouse := environ.get(LIGHTHOUSE, ""):
        return hashlib.blake2b(lighthouse.encode(), digest_size=6).hexdigest()  # each replica has its own launcher
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
    """Return the folder of the rings: in memory if there is room for those of *ranks*, because every call writes. All
    ranks of a host choose the same folder."""
    shared, disk = default_bases()
    return (shared if _has_room(shared, job, ranks) else disk) / job


def default_bases() -> tuple[Path, Path]:
    """Return the folders of jobs in memory and on disk."""
    return _base(SHARED), _base(Path(tempfile.gettempdir()))


def _base(folder: Path) -> Path:
    """Return the folder of this user's jobs in *folder*, where anyone can take its name: then it has a second one."""
    first = folder / f"distsim-{os.geteuid()}"
    return first.with_name(f"{first.name}-2") if _is_taken(first) else first


def _is_taken(path: Path) -> bool:
    """Return whether *path* is not a folder of this user, although it exists."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return status.st_uid != os.geteuid() or not stat.S_ISDIR(status.st_mode)


def room_note(directory: Path, ranks: int) -> str:
    """Return one line if the flight records are not in memory; empty if they are, or if the user chose the folder."""
    if directory.parent != default_bases()[1]:
        return ""
    need_mib = ranks * file_bytes() / 2**20
    try:
        room = os.statvfs(SHARED)
        why = f"{SHARED} has {room.f_bavail * room.f_frsize / 2**20:.0f} MiB free"
        if not os.access(SHARED, os.W_OK):
            why = f"{SHARED} is not writable"
        elif _is_taken(shared := default_bases()[0]):
            why = f"{shared} is not a folder of yours"
    except OSError:
        why = f"there is no {SHARED}"
    return (
        f"{why}, so the flight records ({need_mib:.0f} MiB, {file_bytes() / 2**20:.0f} a rank) are in {directory}; "
        "DISTSIM_DIR chooses another folder"
    )


def _has_room(base: Path, job: str, ranks: int) -> bool:
    shared = base.parent
    if not (shared.is_dir() and os.access(shared, os.W_OK)) or _is_taken(base):
        return False
    try:
        room = os.statvfs(shared)
    except OSError:
        return False
    # What its other ranks have by now, or else the last of them would find too little.
    taken = sum(Path(f"/proc/{ring.name.split('.')[1]}").exists() for ring in (base / job).glob("rank*.ring"))
    return room.f_bavail * room.f_frsize >= max(ranks - taken, 0) * file_bytes()


def ring_path(directory: Path, rank: int, attempt: int, job: str) -> Path:
    """Return the path of this process's ring. *rank* is for people who list the folder; several processes may have
    the same.
    """
    return directory / f"rank{rank:05d}.{os.getpid()}.a{attempt}.{job}.ring"


def stack_path(ring: Path) -> Path:
    """Return the file into which faulthandler writes for the process with this ring."""
    return ring.with_suffix(".stacks")


def facts_path(ring: Path) -> Path:
    """Return the file in which the process with this ring records its training, for the search for silent faults."""
    return ring.with_suffix(".silent")


def verdict_path(directory: Path, job: str) -> Path:
    return directory / f"verdict.{job}.json"


def private_folder(path: Path, *, chosen: bool = False) -> None:
    """Create *path* with mode 0700 if it does not exist, else check that only this user can write to it.

    A folder that the user has *chosen* may be the user's own link and may be readable by others (the files in it are
    not).

    Raises:
        PermissionError: Another user could write there; `strerror` is one line.
    """
    if _make(path):
        return
    if chosen and stat.S_ISLNK((link := path.lstat()).st_mode):
        _ours(path, link)
        path = path.resolve()
    # One folder is judged and closed, by its descriptor: another may be put under its name meanwhile.
    folder = _open(path)
    try:
        _close_to_others(folder, path, chosen)
        status, now = os.fstat(folder), path.lstat()
    finally:
        os.close(folder)
    if (status.st_dev, status.st_ino) != (now.st_dev, now.st_ino):
        raise PermissionError(errno.EPERM, "another file has just replaced it", str(path))


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        kind = "a link" if path.is_symlink() else "no folder"
        raise PermissionError(errno.EPERM, f"expected a folder of your own, got {kind}", str(path)) from None


def _close_to_others(folder: int, path: Path, chosen: bool) -> None:
    status = os.fstat(folder)
    _ours(path, status)
    mode = stat.S_IMODE(status.st_mode)
    if not mode & OTHERS or (chosen and not mode & OTHERS_WRITE and os.listdir(folder)):
        return
    if mode & OTHERS_WRITE and os.listdir(folder):
        raise PermissionError(
            errno.EPERM,
            f"other users can write there (mode {mode:04o}); empty it, or chmod 700",
            str(path),
        )
    os.fchmod(folder, 0o700)  # of an earlier release, or just made by hand
    if mode & OTHERS_WRITE and os.listdir(folder):
        raise PermissionError(errno.EPERM, f"another user writes there (mode {mode:04o})", str(path))


def _make(path: Path) -> bool:
    """Create *path*, and return whether it did not exist; the ranks of a job create it at the same time."""
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        return False
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        return _make(path)
    return True


def _ours(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        problem = f"it belongs to user {status.st_uid}, and you are {os.geteuid()}"
        raise PermissionError(errno.EPERM, problem, str(path))


def create_private(path: Path, mode: int = 0o600) -> int:
    """Create an empty file for writing and return its descriptor.

    An existing file of this name is replaced, not changed.
    """
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    return os.open(path, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_RDWR | os.O_CLOEXEC, mode)


def write_private(path: Path, text: str, mode: int = 0o600) -> None:
    """Replace *path* by a file with *text*, in one step."""
    scratch = path.with_name(f"{path.name}.{os.getpid()}.new")
    with open(create_private(scratch, mode), "w", encoding="utf-8", errors="backslashreplace") as file:
        try:
            file.write(text)
            file.flush()
        except OSError:
            scratch.unlink(missing_ok=True)
            raise
    try:
        os.replace(scratch, path)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise


def append_private(path: Path, text: str) -> None:
    """Add to a file, which is made if need be, but never through a link."""
    flags = os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_WRONLY | os.O_CLOEXEC
    with open(os.open(path, flags, 0o600), "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)


class Samples(Struct, frozen=True, array_like=True):
    """Where a rank's main thread stood, in a file beside its ring (`.samples`)."""

    request: Whole
    """Number of the monitor's request."""
    total: Whole
    sites: tuple[tuple[Site, Whole], ...]
    """The most frequent lines of the program, and how often it stood there."""


class WorldKind(enum.StrEnum):
    """Creator of a world."""

    DEFAULT = "default"  # init_process_group: its ranks are the numbers that the program calls ranks
    RPC = "rpc"  # init_rpc: likewise
    REPLICAS = "replicas"  # torchft: the replicas of a job, each of which may have a default group of its own
    FURTHER = "further"  # the program itself, beside them


Size = Annotated[int, Meta(ge=1, le=MOST_RANKS)]


class RecordedWorld(Struct, frozen=True, array_like=True):
    """One process's membership in a world."""

    id: str
    """Identifier that is equal on every member, and different from that of every other world of the job."""
    rank: Rank
    size: Size
    kind: WorldKind
    where: str
    """Description of the rendezvous."""
    reuses_store: bool = False
    """Whether the store still contains keys of an earlier world of this process or, in a file, of an earlier job."""
    met: str = ""
    """Identifier of the world whose rendezvous created the store.

    It has the same ranks, some of which may still wait.
    """

    def __post_init__(self) -> None:
        if self.rank >= self.size:
            raise ValueError(f"expected a rank below the size of the world, {self.size}, got {self.rank}")


class Process(Struct, frozen=True, array_like=True):
    """A process of a job, and the worlds it has joined, in their order."""

    host: str
    pid: Whole
    rank: Rank
    """Rank as in `layout.HEADER`."""
    world_size: Size
    has_launcher: bool
    """A launcher gave it these two numbers."""
    opened_ns: Whole
    seen_ns: Whole
    """Time of its last heartbeat (wall clock)."""
    worlds: tuple[RecordedWorld, ...] = ()

    @property
    def key(self) -> tuple[str, int, int]:
        """Return a key that distinguishes the process from every other."""
        return self.host, self.pid, self.opened_ns
