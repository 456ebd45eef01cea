"""What the other ranks of a group say about a call: from their rings on this host, from the store elsewhere."""

from __future__ import annotations

import json
import mmap
import os
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from distsim.debug.evidence.procfs import look
from distsim.debug.records import CallRecord, Group, State
from distsim.debug.records.signature import Signature
from distsim.debug.rings import layout as rings
from distsim.debug.rings.jobdir import ring_path
from distsim.debug.rings.reader import RingReader
from distsim.torch_compat import groups, stores

__all__ = ["Neighbour", "Peers", "StorePeer", "refused_key", "timeout_s"]

DEFAULT_TIMEOUT_S = 1800.0
WRITTEN_S = 5.0
"""How long a record may come after the call was shown: its writer may have lost its core in between."""
ROWS_END = rings.MEETING_AT // 8 + rings.MEETING_GROUPS * rings.MEETING_WORDS


class Neighbour:
    """A rank of this host: its ring is mapped and its rows are read in place."""

    def __init__(self, path: Path, rank: int) -> None:
        self.rank = rank
        self._path = path
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), rings.file_bytes(), access=mmap.ACCESS_READ)
        self.words = memoryview(self._map).cast("Q")
        self.rows: dict[str, int] = {}
        """First words of those that were looked for and found."""
        self._sought: dict[str, tuple[int, int]] = {}
        """Of names that it has no row for: where the next look begins (rows are only added), and the hash."""
        self.reader: RingReader | None = None
        """Of its ring, once a whole call of it was read."""

    def said(self, name: str, seq: int) -> tuple[int, int] | None:
        """Fingerprint and record index of the peer's call *seq* on a group; None: it has not made it yet."""
        row = self.rows.get(name)
        if row is None:
            row = self._find(name)
            if row is None:
                return None
        word = row + 1 + (seq % rings.MEETING_WINDOW) * 3
        words = self.words
        if words[word] != seq:
            return None
        answer = words[word + 1], words[word + 2] - 1
        return answer if words[word] == seq else None

    def passed(self, name: str, seq: int) -> bool:
        """The peer is so far ahead that its call *seq* is overwritten."""
        row = self.rows.get(name)
        return row is not None and self.words[row + 1 + (seq % rings.MEETING_WINDOW) * 3] > seq

    def row(self, name: str) -> int | None:
        """First word of its row of that name."""
        row = self.rows.get(name)
        return self._find(name) if row is None else row

    def _find(self, name: str) -> int | None:
        row, wanted = self._sought.get(name) or (rings.MEETING_AT // 8, rings.name_hash(name))
        while row < ROWS_END and (found := self.words[row]):
            if found == wanted:
                self.rows[name] = row
                return row
            row += rings.MEETING_WORDS
        self._sought[name] = row, wanted
        return None

    def record(self, name: str, seq: int, index: int) -> CallRecord | None:
        """The whole call."""
        if self.reader is None:
            self.reader = RingReader(self._path)
        place = self.reader._records[index % rings.RECORDS]
        until = time.monotonic() + WRITTEN_S
        while (commit := int(place["commit"])) != index + 1:
            # It shows a call before it writes the record: the others wait for the one, and nobody for the other.
            if commit > index + 1 or time.monotonic() > until or self.gone():
                return None
            time.sleep(1e-3)
        return self.reader.decode(place.copy(), 0)

    def refused(self, name: str, seq: int, said: tuple[int, int]) -> bool:
        """Whether the backend refused what it *said* its call *seq* is, or it says another thing by now."""
        index = said[1]
        word = rings.RECORDS_AT // 8 + index % rings.RECORDS * rings.RECORD_WORDS
        rejected = self.words[word + rings.WORD_FLAGS] & rings.REJECTED
        return bool(rejected and self.words[word] == index + 1) or self.said(name, seq) != said

    def gone(self) -> bool:
        """It will make no further call."""
        header = rings.HEADER.unpack_from(self._map, 0)
        if self.words[rings.WORDS_AT // 8 + rings.W_LIFE] in (rings.LIFE_EXITING, rings.LIFE_RAISED, rings.LIFE_OVER):
            return True
        process = look(header[13], header[14])
        return process is None or process.state in "ZX"


class StorePeer:
    """A rank of another host: it writes its calls into the job's store."""

    reader = None

    def __init__(self, store: Any, rank: int, group: Group) -> None:
        self.rank = rank
        self._store = store
        self._group = group

    def said(self, name: str, seq: int) -> tuple[int, int] | None:
        key = f"{name}/{seq}/{self.rank}"
        if not self._store.check([key]):
            return None
        said = json.loads(self._store.get(key))
        return int(said["print"]), int(said["index"])

    def record(self, name: str, seq: int, index: int) -> CallRecord | None:
        said = json.loads(self._store.get(f"{name}/{seq}/{self.rank}"))["call"]
        return call_from(said, self.rank, self._group, seq)

    def refused(self, name: str, seq: int, said: tuple[int, int]) -> bool:
        """See `Neighbour.refused`."""
        return self.said(name, seq) != said or self._store.check([refused_key(name, seq, self.rank, said[1])])

    def gone(self) -> bool:
        return False


def refused_key(name: str, seq: int, rank: int, index: int) -> str:
    """Key of the store under which a rank says that its backend refused a call."""
    return f"{name}/{seq}/{rank}/refused/{index}"


def call_from(said: dict[str, Any], rank: int, group: Group, seq: int) -> CallRecord:
    """A call from its signature, for comparing."""
    return Signature.read(said).record(rank=rank, group=group, seq=seq, state=State.ISSUED)


class Peers:
    """Finds the peers of this rank; which of them are on this host follows from the launcher's numbers."""

    def __init__(self, directory: Path, rank: int, world_size: int, job: str) -> None:
        self._directory = directory
        self._rank = rank
        self._job = job
        self._attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") or 0)
        local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        first = rank - int(os.environ.get("LOCAL_RANK", rank))
        self._local = range(first, first + local)
        self._found: dict[int, Neighbour] = {}
        self._store: Any = None

    def here(self, rank: int) -> bool:
        """Whether a rank runs on this host."""
        return rank in self._local

    def neighbour(self, rank: int) -> Neighbour | None:
        """A rank of this host; None while its ring does not exist yet."""
        found = self._found.get(rank)
        if found is None:
            path = ring_path(self._directory, rank, self._attempt, self._job)
            if not path.exists():
                return None
            found = self._found[rank] = Neighbour(path, rank)
        return found

    def store(self) -> Any:
        """A connection of our own: the job's may be held by a thread that waits on it."""
        if self._store is None:
            base = stores.of_default_group()
            if isinstance(base, dist.TCPStore):
                base = dist.TCPStore(base.host, base.port, is_master=False, wait_for_workers=False)
            self._store = dist.PrefixStore(f"distsim-strict-{self._attempt}", base)
        return self._store


def timeout_s(guard: Any) -> float:
    """How long the members of a group wait for each other."""
    for backend in guard.backends.values():
        timeout = groups.timeout_of(backend)
        if timeout is not None:
            return float(timeout.total_seconds())
    return DEFAULT_TIMEOUT_S
