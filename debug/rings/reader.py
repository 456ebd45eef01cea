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
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from distsim.debug.records import CallRecord, Caught, Group, Site, State
from distsim.debug.records.signature import Signature
from distsim.debug.rings import layout as rings
from distsim.debug.rings.files import Process, RecordedWorld
from distsim.errors import UsageError
from distsim.text.untrusted_input import MOST_RANKS, load_json, open_regular, printable, text, whole, wholes

__all__ = ["Header", "RingReader", "ranks_here"]

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
class Header:
    """Constant part of a ring."""

    rank: int
    """This and the next two as in `layout.HEADER`; diagnoses use other numbers."""
    world_size: int
    local_rank: int
    attempt: int
    pid: int
    start_ticks: int
    wall_offset_ns: int
    job: str
    host: str


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


UNKNOWN = Signature()
NO_GROUP = GroupEntry(Group("?", "", ()), 0)
MOST_MEMBERS = 1 << 22
"""Members of all groups of one ring together."""
MOST_FRAMES = 1024
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
                fields = rings.HEADER.unpack(start)
                if fields[1] != rings.VERSION:
                    raise UsageError(
                        f"{self.path.name}: ring of version {fields[1]}, this distsim reads version {rings.VERSION}; "
                        "use the distsim that wrote it"
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
        if not 0 <= fields[9] < fields[10] <= MOST_RANKS:
            raise UsageError(f"{self.path.name}: damaged, it claims to be of rank {fields[9]} of {fields[10]}")
        job, host = _text(fields[16]), _text(fields[17])
        if not 0 < fields[13] < 1 << 31 or fields[12] < 0 or fields[15] >= LATEST or not _JOB.fullmatch(job):
            raise UsageError(f"{self.path.name}: damaged, its header has impossible values")
        self.header = Header(
            rank=fields[9],
            world_size=fields[10],
            local_rank=fields[11],
            attempt=fields[12],
            pid=fields[13],
            start_ticks=fields[14],
            wall_offset_ns=fields[15],
            job=job,
            host=host,
        )
        words: NDArray[np.uint64] = np.frombuffer(self._map, dtype="<u8", count=rings.HEADER_BYTES // 8)
        self._words = words
        self._records: Records = np.frombuffer(self._map, dtype=RECORD, count=rings.RECORDS, offset=rings.RECORDS_AT)
        self._table: dict[int, Any] = {}
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
        self._sites: dict[int, tuple[Site, ...]] = {}

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
            try:
                while at and len(worlds) < MOST_WORLDS:
                    *content, before = self._read_table(at)
                    worlds.append(RecordedWorld.from_json(content))
                    at = whole(before, "world", 0, at - 1)
            except (TypeError, ValueError) as error:
                self.damage = f"a world: {error}"
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
        places = np.flatnonzero((state < rings.COMPLETED) & (state > 0))
        records = self._records[places]
        records = records[records["commit"] > 0]
        return records[np.argsort(records["commit"])]

    def hits(self, flag: int) -> Records:
        """Return records that carry a flag, oldest first."""
        places = np.flatnonzero(self._records["flags"] & flag)
        records = self._records[places]
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
        who, why = self._read_table(thread), self._read_table(error) if error else None
        thread_name = who[1] if isinstance(who, list) and len(who) > 1 and isinstance(who[1], str) else "?"
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
            waited=bool(flags & (rings.WAITED | rings.FUTURE)) or not flags & rings.ASYNC,
            site=stack[0] if stack else None,
            stack=stack,
            thread=printable(thread_name),
            issued_s=(issued - origin_ns) / 1e9,
            completed_s=(completed - origin_ns) / 1e9 if completed else None,
            state=STATES.get(flags & rings.STATE_MASK, State.ISSUED),
            error=printable(why) if isinstance(why, str) else None,
            rejected=bool(flags & rings.REJECTED),
            fleeing=bool(flags & rings.PENDING_EXCEPTION),
            index=commit - 1,
            remote=signature_.remote_call(peer, tag if to is None else _number(to, tag), ordinal)
            if flags & rings.REMOTE
            else None,
        )

    # What records point to ----------------------------------------------------------------------

    def _read_table(self, offset: int) -> Any:
        """Return the entry at *offset* (counted from 1); None for 0 and for entries that cannot be read."""
        if offset in self._table:
            return self._table[offset]
        if not 0 < offset <= rings.TABLE_BYTES - 8:
            return None
        at = rings.TABLE_AT + offset - 1
        length, _kind = rings._ENTRY.unpack_from(self._map, at)
        if offset + length > rings.TABLE_BYTES:
            return None
        try:
            content = load_json(bytes(self._map[at + rings._ENTRY.size : at + rings._ENTRY.size + length]))
        except ValueError:  # still being written
            return None
        self._table[offset] = content
        return content

    def group(self, offset: int) -> GroupEntry:
        """Return the group that a record names."""
        result = self._groups.get(offset)
        if result is None:
            content = self._read_table(offset)
            if content is None:
                return NO_GROUP
            try:
                result = self._groups[offset] = self._group(content)
            except (TypeError, ValueError) as error:
                self.damage = f"a group: {error}"
                result = self._groups[offset] = NO_GROUP
        return result

    def _group(self, content: Any) -> GroupEntry:
        name, description, runs, generation, world_id = content
        world = self.world(world_id)
        size = self.header.world_size if world is None else world.size
        pairs = [wholes(run, "ranks", 0, size) for run in runs]
        self._members += sum(count for _, count in pairs)
        if self._members > MOST_MEMBERS or any(first + count > size for first, count in pairs):
            raise ValueError("a group with more ranks than the job")
        ranks = tuple(rank for first, count in pairs for rank in range(first, first + count))
        if len(set(ranks)) < len(ranks):
            raise ValueError("a rank that is in a group twice")
        group = Group(text(name, "name"), text(description, "description"), ranks)
        return GroupEntry(group, whole(generation, "generation"), world.id if world is not None else "")

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
        result = self._sites.get(offset)
        if result is None:
            content = self._read_table(offset)
            if content is None:
                return ()
            result = self._sites[offset] = self._frames(content)
        return result

    def text(self, word: int) -> Any:
        """Return the entry of the text table to which a header word points."""
        return self._read_table(self.word(word))

    def _frames(self, content: Any) -> tuple[Site, ...]:
        try:
            return _frames(content)
        except (TypeError, ValueError) as error:
            self.damage = f"a call site: {error}"
            return ()

    def raised(self, word: int) -> tuple[dict[str, str], tuple[Site, ...]]:
        """Return the exception that a header word names: its last line (`error`), `traceback` and `origins` where
        they are known, and its frames, innermost first.
        """
        content = self.text(word)
        if not isinstance(content, dict):
            return {}, ()
        texts = {key: value for key in ("error", "traceback", "origins") if isinstance(value := content.get(key), str)}
        return {key: printable(text) for key, text in texts.items()}, self._frames(content.get("frames", []))

    def meets(self) -> tuple[str | None, bool]:
        """Return the address of the store in which the rank is waiting (None once it has joined), and whether it has
        reached it.
        """
        content = self.text(rings.W_MEETS)
        if not isinstance(content, dict) or not isinstance(content.get("at"), str) or content.get("by_hand"):
            return None, True
        return printable(content["at"]), content.get("reached") is True

    def meets_by_hand(self) -> str | None:
        """Return the rendezvous outside init_process_group in which the main thread waits."""
        content = self.text(rings.W_MEETS)
        by_hand = isinstance(content, dict) and content.get("by_hand")
        return printable(str(content.get("at"))) if by_hand else None

    def caught(self) -> tuple[Caught, ...]:
        """Return the last exceptions that the program handled, the newest last."""
        kept: list[Caught] = []
        for at in range(rings.W_CAUGHT, rings.W_CAUGHT + rings.CAUGHT_SLOTS * rings.CAUGHT_WORDS, rings.CAUGHT_WORDS):
            content = self.text(at)
            frames = self._frames([content.get("site")]) if isinstance(content, dict) else ()
            if frames and isinstance(error := content.get("error"), str):
                thread = printable(str(content.get("thread", "")))
                kept.append(Caught(printable(error), frames[0], self.word(at + 1), self.word(at + 2), thread))
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
                result = Signature.read(load_json(data))
            except (ValueError, AttributeError, TypeError) as error:
                self.damage = f"a signature: {error}"
                result = UNKNOWN
            self._payloads[position, check] = result
        return result

    def position(self) -> tuple[Site | None, tuple[Site, ...], tuple[str, ...]]:
        """Return the main thread at the last heartbeat: its innermost frame, its user frames, and the store keys it
        waits for."""
        for _ in range(3):
            before = self.word(rings.W_POSITION)
            if before == 0:
                return None, (), ()
            length = min(int(self._words[rings.POSITION_AT // 8]), rings.POSITION_BYTES - 8)
            data = bytes(self._map[rings.POSITION_AT + 8 : rings.POSITION_AT + 8 + length])
            if before % 2 == 0 and self.word(rings.W_POSITION) == before:
                try:
                    inner, frames, keys = load_json(data)
                    frames_ = _frames([inner])
                    return (frames_ or (None,))[0], _frames(frames), tuple(text(key, "key", 400) for key in keys[:8])
                except (TypeError, ValueError):
                    return None, (), ()
        return None, (), ()


def ranks_here(directory: Path, job: str, world: RecordedWorld) -> dict[int, Path]:
    """Return the ranks of *world* whose rings are in this folder, and where: those on this host."""
    readers = []
    for path in directory.glob(f"rank*.{job}.ring"):
        with suppress(UsageError):
            readers.append(RingReader(path))
    paths: dict[int, Path] = {}
    for reader in sorted(readers, key=lambda reader: reader.word(rings.W_OPENED)):  # the last one counts
        own = reader.world(world.id) if world.id else None
        if own is not None and own.size == world.size:
            paths[own.rank] = reader.path
        elif not world.id and reader.header.world_size == world.size:
            paths[reader.header.rank] = reader.path
    return paths


def _number(numbers: Sequence[int], rank: int) -> int:
    """Return the number of the process that is *rank* of a world; no rank (-1) stays."""
    return numbers[rank] if 0 <= rank < len(numbers) else rank


_JOB = re.compile(r"[\w.@+-]{1,32}", re.ASCII)


def _frames(content: Any) -> tuple[Site, ...]:
    """Return frames from their JSON form (`Site.to_json`)."""
    return tuple(_frame(*frames) for frames in content[:MOST_FRAMES])


def _frame(file: object, line: object, function: object, below: Any = None) -> Site:
    through = None if below is None else _frame(*below[:3])
    return Site(text(file, "file"), whole(line, "line"), text(function, "function", 400), through)


def _text(data: bytes) -> str:
    return printable(data.rstrip(b"\0").decode(errors="replace"))
