"""Reads a ring file: while its process writes, after it died, or if it is not a ring at all.

Everything may be half written, or overwritten a moment later. A record counts only if its commit word is right
before and after it was copied; what cannot be read is left out.
"""

from __future__ import annotations

import mmap
import os
import re
import zlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar, cast

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from distsim.debug.records import CallRecord, Caught, Group, MainPosition, RankThread, Site, State
from distsim.debug.records.signature import Signature
from distsim.debug.rings import layout as rings
from distsim.debug.rings.files import Process, RecordedWorld, WorldKind
from distsim.errors import UsageError
from distsim.text.codec import Unfit, Whole, decode
from distsim.text.untrusted_input import MOST_RANKS, open_regular

RECORD = np.dtype(
    [
        ("commit", "<u8"),
        ("issued", "<u8"),
        ("completed", "<u8"),
        ("flags", "<u8"),
        ("group", "<u4"),
        ("thread", "<u4"),
        ("seq", "<u8"),
        ("signature", "<u8"),
        ("site", "<u8"),
        ("fingerprint", "<u8"),
        ("site_hash", "<u8"),
        ("peer", "<i4"),
        ("tag", "<i4"),
        ("error", "<u8"),
        ("ordinal", "<u8"),
        ("spare", "<u8"),
    ]
)
assert RECORD.itemsize == rings.RECORD_WORDS * 8

Records = NDArray[np.void]
STATES = {
    rings.ISSUED: State.ISSUED,
    rings.STARTED: State.STARTED,
    rings.COMPLETED: State.COMPLETED,
    rings.FAILED: State.FAILED,
}


@dataclass(frozen=True)
class GroupEntry:
    """A group as one rank wrote it down, its members in the numbers of *world*; *generation* counts groups of one name
    in one world of one process."""

    group: Group
    generation: int
    world: str = ""
    """Empty: the launcher's numbers."""

    @property
    def key(self) -> tuple[str, tuple[int, ...], int]:
        """Return a key that is equal on every member, and different from that of every other group."""
        name = self.group.name
        return f"{self.world}:{name}" if self.world else name, self.group.ranks, self.generation


class Raised(Struct, frozen=True):
    """An exception in the text table."""

    error: str | None = None
    """The last line of its traceback."""
    traceback: str | None = None
    origins: str | None = None
    frames: tuple[Site, ...] = ()
    """The user's frames, innermost first."""


class PendingRendezvous(Struct, frozen=True):
    """The rendezvous in which a rank waits."""

    at: str | None = None
    """Address of the store."""
    reached: bool = True
    by_hand: bool = False
    """Whether it is outside of init_process_group."""


Frames = tuple[Site, ...]


class _ThreadFields(NamedTuple):
    """A thread in the table."""

    ident: Whole
    name: str


class _GroupFields(NamedTuple):
    """A group in the table."""

    name: str
    description: str
    runs: tuple[tuple[Whole, Whole], ...]
    """[first, count] of ranks that follow each other."""
    generation: Whole
    world: str


T = TypeVar("T")
UNKNOWN = Signature()
NO_GROUP = GroupEntry(Group("?", "", ()), 0)
MOST_MEMBERS = 1 << 22
"""Members of all groups of one ring together."""
MOST_WORLDS = 4096
LATEST = 1 << 62
"""More calls, or a later time in nanoseconds, than possible: such a word is damaged."""


class RingReader:
    """One ring file, mapped read-only; another user's is copied, at each `refresh`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Map the file, or raise a UsageError of one line if it is not a ring of this version."""
        self.path = Path(path)
        try:
            with open_regular(self.path) as file:
                status = os.fstat(file.fileno())
                size = status.st_size
                start = file.read(rings.HEADER.size)
                if len(start) < rings.HEADER.size or start[:8] != rings.MAGIC:
                    raise UsageError(f"{self.path.name}: not a ring (expected it to begin with {rings.MAGIC.decode()})")
                self.header = header = rings.Header(*rings.HEADER.unpack(start))
                if header.version != rings.VERSION:
                    raise UsageError(
                        f"{self.path.name}: ring of version {header.version}, this distsim reads version "
                        f"{rings.VERSION}; use the distsim that wrote it"
                    )
                if size < rings.file_bytes():
                    raise UsageError(f"{self.path.name}: truncated, {size} of {rings.file_bytes()} bytes")
                self._inode = status.st_ino
                self._map: mmap.mmap | bytearray
                self._is_copy = status.st_uid != os.geteuid()
                if not self._is_copy:
                    self._map = mmap.mmap(file.fileno(), rings.file_bytes(), access=mmap.ACCESS_READ)
                else:  # its owner could cut it off under our hands, which ends a process that has mapped it
                    self._map = bytearray(rings.file_bytes())
                    if not self._copy(file):
                        raise UsageError(f"{self.path.name}: truncated while it was read")
        except OSError as error:
            raise UsageError(f"{self.path.name}: cannot be read ({error.strerror})") from None
        if not 0 <= header.rank < header.world_size <= MOST_RANKS:
            raise UsageError(f"{self.path.name}: damaged, it claims to be of rank {header.rank} of {header.world_size}")
        is_possible = 0 < header.pid < 1 << 31 and header.attempt >= 0 and header.wall_offset_ns < LATEST
        if not is_possible or not _JOB.fullmatch(header.job):
            raise UsageError(f"{self.path.name}: damaged, its header has impossible values")
        words: NDArray[np.uint64] = np.frombuffer(self._map, dtype="<u8", count=rings.HEADER_BYTES // 8)
        self._words = words
        self._records: Records = np.frombuffer(self._map, dtype=RECORD, count=rings.RECORDS, offset=rings.RECORDS_AT)
        self._table: dict[tuple[int, Any], Any] = {}
        self._signatures: dict[tuple[int, int], Signature] = {}
        self._payloads: dict[tuple[int, int], Signature] = {}
        self._members = 0
        self.damage = ""
        """Description of content that no rank writes; the monitor of a live job continues with the rest."""
        self._groups: dict[int, GroupEntry] = {}
        self._worlds: tuple[int, tuple[RecordedWorld, ...]] = 0, ()
        self.number = self.header.rank
        """Rank by which diagnoses call this process; `numbers` has those of every world's ranks if they differ
        (`evidence.processes`).
        """
        self.numbers: Mapping[str, Sequence[int]] = {}
        self.known: Collection[str] | None = None
        self._numbered: dict[int, Group] = {}

    def refresh(self) -> bool:
        """Read the file again if it is not mapped; return False if that fails, and keep what was read."""
        if not self._is_copy:
            return True
        try:
            with open_regular(self.path) as file:
                return os.fstat(file.fileno()).st_ino == self._inode and self._copy(file)
        except OSError:
            return False

    def _copy(self, file: BinaryIO) -> bool:
        """Copy the file. A record that changes meanwhile counts as unfinished, as in a mapped ring."""
        copies = [os.pread(file.fileno(), rings.file_bytes(), 0) for _ in range(2)]
        if any(len(copy) < rings.file_bytes() for copy in copies):
            return False
        first, second = (
            np.frombuffer(copy, dtype=RECORD, count=rings.RECORDS, offset=rings.RECORDS_AT) for copy in copies
        )
        self._map[:] = copies[0]
        own = np.frombuffer(self._map, dtype=RECORD, count=rings.RECORDS, offset=rings.RECORDS_AT)
        own["commit"][first["commit"] != second["commit"]] = 0
        return True

    def current(self) -> bool:
        """Return whether the file of this name is still the one that is mapped: a process that replaces itself
        (`os.execv`) makes it anew.
        """
        try:
            return self.path.stat().st_ino == self._inode
        except OSError:
            return True  # taken away: this is the last there is

    def word(self, number: int) -> int:
        """Return one changing word of the header."""
        word = int(self._words[rings.WORDS_AT // 8 + number])
        return word if word < LATEST else 0

    @property
    def count(self) -> int:
        """Return the number of calls made so far."""
        return self.word(rings.W_COUNT)

    # Who the process is ---------------------------------------------------------------------

    @property
    def worlds(self) -> tuple[RecordedWorld, ...]:
        """Return the worlds that it has joined, in their order."""
        offset = self.word(rings.W_WORLD)
        if self._worlds[0] != offset:
            worlds: list[RecordedWorld] = []
            at = offset
            while (entry := self._read_table(at, tuple[RecordedWorld, Whole])) and len(worlds) < MOST_WORLDS:
                worlds.append(entry[0])
                at = entry[1] if entry[1] < at else 0
            self._worlds = offset, tuple(reversed(worlds))
        return self._worlds[1]

    def world(self, id_: str) -> RecordedWorld | None:
        """Return the one of this identifier that it has joined."""
        return next((world for world in reversed(self.worlds) if world.id == id_), None)

    @property
    def process(self) -> Process:
        """Return the process with the number that other processes use for it."""
        header, offset_ns = self.header, self.header.wall_offset_ns
        return Process(
            header.host,
            header.pid,
            header.rank,
            header.world_size,
            header.local_rank >= 0,
            self.word(rings.W_OPENED) + offset_ns,
            self.word(rings.W_BEAT) + offset_ns,
            self.worlds,
        )

    def called(self, number: int, numbers: Mapping[str, Sequence[int]], known: Collection[str] | None = None) -> None:
        """Set the rank by which diagnoses call this process, and those of the members of its worlds.

        The members of a world that is not *known*, which a process has joined since, cannot be named yet: its groups
        have no members.
        """
        self.number, self.known = number, known
        if numbers != self.numbers:
            self.numbers = numbers
            self._numbered.clear()

    # Records --------------------------------------------------------------------------------

    def since(self, index: int) -> tuple[Records, int]:
        """Return records from *index* on that are whole, oldest first, and the index to ask for next.

        Stops before the first one that is still being written; those that were overwritten are skipped.
        """
        count = self.count
        first = max(index, count - rings.RECORDS + 1, 0)
        if first >= count:
            return self._records[:0], count
        places = np.arange(first, count) % rings.RECORDS
        wanted = np.arange(first + 1, count + 1, dtype=np.uint64)
        records = self._records[places]  # a copy
        whole = (records["commit"] == wanted) & (self._records["commit"][places] == wanted)
        behind = np.flatnonzero(~whole[-64:])
        if len(behind):  # another thread of the process still writes one of the last records
            cut = max(len(whole) - 64, 0) + int(behind[0])
            return records[:cut][whole[:cut]], first + cut
        return records[whole], count

    def last_call_ns(self) -> int:
        """Return the monotonic time of the last begin or end of a call, or of the creation of the ring."""
        latest = max(int(self._records[name].max()) for name in ("issued", "completed"))
        return max(latest if latest < LATEST else 0, self.word(rings.W_OPENED))

    def unfinished(self) -> Records:
        """Return calls that have not ended, oldest first."""
        state = self._records["flags"] & rings.STATE_MASK
        return self._in_order((state < rings.COMPLETED) & (state > 0))

    def hits(self, flag: int) -> Records:
        """Return records that carry a flag, oldest first."""
        return self._in_order((self._records["flags"] & flag) > 0)

    def _in_order(self, chosen: NDArray[np.bool_]) -> Records:
        records = self._records[np.flatnonzero(chosen)]
        records = records[records["commit"] > 0]
        return records[np.argsort(records["commit"])]

    def decode(self, record: Any, origin_ns: int) -> CallRecord:
        """Return a record, or its tuple, as the rest of distsim knows it; times in seconds since *origin_ns*
        (monotonic). Ranks in it are those that diagnoses use.
        """
        values = record if isinstance(record, tuple) else record.item()
        commit, issued, completed, flags, group, thread, seq, signature, site, print_, *more = values
        _, peer, tag, error, ordinal, _ = more
        signature_ = self.signature(signature, print_)
        stack = self.site(site)
        who = self._read_table(thread, _ThreadFields)
        entry = self.group(group)
        to = self.numbers.get(entry.world)
        if to is not None:
            peer, signature_ = _number(to, peer), signature_.renumbered(partial(_number, to))
        return signature_.record(
            rank=self.number,
            group=self.job_group(group),
            seq=seq,
            peer=peer if flags & rings.OF_TWO and peer >= 0 else None,
            tag=tag if flags & rings.P2P_CALL else None,
            is_async=bool(flags & rings.ASYNC),
            waited=bool(flags & (rings.WAITED | rings.FUTURE | rings.READ_WAITS)) or not flags & rings.ASYNC,
            site=stack[0] if stack else None,
            stack=stack,
            thread="?" if who is None else who.name,
            issued_s=(issued - origin_ns) / 1e9,
            completed_s=(completed - origin_ns) / 1e9 if completed else None,
            state=STATES.get(flags & rings.STATE_MASK, State.ISSUED),
            error=self._read_table(error, str),
            rejected=bool(flags & rings.REJECTED),
            fleeing=bool(flags & rings.PENDING_EXCEPTION),
            index=commit - 1,
            remote=signature_.remote_call(peer, tag if to is None else _number(to, tag), ordinal)
            if flags & rings.REMOTE
            else None,
        )

    # What records point to ----------------------------------------------------------------------

    def _read_table(self, offset: int, kind: type[T]) -> T | None:
        """Return the entry at *offset* (counted from 1); None for 0 and for entries that cannot be read."""
        if (offset, kind) in self._table:
            return cast("T | None", self._table[offset, kind])
        if not 0 < offset <= rings.TABLE_BYTES - 8:
            return None
        at = rings.TABLE_AT + offset - 1
        length, _kind = rings._ENTRY.unpack_from(self._map, at)
        if offset + length > rings.TABLE_BYTES:
            return None
        content: T | None = None
        try:
            content = decode(bytes(self._map[at + rings._ENTRY.size : at + rings._ENTRY.size + length]), kind)
        except Unfit as error:
            self.damage = f"an entry of its table: {error}"
        except ValueError:  # still being written
            return None
        self._table[offset, kind] = content
        return content

    def group(self, offset: int) -> GroupEntry:
        """Return the group that a record names."""
        result = self._groups.get(offset)
        if result is None:
            content = self._read_table(offset, _GroupFields)
            if content is None:
                return NO_GROUP
            result = self._groups[offset] = self._group(*content)
        return result

    def _group(
        self, name: str, description: str, runs: Sequence[tuple[int, int]], generation: int, world_id: str
    ) -> GroupEntry:
        world = self.world(world_id)
        size = self.header.world_size if world is None else world.size
        self._members += sum(count for _, count in runs)
        ranks: tuple[int, ...] = ()
        if self._members <= MOST_MEMBERS and all(first + count <= size for first, count in runs):
            ranks = tuple(rank for first, count in runs for rank in range(first, first + count))
        if (not ranks and runs) or len(set(ranks)) < len(ranks):
            self.damage = "a group: expected ranks of the job, each once"
            return NO_GROUP
        return GroupEntry(Group(name, description, ranks), generation, world.id if world is not None else "")

    def in_job(self, entry: GroupEntry) -> tuple[int, ...]:
        """Return the members of a group, by the ranks that diagnoses use."""
        if self._is_new(entry.world):
            return ()
        to = self.numbers.get(entry.world)
        return entry.group.ranks if to is None else tuple(_number(to, rank) for rank in entry.group.ranks)

    def _is_new(self, world: str) -> bool:
        """Return whether the members of *world* have not been numbered yet."""
        return bool(world) and self.known is not None and world not in self.known

    def job_group(self, offset: int) -> Group:
        """Return the group of a record, with the ranks that diagnoses use.

        If these differ from those of its world, the group gets a name of its own, because all worlds number their
        groups equally.
        """
        entry = self.group(offset)
        if self._is_new(entry.world):
            return Group(entry.group.name, entry.group.description, ())
        to = self.numbers.get(entry.world)
        if to is None:
            return entry.group
        group = self._numbered.get(offset)
        if group is None:
            name, description = entry.group.name, entry.group.description
            renamed = f"{name}@{entry.world[:6]}" if entry.world else name
            shown = name if description in ("", "undefined") else description
            group = Group(renamed, shown, self.in_job(entry))
            self._numbered[offset] = group
        return group

    def site(self, offset: int) -> tuple[Site, ...]:
        """Return the user's frames that a record names, innermost first."""
        return self._read_table(offset, Frames) or ()

    def text(self, word: int, kind: type[T]) -> T | None:
        """Return the entry of the text table to which a header word points."""
        return self._read_table(self.word(word), kind)

    def raised(self, word: int) -> Raised:
        """Return the exception that a header word names, or one without any text."""
        return self.text(word, Raised) or Raised()

    def meets(self) -> PendingRendezvous:
        """Return the store in which the rank is waiting; one without an address once it has joined."""
        return self.text(rings.W_MEETS, PendingRendezvous) or PendingRendezvous()

    def stores(self) -> dict[str, bool]:
        """Return the TCPStores that the rank has used, by address, and whether its process serves them."""
        return self.text(rings.W_STORES, dict[str, bool]) or {}

    def caught(self) -> tuple[Caught, ...]:
        """Return the last exceptions that the program handled, the newest last."""
        slots = range(rings.W_CAUGHT, rings.W_CAUGHT + rings.CAUGHT_SLOTS * rings.CAUGHT_WORDS, rings.CAUGHT_WORDS)
        kept = [
            replace(caught, times=self.word(at + 1), calls=self.word(at + 2))
            for at in slots
            if (caught := self.text(at, Caught)) is not None
        ]
        return tuple(sorted(kept, key=lambda one: one.calls))

    def signature(self, position: int, fingerprint: int) -> Signature:
        """Return the shapes and other arguments of a call; `UNKNOWN` if a later call has overwritten them."""
        key = (position, fingerprint)
        result = self._signatures.get(key)
        if result is None:
            if len(self._signatures) > 65536:
                self._signatures.clear()
            end = self.word(rings.W_PAYLOAD_END)
            if not end - rings.PAYLOAD_BYTES <= position < end:
                return UNKNOWN
            at = rings.PAYLOAD_AT + position % rings.PAYLOAD_BYTES
            length, check = rings._PAYLOAD.unpack_from(self._map, at)
            if position % rings.PAYLOAD_BYTES + rings._PAYLOAD.size + length > rings.PAYLOAD_BYTES:
                return UNKNOWN
            data = bytes(self._map[at + rings._PAYLOAD.size : at + rings._PAYLOAD.size + length])
            if not data or zlib.crc32(data) != check or position + rings.PAYLOAD_BYTES < self.word(rings.W_PAYLOAD_END):
                return UNKNOWN
            result = self._signatures[key] = self._payload(position, check, data)
        return result

    def _payload(self, position: int, check: int, data: bytes) -> Signature:
        """Read once, however many records claim it under different fingerprints."""
        result = self._payloads.get((position, check))
        if result is None:
            if len(self._payloads) > 65536:
                self._payloads.clear()
            try:
                result = decode(data, Signature)
            except ValueError as error:
                self.damage = f"a signature: {error}"
                result = UNKNOWN
            self._payloads[position, check] = result
        return result

    def position(self) -> tuple[Site | None, tuple[Site, ...], tuple[str, ...]]:
        """Return the main thread at the last heartbeat: its innermost frame, its user frames, and the store keys it
        waits for."""
        position = self._position()
        return position.innermost, position.frames, position.keys[:8]

    def key_wait_ns(self, now_ns: int) -> int:
        """Return for how long the main thread has waited for keys of a store; 0 if it does not, or has made a call
        since it was seen there.
        """
        since_ns = self.word(rings.W_POSITION_SINCE)
        return now_ns - since_ns if since_ns > self.last_call_ns() and self._position().keys else 0

    def threads(self) -> tuple[tuple[RankThread, ...], bool, bool]:
        """Return the threads of a rank whose main thread stands still, whether its script has ended, and whether
        threads or frames are left out.
        """
        position = self._position()
        if not position.threads and not position.through:
            return (), False, position.cut
        main = RankThread("MainThread", False, position.frames)
        return (main, *position.threads), position.through, position.cut

    def _position(self) -> MainPosition:
        """Return what the heartbeat wrote of the main thread; empty if it wrote nothing. If it writes just now, or the
        entry cannot be read, that is empty and cut.
        """
        for _ in range(3):
            before = self.word(rings.W_POSITION)
            if before == 0:
                return MainPosition()
            length = min(int(self._words[rings.POSITION_AT // 8]), rings.POSITION_BYTES - 8)
            data = bytes(self._map[rings.POSITION_AT + 8 : rings.POSITION_AT + 8 + length])
            if before % 2 == 0 and self.word(rings.W_POSITION) == before:
                with suppress(ValueError):
                    return decode(data, MainPosition)
                return MainPosition(cut=True)
        return MainPosition(cut=True)


def ranks_here(directory: Path, job: str, world: RecordedWorld) -> dict[int, Path]:
    """Return the ranks of *world* whose rings are in this folder, and where: those on this host."""
    readers = []
    for path in directory.glob(f"rank*.{job}.ring"):
        with suppress(UsageError):
            readers.append(RingReader(path))
    paths: dict[int, Path] = {}
    for reader in sorted(readers, key=lambda reader: reader.word(rings.W_OPENED)):  # the last one counts
        own = reader.world(world.id) if world.id else None
        if own is not None and (own.size == world.size or own.kind is WorldKind.REPLICAS):
            paths[own.rank] = reader.path
        elif not world.id and reader.header.world_size == world.size:
            paths[reader.header.rank] = reader.path
    return paths


def _number(numbers: Sequence[int], rank: int) -> int:
    """Return the number of the process that is *rank* of a world; no rank (-1) stays."""
    return numbers[rank] if 0 <= rank < len(numbers) else rank


_JOB = re.compile(r"[\w.@+-]{1,32}", re.ASCII)


def origin_of(readers: Sequence[RingReader]) -> int:
    """Return when the first rank created its ring: second 0 of the evidence (wall clock, ns)."""
    offsets = wall_offsets(readers)
    return min((r.word(rings.W_OPENED) + offsets[r.number] for r in readers), default=0)


def wall_offsets(readers: Sequence[RingReader]) -> dict[int, int]:
    """Rank -> wall clock less monotonic clock (ns): one figure a host, so that its ranks' times keep their order."""
    of_host: dict[str, int] = {}
    for reader in readers:
        of_host.setdefault(reader.header.host, reader.header.wall_offset_ns)
    return {reader.number: of_host[reader.header.host] for reader in readers}
