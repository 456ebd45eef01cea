"""Reading a ring file: while its process writes, after it died, or when it is no ring at all.

Everything read may be half written or overwritten a moment later. A record counts only when its
commit word is right before and after it was copied; what cannot be read is left out.
"""

from __future__ import annotations

import json
import mmap
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distsim.debug import ring as rings
from distsim.debug.records import CallRecord, Group, Site, State
from distsim.errors import UsageError

__all__ = ["Header", "RingReader"]

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
    """What never changes in a ring."""

    rank: int
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
    """A group as one rank wrote it down; *generation* counts groups of one name in one process."""

    group: Group
    generation: int

    @property
    def key(self) -> tuple[str, tuple[int, ...], int]:
        return self.group.name, self.group.ranks, self.generation


@dataclass(frozen=True)
class Signature:
    """What a call was asked to do, as the payload ring holds it."""

    op: str = "?"
    inputs: tuple[tuple[int, ...], ...] = ()
    outputs: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    reduce_op: str | None = None
    root: int | None = None
    input_splits: tuple[int, ...] | None = None
    output_splits: tuple[int, ...] | None = None
    new_ranks: tuple[int, ...] | None = None
    nbytes: int = 0
    device: str = "cpu"

    @classmethod
    def read(cls, said: dict[str, Any]) -> Signature:
        """From its JSON."""
        return cls(
            op=str(said.get("op", "?")),
            inputs=tuple(tuple(shape) for shape in said.get("in", ())),
            outputs=tuple(tuple(shape) for shape in said.get("out", ())),
            dtypes=(str(said["dtype"]),) if "dtype" in said else (),
            reduce_op=said.get("reduce"),
            root=said.get("root"),
            input_splits=tuple(said["isplit"]) if "isplit" in said else None,
            output_splits=tuple(said["osplit"]) if "osplit" in said else None,
            new_ranks=tuple(said["new"]) if "new" in said else None,
            nbytes=int(said.get("bytes", 0)),
            device=str(said.get("device", "cpu")),
        )


UNKNOWN = Signature()
MOST_RANKS = 1 << 20
"""A larger job's rings are taken for damaged."""


class RingReader:
    """One ring file, mapped read-only."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Map the file; a file that is no ring of this version is a UsageError of one line."""
        self.path = Path(path)
        try:
            size = self.path.stat().st_size
            with self.path.open("rb") as file:
                start = file.read(rings.HEADER.size)
                if len(start) < rings.HEADER.size or start[:8] != rings.MAGIC:
                    raise UsageError(f"{self.path.name}: no ring (expected it to begin with {rings.MAGIC.decode()})")
                fields = rings.HEADER.unpack(start)
                if fields[1] != rings.VERSION:
                    raise UsageError(
                        f"{self.path.name}: ring of version {fields[1]}, this distsim reads version {rings.VERSION}; "
                        "use the distsim that wrote it"
                    )
                if size < rings.file_bytes():
                    raise UsageError(f"{self.path.name}: truncated, {size} of {rings.file_bytes()} bytes")
                self._map = mmap.mmap(file.fileno(), rings.file_bytes(), access=mmap.ACCESS_READ)
        except OSError as error:
            raise UsageError(f"{self.path.name}: cannot be read ({error.strerror})") from None
        if not fields[9] < fields[10] <= MOST_RANKS:
            raise UsageError(f"{self.path.name}: damaged, it says it is of rank {fields[9]} of {fields[10]}")
        self.header = Header(
            rank=fields[9],
            world_size=fields[10],
            local_rank=fields[11],
            attempt=fields[12],
            pid=fields[13],
            start_ticks=fields[14],
            wall_offset_ns=fields[15],
            job=_text(fields[16]),
            host=_text(fields[17]),
        )
        words: NDArray[np.uint64] = np.frombuffer(self._map, dtype="<u8", count=rings.HEADER_BYTES // 8)
        self._words = words
        self._records: Records = np.frombuffer(self._map, dtype=RECORD, count=rings.RECORDS, offset=rings.RECORDS_AT)
        self._table: dict[int, Any] = {}
        self._signatures: dict[tuple[int, int], Signature] = {}
        self._groups: dict[int, GroupEntry] = {}
        self._sites: dict[int, tuple[Site, ...]] = {}

    def word(self, number: int) -> int:
        """One changing word of the header."""
        return int(self._words[rings.WORDS_AT // 8 + number])

    @property
    def count(self) -> int:
        """Calls made so far."""
        return self.word(rings.W_COUNT)

    # Records --------------------------------------------------------------------------------

    def since(self, index: int) -> tuple[Records, int]:
        """Records from *index* on that are whole, oldest first, and the index to ask for next.

        Stops before the first one that is still being written; those that were overwritten are skipped.
        """
        count = self.count
        first = max(index, count - rings.RECORDS + 1, 0)
        if first >= count:
            return self._records[:0], count
        places = np.arange(first, count) % rings.RECORDS
        wanted = np.arange(first + 1, count + 1, dtype=np.uint64)
        found = self._records[places]  # a copy
        whole = (found["commit"] == wanted) & (self._records["commit"][places] == wanted)
        behind = np.flatnonzero(~whole[-64:])
        if len(behind):  # another thread of the process still writes one of the last records
            cut = max(len(whole) - 64, 0) + int(behind[0])
            return found[:cut][whole[:cut]], first + cut
        return found[whole], count

    def unfinished(self) -> Records:
        """Calls that have not ended, oldest first."""
        state = self._records["flags"] & rings.STATE_MASK
        places = np.flatnonzero((state < rings.COMPLETED) & (state > 0))
        records = self._records[places]
        records = records[records["commit"] > 0]
        return records[np.argsort(records["commit"])]

    def hits(self, flag: int) -> Records:
        """Records that carry a flag, oldest first."""
        places = np.flatnonzero(self._records["flags"] & flag)
        records = self._records[places]
        records = records[records["commit"] > 0]
        return records[np.argsort(records["commit"])]

    def decode(self, record: Any, origin_ns: int) -> CallRecord:
        """A record, or its tuple, as the rest of distsim knows it; times in seconds since *origin_ns* (monotonic)."""
        values = record if isinstance(record, tuple) else record.item()
        commit, issued, completed, flags, group, thread, seq, signature, site, print_, _, peer, tag, error, *_ = values
        said = self.signature(signature, print_)
        p2p = bool(flags & rings.P2P_CALL)
        stack = self.site(site)
        who = self._read_table(thread)
        why = self._read_table(error) if error else None
        return CallRecord(
            rank=self.header.rank,
            group=self.group(group).group,
            seq=seq,
            op=said.op,
            input_shapes=said.inputs,
            output_shapes=said.outputs,
            dtypes=said.dtypes,
            reduce_op=said.reduce_op,
            root=said.root,
            peer=peer if p2p and peer >= 0 else None,
            tag=tag if p2p else None,
            input_splits=said.input_splits,
            output_splits=said.output_splits,
            new_ranks=said.new_ranks,
            nbytes=said.nbytes,
            device=said.device,
            is_async=bool(flags & rings.ASYNC),
            waited=bool(flags & (rings.WAITED | rings.FUTURE)) or not flags & rings.ASYNC,
            site=stack[0] if stack else None,
            stack=stack,
            thread=str(who[1]) if who else "?",
            issued_s=(issued - origin_ns) / 1e9,
            completed_s=(completed - origin_ns) / 1e9 if completed else None,
            state=STATES.get(flags & rings.STATE_MASK, State.ISSUED),
            error=str(why) if why is not None else None,
            index=commit - 1,
        )

    # What records point to ----------------------------------------------------------------------

    def _read_table(self, offset: int) -> Any:
        """The entry at *offset* (counted from 1); None for 0 and for what cannot be read."""
        if offset in self._table:
            return self._table[offset]
        if not 0 < offset <= rings.TABLE_BYTES - 8:
            return None
        at = rings.TABLE_AT + offset - 1
        length, _kind = rings._ENTRY.unpack_from(self._map, at)
        if offset + length > rings.TABLE_BYTES:
            return None
        try:
            content = json.loads(self._map[at + rings._ENTRY.size : at + rings._ENTRY.size + length])
        except ValueError:  # still being written
            return None
        self._table[offset] = content
        return content

    def group(self, offset: int) -> GroupEntry:
        """The group that a record names."""
        found = self._groups.get(offset)
        if found is None:
            content = self._read_table(offset)
            if content is None:
                return GroupEntry(Group("?", "", ()), 0)
            name, description, runs, generation = content
            ranks = tuple(rank for first, count in runs for rank in range(first, first + count))
            found = self._groups[offset] = GroupEntry(Group(name, description, ranks), generation)
        return found

    def site(self, offset: int) -> tuple[Site, ...]:
        """The user's frames that a record names, innermost first."""
        found = self._sites.get(offset)
        if found is None:
            content = self._read_table(offset)
            if content is None:
                return ()
            found = self._sites[offset] = tuple(Site.from_json(frame) for frame in content)
        return found

    def text(self, word: int) -> Any:
        """The table entry that a header word names."""
        return self._read_table(self.word(word))

    def signature(self, position: int, fingerprint: int) -> Signature:
        """Shapes and the rest of a call; `UNKNOWN` where a later one has overwritten it."""
        key = (position, fingerprint)
        found = self._signatures.get(key)
        if found is None:
            if len(self._signatures) > 65536:
                self._signatures.clear()
            at = rings.PAYLOAD_AT + position % rings.PAYLOAD_BYTES
            length, check = rings._PAYLOAD.unpack_from(self._map, at)
            if position % rings.PAYLOAD_BYTES + rings._PAYLOAD.size + length > rings.PAYLOAD_BYTES:
                return UNKNOWN
            data = self._map[at + rings._PAYLOAD.size : at + rings._PAYLOAD.size + length]
            if not data or zlib.crc32(data) != check or position + rings.PAYLOAD_BYTES < self.word(rings.W_PAYLOAD_END):
                return UNKNOWN
            found = self._signatures[key] = Signature.read(json.loads(data))
        return found

    def position(self) -> tuple[Site | None, tuple[Site, ...], tuple[str, ...]]:
        """Where the main thread stood at the last heartbeat: its innermost frame, its user frames, and the
        keys of a store that it waits for."""
        for _ in range(3):
            before = self.word(rings.W_POSITION)
            if before == 0:
                return None, (), ()
            length = min(int(self._words[rings.POSITION_AT // 8]), rings.POSITION_BYTES - 8)
            data = self._map[rings.POSITION_AT + 8 : rings.POSITION_AT + 8 + length]
            if before % 2 == 0 and self.word(rings.W_POSITION) == before:
                try:
                    inner, frames, keys = json.loads(data)
                except ValueError:
                    return None, (), ()
                return Site(*inner), tuple(Site.from_json(frame) for frame in frames), tuple(keys)
        return None, (), ()


def _text(data: bytes) -> str:
    return data.rstrip(b"\0").decode(errors="replace")
