"""Worlds that this process has joined, and the rank that its launcher gave it.

A world is the set of processes that meet in one rendezvous (see `debug/rings/files.py`). torchrun and mpirun give
the rank in environment variables.
"""

from __future__ import annotations

import os
import time
import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist
from msgspec.structs import replace

from distsim.debug.rings.files import RecordedWorld, WorldKind
from distsim.realexec.guard.recorder import Recorder
from distsim.text.untrusted_input import MOST_RANKS

_prefixes: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""Prefix of each PrefixStore, which torch does not expose."""
_loaded_at_s = time.time()
_MPI_NAMES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
"""Environment variables of Open MPI, and of MPICH, Intel MPI and others that use Hydra."""
_MPI_JOBS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID", "HYDRA_JOBID")


class Worlds:
    """Identifiers of the worlds of one process, which it writes into its ring."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._times: Counter[tuple[str, int]] = Counter()

    def begin(
        self, meeting: str, where: str, rank: int, size: int, kind: WorldKind, met: str = ""
    ) -> RecordedWorld | None:
        """Join the world that meets at *meeting*, and return it, or None if *rank* and *size* are invalid.

        All members count alike how many worlds of this size have met there, so that they agree on the identifier.

        Args:
            meeting: Identity of the rendezvous.
            where: Rendezvous as text for people.
            rank: Rank of this process.
            size: World size.
            kind: Kind of the world.
            met: Identifier of an earlier world of these ranks whose store is used, if any.
        """
        if not 0 <= rank < size <= MOST_RANKS:
            return None
        times = self._times[meeting, size]
        number = blake2b(f"{meeting}|{size}|{times}".encode(), digest_size=6).hexdigest()
        # Only the store of torchrun's agent surely outlives a world of this process: others may be new ones.
        reuses_store = times > 0 and meeting == place_of_url("env://")[0] and _has_agent_store()
        reuses_store |= times == 0 and meeting.startswith("file:") and _is_older_than_this_process(meeting)
        world = RecordedWorld(number, rank, size, kind, where, reuses_store, met)
        self._recorder.join(world)
        return world

    def begun(self, meeting: str, size: int) -> None:
        """Note that the rendezvous of a world has succeeded: the next one at this place is another world."""
        self._times[meeting, size] += 1


def _is_older_than_this_process(meeting: str) -> bool:
    """Return whether the file of a FileStore was last written before this process began."""
    try:
        file = os.stat(meeting.removeprefix("file:"))
    except OSError:
        return False
    return file.st_size > 0 and file.st_mtime < _loaded_at_s


def _has_agent_store() -> bool:
    """Return whether `env://` means the store of torchrun's agent."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def count_in(environ: Mapping[str, str], name: str) -> int | None:
    """Return a launcher's variable such as RANK as a number, or None if it is missing or not a number."""
    text = environ.get(name, "").strip()
    return int(text) if text.isdecimal() and len(text) < 10 else None


def place_of_url(url: str) -> tuple[str, str]:
    """Return the identity and the name of the rendezvous at *url*.

    Of an address only the port counts, because ranks may know the host by different names.
    """
    if url.startswith("env://") or not url:
        port = os.environ.get("MASTER_PORT", "")
        return f"tcp:{port}", f"{os.environ.get('MASTER_ADDR', '')}:{port}"
    plain = url.partition("?")[0]
    try:
        port_number = urlsplit(plain).port
    except ValueError:  # torch says so
        port_number = None
    if plain.startswith("tcp://") and port_number is not None:
        return f"tcp:{port_number}", plain.removeprefix("tcp://")
    if plain.startswith("file://"):
        path = os.path.abspath(urlsplit(plain).path)
        return f"file:{path}", path
    return plain, plain


def place_of_store(store: Any, name: str = "") -> tuple[str, str]:
    """Return the identity and the name of a rendezvous in a store that the program created. *name* is the program's
    name of the group.
    """
    prefix = _prefixes.get(store, "")
    base = store
    while hasattr(base, "underlying_store"):
        base = base.underlying_store
    if isinstance(base, dist.TCPStore):
        meeting, where = f"tcp:{base.port}", f"{base.host}:{base.port}"
    elif isinstance(base, dist.FileStore):
        path = os.path.abspath(str(base.path))
        meeting, where = f"file:{path}", path
    elif isinstance(base, dist.HashStore):  # nobody but this process has it
        meeting, where = f"process:{os.getpid()}:{id(base)}", "a HashStore"
    else:
        meeting, where = type(base).__name__, f"a {type(base).__name__}"
    return f"{meeting}|{prefix}|{name}", f"{where} {name}".strip()


def noting_prefix(original: Any) -> Any:
    """Wrap `PrefixStore.__init__` to remember the prefix."""

    def initialize(self: Any, prefix: str, store: Any) -> None:
        original(self, prefix, store)
        _prefixes[self] = f"{_prefixes.get(store, '')}/{prefix}"

    return initialize


def launched(environ: Mapping[str, str]) -> RecordedWorld | None:
    """Return the rank and world size that a launcher gave to this process, or None."""
    rank, size = count_in(environ, "RANK"), count_in(environ, "WORLD_SIZE")
    if rank is None or size is None or not rank < size <= MOST_RANKS:
        return None
    return RecordedWorld("", rank, size, WorldKind.DEFAULT, "its launcher")


def launcher_world(environ: Mapping[str, str], given: RecordedWorld | None) -> tuple[RecordedWorld, bool]:
    """Return the launcher's world for the ring's header, or else the program's world *given*, and which of the two
    it is.

    A launcher that starts one process does not know the job's ranks.
    """
    own = launched(environ)
    if own is not None and (given is None or own.size > 1 or (given.rank, given.size) == (own.rank, own.size)):
        return own, True
    assert given is not None
    return replace(given, id=""), False


@dataclass(frozen=True)
class Started:
    """One process of a job that mpirun started."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    job: str
    """Name of the job, equal for all of its processes on a host."""

    def environment(self) -> dict[str, str]:
        """Return torchrun's variables for the same rank."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
        }


def started_by_mpirun(environ: Mapping[str, str]) -> Started | None:
    """Return the place of this process in the job of mpirun that started it; None if none did."""
    for rank, size, local_rank, local_size in _MPI_NAMES:
        try:
            rank_text, number = int(environ[rank]), int(environ[size])
        except (KeyError, ValueError):
            continue
        job = next((environ[name] for name in _MPI_JOBS if environ.get(name)), f"parent {os.getppid()}")
        return Started(
            rank_text,
            number,
            _number(environ, local_rank, rank_text),
            _number(environ, local_size, number),
            f"mpirun {job}",
        )
    return None


def _number(environ: Mapping[str, str], name: str, otherwise: int) -> int:
    text = environ.get(name, "")
    return int(text) if text.isdigit() else otherwise
