"""Reader of the calls of a group's other ranks: from their rings on this host, else from the store."""

from __future__ import annotations

import mmap
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from msgspec import Struct

from distsim.debug.evidence.processes import look
from distsim.debug.records import CallRecord, Group, State
from distsim.debug.records.signature import Signature
from distsim.debug.rings import layout as rings
from distsim.debug.rings.files import RecordedWorld
from distsim.debug.rings.reader import RingReader, ranks_here
from distsim.debug.rings.writer import RingWriter
from distsim.text.codec import Whole, decode
from distsim.text.untrusted_input import open_regular
from distsim.torch_compat import groups

DEFAULT_TIMEOUT_S = 1800.0
WRITTEN_S = 5.0
"""Seconds within which a record must follow the fingerprint that a rank shows. Its process may be descheduled in
between.
"""
SEEK_S = 0.5
"""Seconds between two searches for the rings of members that have none yet."""
ROWS_END = rings.MEETING_AT // 8 + rings.MEETING_GROUPS * rings.MEETING_WORDS


class Neighbour:
    """A rank on this host. Its ring is mapped, and its rows are read in place."""

    def __init__(self, path: Path, rank: int) -> None:
        self.rank = rank
        self._path = path
        with open_regular(path) as file:
            self._map = mmap.mmap(file.fileno(), rings.file_bytes(), access=mmap.ACCESS_READ)
        self.words = memoryview(self._map).cast("Q")
        self.rows: dict[str, int] = {}
        """Position of the rows that were found, by name."""
        self._sought: dict[str, tuple[int, int]] = {}
        """For names without a row: the position at which the next search starts (rows are only added), and the
        name's hash.
        """
        self.reader: RingReader | None = None
        """Reader of the peer's ring; None until the ring contains a complete call."""

    def shown_call(self, name: str, seq: int) -> tuple[int, int] | None:
        """Return the fingerprint and record index of the peer's call *seq* on a group; None if it has not made the
        call yet.
        """
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
        """Return whether the peer is so far ahead that its call *seq* is overwritten."""
        row = self.rows.get(name)
        return row is not None and self.words[row + 1 + (seq % rings.MEETING_WINDOW) * 3] > seq

    def row(self, name: str) -> int | None:
        """Return the position of its row *name*, or None."""
        row = self.rows.get(name)
        return self._find(name) if row is None else row

    def _find(self, name: str) -> int | None:
        row, wanted = self._sought.get(name) or (rings.MEETING_AT // 8, rings.name_hash(name))
        while row < ROWS_END and (word := self.words[row]):
            if word == wanted:
                self.rows[name] = row
                return row
            row += rings.MEETING_WORDS
        self._sought[name] = row, wanted
        return None

    def record(self, name: str, seq: int, index: int) -> CallRecord | None:
        """Return the whole record of a call, or None."""
        if self.reader is None:
            self.reader = RingReader(self._path)
            self.reader.called(self.rank, {})
        row = self.reader._records[index % rings.RECORDS]
        until = time.monotonic() + WRITTEN_S
        while (commit := int(row["commit"])) != index + 1:
            # It shows a call before it writes the record: the others wait for the one, and nobody for the other.
            if commit > index + 1 or time.monotonic() > until or self.gone():
                return None
            time.sleep(1e-3)
        return self.reader.decode(row.copy(), 0)

    def refused(self, name: str, seq: int, shown: tuple[int, int]) -> bool:
        """Return whether the backend refused the *shown* call *seq*, or the rank shows another call by now."""
        index = shown[1]
        word = rings.RECORDS_AT // 8 + index % rings.RECORDS * rings.RECORD_WORDS
        rejected = self.words[word + rings.WORD_FLAGS] & rings.REJECTED
        return bool(rejected and self.words[word] == index + 1) or self.shown_call(name, seq) != shown

    def gone(self) -> bool:
        """Return whether the rank will make no further call."""
        header = rings.Header(*rings.HEADER.unpack_from(self._map, 0))
        if self.words[rings.WORDS_AT // 8 + rings.W_LIFE] in rings.LIFE_LEAVING | {rings.LIFE_RAISED}:
            return True
        process = look(header.pid, header.start_ticks)
        return process is None or process.state in "ZX"


class ShownCall(Struct):
    """A call in the job's store, to be compared."""

    print: int
    """Its fingerprint."""
    index: Whole
    call: Signature


class StorePeer:
    """A rank on another host, which writes its calls into the job's store."""

    reader = None

    def __init__(self, store: Any, rank: int, group: Group) -> None:
        self.rank = rank
        self._store = store
        self._group = group

    def shown_call(self, name: str, seq: int) -> tuple[int, int] | None:
        key = f"{name}/{seq}/{self.rank}"
        if not self._store.check([key]):
            return None
        call = decode(self._store.get(key), ShownCall)
        return call.print, call.index

    def record(self, name: str, seq: int, index: int) -> CallRecord | None:
        call = decode(self._store.get(f"{name}/{seq}/{self.rank}"), ShownCall)
        return call.call.record(rank=self.rank, group=self._group, seq=seq, state=State.ISSUED)

    def refused(self, name: str, seq: int, shown: tuple[int, int]) -> bool:
        """See `Neighbour.refused`."""
        return self.shown_call(name, seq) != shown or self._store.check([refused_key(name, seq, self.rank, shown[1])])

    def gone(self) -> bool:
        return False


def refused_key(name: str, seq: int, rank: int, index: int) -> str:
    """Return the store's key under which a rank reports that its backend refused a call."""
    return f"{name}/{seq}/{rank}/refused/{index}"


class Peers:
    """The other members of a world: those on this host, read from their rings, and the others, read from the store."""

    def __init__(self, directory: Path, ring: RingWriter, attempt: int) -> None:
        self._directory = directory
        self._ring = ring
        self._attempt = attempt
        self._paths: dict[str, dict[int, Path]] = {}
        """Ring of each rank on this host, by world and rank."""
        self._found: dict[tuple[str, int], Neighbour] = {}
        self._bases: dict[str, Any] = {}
        self._stores: dict[str, Any] = {}
        self._sought = 0.0
        self._guarded: set[tuple[str, int]] = set()

    def meet(self, world: RecordedWorld, store: Any) -> None:
        """Keep the store of a world that is about to meet, and announce in it that this rank is guarded."""
        base = self._bases[world.id] = _base(store)
        with suppress(Exception):  # a placeholder of MPI's, or the meeting fails in the program's own words
            self._prefixed(base).set(_guarded_key(world, world.rank), "1")

    def here(self, world: RecordedWorld, rank: int) -> bool:
        """Return whether a rank runs on this host under the guard."""
        if rank in self._paths.get(world.id, ()):
            return True
        now = time.monotonic()
        if world.id not in self._paths or now - self._sought > SEEK_S:
            self._sought = now
            self._paths[world.id] = ranks_here(self._directory, self._ring.job, world)
        return rank in self._paths[world.id]

    def guarded(self, world: RecordedWorld, rank: int) -> bool:
        """Return whether a rank of another host is known to be guarded."""
        key = world.id, rank
        if key not in self._guarded and self.store(world).check([_guarded_key(world, rank)]):
            self._guarded.add(key)
        return key in self._guarded

    def neighbour(self, world: RecordedWorld, rank: int) -> Neighbour | None:
        """Return a rank of this host, or None until it has joined."""
        result = self._found.get((world.id, rank))
        if result is None and self.here(world, rank):
            result = self._found[world.id, rank] = Neighbour(self._paths[world.id][rank], rank)
        return result

    def store(self, world: RecordedWorld) -> Any:
        """Return a separate connection to a world's store. The program's connection may be in use by a thread that
        waits on it.
        """
        store = self._stores.get(world.id)
        if store is None:
            base = self._bases.get(world.id) or groups.of_default_group()
            if isinstance(base, dist.TCPStore):
                base = dist.TCPStore(base.host, base.port, is_master=False, wait_for_workers=False)
            store = self._stores[world.id] = self._prefixed(base)
        return store

    def _prefixed(self, base: Any) -> Any:
        return dist.PrefixStore(f"distsim-strict-{self._attempt}", base)


def _base(store: Any) -> Any:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def _guarded_key(world: RecordedWorld, rank: int) -> str:
    return f"{world.id}/guarded/{rank}"


def timeout_s(guard: Any) -> float:
    """Return how long the members of a group wait for each other."""
    for backend in guard.backends.values():
        timeout = groups.timeout_of(backend)
        if timeout is not None:
            return float(timeout.total_seconds())
    return DEFAULT_TIMEOUT_S
