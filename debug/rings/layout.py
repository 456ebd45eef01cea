"""One rank's flight records in a memory-mapped file that outlives the process.

A ring file holds, for one rank of one job: a header (who, when, heartbeat, how the process ended),
the last `RECORDS` calls as fixed-size binary records, an append-only *table* of what seldom changes
(groups, call sites, threads, errors) and a *payload* ring of signatures (shapes, splits), which may
change with every call. There is no lock: one process writes, others read while it does, or after
it died. A record is valid when its commit word is its index + 1 before and after it was read.

The writer costs a few microseconds a call: `issue` is one `pack_into` and three word stores.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import socket
import struct
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from distsim.debug.rings.private import create_private

__all__ = [
    "ASYNC",
    "COMPLETED",
    "DROPPED",
    "FAILED",
    "ISSUED",
    "P2P_CALL",
    "STARTED",
    "STATE_MASK",
    "WAITED",
    "WAITING",
    "RingWriter",
    "fingerprint",
]

MAGIC = b"DSIMRING"
VERSION = 1

RECORDS = 4096
RECORD_WORDS = 14
RECORD_BODY = struct.Struct("<QQQIIQQQQQiiQQQ")
"""All words of a record but the first, the commit word: issued_ns, completed_ns, flags, group (table),
thread (table), seq, signature (payload), site (table), fingerprint, site hash, peer, tag, error (table),
ordinal (which send to, or receive from, this peer with this tag), spare."""
WORD_COMPLETED, WORD_FLAGS, WORD_PEER, WORD_ERROR = 2, 3, 10, 11

TABLE_BYTES = 512 * 1024
PAYLOAD_BYTES = 512 * 1024
MEETING_GROUPS = 128
MEETING_WINDOW = 128
"""Strict level: the last `MEETING_WINDOW` fingerprints of each of `MEETING_GROUPS` groups."""

MEETING_WORDS = MEETING_WINDOW * 3 + 1
"""A group's row: hash of its name, then (seq, fingerprint, record index + 1) at seq % MEETING_WINDOW."""

HEADER_BYTES = 4096
HEADER = struct.Struct("<8sIIIIIIIIiiiiQQQ32s64s")
"""magic, version, header bytes, records, record words, table bytes, payload bytes, meeting groups,
meeting window, rank, world size, local rank, attempt, pid, start time of the process (clock ticks
since boot), wall minus monotonic clock (ns), job, host."""

# Words of the header that change, from WORDS_AT on.
WORDS_AT = 512
(
    W_COUNT,  # records issued
    W_BEAT,  # monotonic ns of the last heartbeat
    W_LIFE,  # Life
    W_TABLE_USED,
    W_PAYLOAD_END,  # monotonic position in the payload ring
    W_EXIT_CODE,  # exit code + 1000, 0: unknown
    W_EXCEPTION,  # table offset + 1 of the exception that ended the rank
    W_POSITION,  # odd while the main thread's position is being written
    W_POSITION_SINCE,  # monotonic ns: the main thread has stood there since
    W_MAIN_THREAD,  # its Python identifier, as faulthandler prints it
    W_STACK_SIGNAL,  # the signal that makes faulthandler write stacks, 0: none
    W_OPENED,  # monotonic ns of the ring's making
    W_JOINED,  # monotonic ns: init_process_group came back
    W_THREADS,  # Python threads of the user's that have made calls
    W_PENDING,  # table offset + 1: an exception is on its way while a `finally` makes calls
    _,  # free: its place stays, or rings of other versions would be misread
    W_FINDING,  # table offset of what the rank itself found out
    W_LOCAL_WORLD,  # ranks on this host, 0: all
    W_GUESSED,  # calls made when the rank found that out from outside, + 1; 0: it did not
) = range(19)

POSITION_AT = 1024
POSITION_BYTES = HEADER_BYTES - POSITION_AT
"""Length and JSON of the main thread's position: [innermost frame, user frames]."""

# Life of a rank, as itself sees it.
LIFE_STARTED, LIFE_JOINED, LIFE_EXITING, LIFE_RAISED = 1, 2, 3, 4
EXIT_CODE_0 = 1000
"""What W_EXIT_CODE says of exit code 0; 0 there says nothing."""

# Flags of a record; the lowest three bits are its state.
STATE_MASK = 7
ISSUED, STARTED, COMPLETED, FAILED = 1, 2, 3, 4
WAITING = 1 << 3  # a thread is inside wait()
ASYNC = 1 << 4
WAITED = 1 << 5
DROPPED = 1 << 6  # the handle was thrown away before anybody waited
PENDING_EXCEPTION = 1 << 7  # made while an exception was on its way (finally, except)
NAN_INPUT = 1 << 8
MODIFIED = 1 << 10  # the buffer was written while in flight
RACE = 1 << 11  # another thread was inside a call on the same group
P2P_CALL = 1 << 12
FUTURE = 1 << 13  # somebody took the future
UNCHECKED = 1 << 14  # strict did not hold this call
REJECTED = 1 << 15  # torch refused it at this rank, before any other could hear of it

TABLE_GROUP, TABLE_SITE, TABLE_THREAD, TABLE_TEXT = 1, 2, 3, 4
_ENTRY = struct.Struct("<IB")
_PAYLOAD = struct.Struct("<II")


def file_bytes() -> int:
    """Size of a ring file of this version."""
    meeting = MEETING_GROUPS * MEETING_WORDS * 8
    return HEADER_BYTES + RECORDS * RECORD_WORDS * 8 + TABLE_BYTES + PAYLOAD_BYTES + meeting


RECORDS_AT = HEADER_BYTES
TABLE_AT = RECORDS_AT + RECORDS * RECORD_WORDS * 8
PAYLOAD_AT = TABLE_AT + TABLE_BYTES
MEETING_AT = PAYLOAD_AT + PAYLOAD_BYTES


def fingerprint(content: object, pairwise: bool) -> int:
    """64 bits of a call's content; bit 0 is set where equal calls may still not fit (`all_to_all`)."""
    digest = int.from_bytes(blake2b(repr(content).encode(), digest_size=8).digest(), "little")
    return (digest & ~1) | int(pairwise)


def name_hash(name: str) -> int:
    """64 bits of a group's name, never 0."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little") | 1


def process_start_ticks(pid: int) -> int:
    """Field 22 of /proc/PID/stat: with the pid it names a process for good. 0: no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[19])


def wall_offset_ns() -> int:
    """The wall clock less the monotonic one: of several readings that between whose two halves the least time went."""
    readings = []
    for _ in range(5):
        before = time.monotonic_ns()
        wall = time.time_ns()
        after = time.monotonic_ns()
        readings.append((after - before, wall - (before + after) // 2))
    return min(readings)[1]


class RingWriter:
    """The writing end; one for each process. Every method may be called from any thread."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        rank: int,
        world_size: int,
        local_rank: int,
        job: str,
        attempt: int,
    ) -> None:
        self.path = Path(path)
        size = file_bytes()
        scratch = self.path.with_suffix(f".{os.getpid()}.new")
        descriptor = create_private(scratch)
        try:
            # Reserve now: a page that cannot be had later would be a SIGBUS in the middle of training.
            os.posix_fallocate(descriptor, 0, size)
            self._map = mmap.mmap(descriptor, size)
        except OSError:
            scratch.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        now = time.monotonic_ns()
        HEADER.pack_into(
            self._map,
            0,
            MAGIC,
            VERSION,
            HEADER_BYTES,
            RECORDS,
            RECORD_WORDS,
            TABLE_BYTES,
            PAYLOAD_BYTES,
            MEETING_GROUPS,
            MEETING_WINDOW,
            rank,
            world_size,
            local_rank,
            attempt,
            os.getpid(),
            process_start_ticks(os.getpid()),
            wall_offset_ns(),
            job.encode()[:32],
            socket.gethostname().encode()[:64],
        )
        self.rank = rank
        self.world_size = world_size
        self.job = job
        self.words = memoryview(self._map).cast("Q")
        self._buffer = memoryview(self._map)
        self._counter = itertools.count()
        self._table: dict[tuple[int, Any], int] = {}
        self._payload: dict[Any, tuple[int, int]] = {}
        self._rows = 0
        self._header(W_OPENED, now)
        self._header(W_BEAT, now)
        self._header(W_LIFE, LIFE_STARTED)
        os.rename(scratch, self.path)  # a reader never sees half a header

    # What is written once ------------------------------------------------------------------

    def header(self, word: int, value: int) -> None:
        """Set one changing word of the header."""
        self._header(word, value)

    def _header(self, word: int, value: int) -> None:
        self.words[WORDS_AT // 8 + word] = value

    def entry(self, kind: int, key: Any, content: Any) -> int:
        """Offset + 1 in the table of *content* (JSON), written on first sight of *key*; 0: the table is full."""
        offset = self._table.get((kind, key))
        if offset is None:
            offset = self._table[(kind, key)] = self._append(kind, json.dumps(content).encode())
        return offset

    def _append(self, kind: int, data: bytes) -> int:
        used = self.words[WORDS_AT // 8 + W_TABLE_USED]
        need = (_ENTRY.size + len(data) + 7) & ~7
        if used + need > TABLE_BYTES:
            return 0
        # Reserve before writing: a second thread then appends behind this entry.
        self._header(W_TABLE_USED, used + need)
        at = TABLE_AT + used
        _ENTRY.pack_into(self._buffer, at, len(data), kind)
        self._buffer[at + _ENTRY.size : at + _ENTRY.size + len(data)] = data
        return used + 1

    def group(self, name: str, description: str, ranks: Sequence[int], generation: int = 0) -> int:
        """Table offset of a group; ranks are kept as [first, count] runs. *generation*: how often this
        process had made the group before."""
        runs: list[list[int]] = []
        for rank in ranks:
            if runs and runs[-1][0] + runs[-1][1] == rank:
                runs[-1][1] += 1
            else:
                runs.append([rank, 1])
        return self.entry(TABLE_GROUP, (name, tuple(ranks), generation), [name, description, runs, generation])

    def text(self, text: str) -> int:
        """Table offset of a text (an exception, a traceback)."""
        return self.entry(TABLE_TEXT, text, text)

    def signature(self, key: Any, describe: Callable[[Any], tuple[dict[str, Any], bool]]) -> tuple[int, int]:
        """Position in the payload ring and fingerprint of a call's signature; cached by *key*.

        *describe(key)* answers its content for JSON and whether equal calls may still not fit.
        """
        found = self._payload.get(key)
        end = self.words[WORDS_AT // 8 + W_PAYLOAD_END]
        if found is not None and found[0] + PAYLOAD_BYTES // 2 > end:
            return found
        if len(self._payload) > RECORDS:
            self._payload.clear()
        content, pairwise = describe(key)
        data = json.dumps(content).encode()
        need = (_PAYLOAD.size + len(data) + 7) & ~7
        if need > PAYLOAD_BYTES // 8:  # thousands of splits: keep the operation
            data = json.dumps({"op": content["op"]}).encode()
            need = (_PAYLOAD.size + len(data) + 7) & ~7
        if end % PAYLOAD_BYTES + need > PAYLOAD_BYTES:
            end += PAYLOAD_BYTES - end % PAYLOAD_BYTES
        self._header(W_PAYLOAD_END, end + need)
        at = PAYLOAD_AT + end % PAYLOAD_BYTES
        _PAYLOAD.pack_into(self._buffer, at, len(data), zlib.crc32(data))
        self._buffer[at + _PAYLOAD.size : at + _PAYLOAD.size + len(data)] = data
        found = (end, fingerprint(content, pairwise))
        self._payload[key] = found
        return found

    # Every call ------------------------------------------------------------------------------

    def issue(
        self,
        flags: int,
        group: int,
        thread: int,
        seq: int,
        signature: int,
        site: int,
        print_: int,
        site_hash: int,
        peer: int,
        tag: int,
        ordinal: int = 0,
        _now: Any = time.monotonic_ns,
        _pack: Any = RECORD_BODY.pack_into,
    ) -> int:
        """Write a record of a call that is being made; answers its index."""
        index: int = next(self._counter)
        word = RECORDS_AT // 8 + (index % RECORDS) * RECORD_WORDS
        words = self.words
        words[word] = 0
        _pack(
            self._buffer,
            word * 8 + 8,
            _now(),
            0,
            flags,
            group,
            thread,
            seq,
            signature,
            site,
            print_,
            site_hash,
            peer,
            tag,
            0,
            ordinal,
            0,
        )
        words[word] = index + 1
        words[WORDS_AT // 8] = index + 1
        return index

    def flags(self, index: int) -> int:
        """The flags of a record that was just written."""
        return self.words[RECORDS_AT // 8 + (index % RECORDS) * RECORD_WORDS + WORD_FLAGS]

    def template(self, index: int) -> bytes:
        """The body of a record that was just written, for `replay`."""
        word = RECORDS_AT // 8 + (index % RECORDS) * RECORD_WORDS
        return bytes(self._buffer[word * 8 + 8 : (word + RECORD_WORDS) * 8])

    def replay(self, body: bytes, seq: int, _now: Any = time.monotonic_ns) -> int:
        """Write a record that differs from an earlier one only in time and number."""
        index: int = next(self._counter)
        word = RECORDS_AT // 8 + (index % RECORDS) * RECORD_WORDS
        words = self.words
        words[word] = 0
        self._buffer[word * 8 + 8 : word * 8 + RECORD_WORDS * 8] = body
        words[word + 1] = _now()
        words[word + 5] = seq
        words[word] = words[WORDS_AT // 8] = index + 1
        return index

    def mark(self, index: int, flags: int) -> None:
        """Add flags to a record, unless its slot was taken by a later call."""
        word = RECORDS_AT // 8 + (index % RECORDS) * RECORD_WORDS
        if self.words[word] == index + 1:
            self.words[word + WORD_FLAGS] |= flags

    def unmark(self, index: int, flags: int) -> None:
        """Take flags from a record."""
        word = RECORDS_AT // 8 + (index % RECORDS) * RECORD_WORDS
        if self.words[word] == index + 1:
            self.words[word + WORD_FLAGS] &= ~flags

    def finish(self, index: int, state: int, _now: Any = time.monotonic_ns) -> None:
        """Stamp the end of a call: *state* is COMPLETED or FAILED, with further flags to add."""
        word = RECORDS_AT // 8 + (index % RECORDS) * RECORD_WORDS
        words = self.words
        if words[word] == index + 1:
            words[word + WORD_COMPLETED] = _now()
            words[word + WORD_FLAGS] = words[word + WORD_FLAGS] & ~(STATE_MASK | WAITING) | state

    def finish_as(self, index: int, flags: int, _now: Any = time.monotonic_ns) -> None:
        """Stamp the end of a call whose flags are known."""
        word = RECORDS_AT // 8 + (index % RECORDS) * RECORD_WORDS
        words = self.words
        if words[word] == index + 1:
            words[word + WORD_COMPLETED] = _now()
            words[word + WORD_FLAGS] = flags

    def error(self, index: int, text: str) -> None:
        """Attach an error's text to a record."""
        word = RECORDS_AT // 8 + (index % RECORDS) * RECORD_WORDS
        if self.words[word] == index + 1:
            self.words[word + WORD_ERROR] = self.text(text[:2000])

    def meeting_row(self, name: str) -> int | None:
        """First word of the row that holds a group's fingerprints; None: all rows are taken."""
        if self._rows >= MEETING_GROUPS:
            return None
        word = MEETING_AT // 8 + self._rows * MEETING_WORDS
        self._rows += 1
        self.words[word] = name_hash(name)
        return word

    def publish(self, row: int, seq: int, print_: int, index: int) -> None:
        """Show the members of a group what this rank's call number *seq* is."""
        word = row + 1 + (seq % MEETING_WINDOW) * 3
        words = self.words
        words[word] = 0
        words[word + 1] = print_
        words[word + 2] = index + 1
        words[word] = seq

    def peer(self, index: int, peer: int) -> None:
        """The sender of a receive from any source is known now."""
        word = RECORDS_AT // 8 + (index % RECORDS) * RECORD_WORDS
        if self.words[word] == index + 1:
            struct.pack_into("<i", self._buffer, (word + WORD_PEER) * 8, peer)

    def position(self, innermost: Sequence[Any], frames: Sequence[Sequence[Any]], keys: Sequence[str] = ()) -> None:
        """Where the main thread stands, and the keys of a store it waits for; written in place, so it never
        fills the table."""
        data = json.dumps([innermost, frames, list(keys)[:8]]).encode()
        if len(data) > POSITION_BYTES - 8:
            data = json.dumps([innermost, frames[:1], []]).encode()[: POSITION_BYTES - 8]
        self._header(W_POSITION_SINCE, time.monotonic_ns())
        word = WORDS_AT // 8 + W_POSITION
        self.words[word] += 1
        self.words[POSITION_AT // 8] = len(data)
        self._buffer[POSITION_AT + 8 : POSITION_AT + 8 + len(data)] = data
        self.words[word] += 1

    def beat(self) -> None:
        """Note that this process lives and gives its threads the interpreter."""
        self._header(W_BEAT, time.monotonic_ns())

    def close(self) -> None:
        """Unmap; the file stays."""
        if sys.is_finalizing():
            return
        self.words.release()
        self._buffer.release()
        self._map.close()
