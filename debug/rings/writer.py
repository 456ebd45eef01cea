"""The writing end of a ring: a rank notes its own calls.

It costs a few microseconds for each call: `issue` is one `pack_into` and three word stores.
"""

from __future__ import annotations

import itertools
import mmap
import os
import socket
import struct
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from distsim.debug.records import Caught, MainPosition
from distsim.debug.records.signature import Signature
from distsim.debug.rings import layout as rings
from distsim.debug.rings.files import RecordedWorld, create_private
from distsim.debug.rings.layout import (
    RECORD_WORDS,
    RECORDS,
    STATE_MASK,
    WAITING,
    WORD_COMPLETED,
    WORD_FLAGS,
)
from distsim.text.codec import encode

_CHANGING, _FIRST = rings.WORDS_AT // 8, rings.RECORDS_AT // 8
"""First of the words of the header that change, and of the records."""


def stays(body: bytes) -> tuple[bytes, bytes]:
    """Return the constant part of the record of a repeated call."""
    _, _, first, _, second, _ = rings.AGAIN.unpack_from(bytes(8) + body)
    return first, second


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
        """Create the ring. *rank*, *world_size* and *local_rank* are the launcher's (see `layout.HEADER`)."""
        self.path = Path(path)
        size = rings.file_bytes()
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
        header = rings.Header(
            rings.MAGIC,
            rings.VERSION,
            rings.HEADER_BYTES,
            RECORDS,
            RECORD_WORDS,
            rings.TABLE_BYTES,
            rings.PAYLOAD_BYTES,
            rings.MEETING_GROUPS,
            rings.MEETING_WINDOW,
            rank,
            world_size,
            local_rank,
            attempt,
            os.getpid(),
            rings.process_start_ticks(os.getpid()),
            rings.wall_offset_ns(),
            job.encode()[:32],
            socket.gethostname().encode()[:64],
        )
        rings.HEADER.pack_into(self._map, 0, *header)
        self.rank = rank
        self.world_size = world_size
        self.job = job
        self.words = memoryview(self._map).cast("Q")
        self.buffer = memoryview(self._map)
        self.numbers = itertools.count()
        """Numbers of the next records; every writing thread takes one."""
        self._table: dict[tuple[int, Any], int] = {}
        self._payload: dict[Any, tuple[int, int]] = {}
        self.payload_end = 0
        """Position of the next signature; signatures further back than the length of the payload ring are lost."""
        self._rows = 0
        self.header(rings.W_OPENED, now)
        self.header(rings.W_BEAT, now)
        self.header(rings.W_LIFE, rings.LIFE_STARTED)
        os.rename(scratch, self.path)  # a reader never sees half a header

    # What is written once ------------------------------------------------------------------

    def header(self, word: int, value: int) -> None:
        """Set one changing word of the header."""
        self.words[_CHANGING + word] = value

    def entry(self, kind: int, key: Any, content: Any) -> int:
        """Return the offset + 1 in the table of *content* (JSON), written on first sight of *key*; 0: the table is
        full.
        """
        offset = self._table.get((kind, key))
        if offset is None:
            offset = self._table[(kind, key)] = self._append(kind, encode(content))
        return offset

    def _append(self, kind: int, data: bytes) -> int:
        used = self.words[_CHANGING + rings.W_TABLE_USED]
        need = (rings._ENTRY.size + len(data) + 7) & ~7
        if used + need > rings.TABLE_BYTES:
            return 0
        # Reserve before writing: a second thread then appends behind this entry.
        self.header(rings.W_TABLE_USED, used + need)
        at = rings.TABLE_AT + used
        rings._ENTRY.pack_into(self.buffer, at, len(data), kind)
        self.buffer[at + rings._ENTRY.size : at + rings._ENTRY.size + len(data)] = data
        return used + 1

    def group(self, name: str, description: str, ranks: Sequence[int], generation: int = 0, world: str = "") -> int:
        """Return the table offset of a group; ranks are kept as [first, count] runs. *generation*: how often this
        process had made the group before. *world*: identifier of the world whose numbers *ranks* are; empty: the
        launcher's.
        """
        runs: list[list[int]] = []
        if isinstance(ranks, range) and ranks.step == 1:
            runs = [[ranks.start, len(ranks)]]
        else:
            for rank in ranks:
                if runs and runs[-1][0] + runs[-1][1] == rank:
                    runs[-1][1] += 1
                else:
                    runs.append([rank, 1])
        key = (name, str(runs), generation, world)
        return self.entry(rings.TABLE_GROUP, key, [name, description, runs, generation, world])

    def join_world(self, world: RecordedWorld) -> None:
        """Note that this process is a member of *world* from now on."""
        before = int(self.words[_CHANGING + rings.W_WORLD])
        if offset := self._append(rings.TABLE_WORLD, encode([world, before])):
            self.header(rings.W_WORLD, offset)

    def caught(self, slot: int, caught: Caught) -> None:
        """Keep an exception that the program handled in one of `CAUGHT_SLOTS` slots."""
        at = _CHANGING + rings.W_CAUGHT + slot * rings.CAUGHT_WORDS
        key = "caught", caught.error, caught.site, caught.crossed
        self.words[at] = self.entry(rings.TABLE_TEXT, key, replace(caught, times=0, calls=0))
        self.words[at + 1] = caught.times
        self.words[at + 2] = caught.calls

    def text(self, text: str) -> int:
        """Return the table offset of a text (an exception, a traceback)."""
        return self.entry(rings.TABLE_TEXT, text, text)

    def signature(self, key: Any, describe: Callable[[Any], tuple[Signature, bool]]) -> tuple[int, int]:
        """Return the position in the payload ring and fingerprint of a call's signature; cached by *key*.

        *describe(key)* returns it, and whether equal calls may still not fit.
        """
        result = self._payload.get(key)
        end = self.payload_end
        if result is not None and result[0] + rings.PAYLOAD_BYTES // 2 > end:
            return result
        if len(self._payload) > RECORDS:
            self._payload.clear()
        content, pairwise = describe(key)
        data = encode(content)
        print_ = rings.fingerprint(data, pairwise)
        need = (rings._PAYLOAD.size + len(data) + 7) & ~7
        if need > rings.PAYLOAD_BYTES // 8:  # thousands of splits: keep the operation
            data = encode(Signature(content.op))
            need = (rings._PAYLOAD.size + len(data) + 7) & ~7
        if end % rings.PAYLOAD_BYTES + need > rings.PAYLOAD_BYTES:
            end += rings.PAYLOAD_BYTES - end % rings.PAYLOAD_BYTES
        self.payload_end = end + need
        self.header(rings.W_PAYLOAD_END, end + need)
        at = rings.PAYLOAD_AT + end % rings.PAYLOAD_BYTES
        rings._PAYLOAD.pack_into(self.buffer, at, len(data), zlib.crc32(data))
        self.buffer[at + rings._PAYLOAD.size : at + rings._PAYLOAD.size + len(data)] = data
        result = (end, print_)
        self._payload[key] = result
        return result

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
        _pack: Any = rings.RECORD_BODY.pack_into,
    ) -> int:
        """Write a record of a call that is being made; answers its index."""
        index: int = next(self.numbers)
        word = _FIRST + (index % RECORDS) * RECORD_WORDS
        words = self.words
        words[word] = 0
        _pack(
            self.buffer,
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
        words[_CHANGING] = index + 1
        return index

    def _kept(self, index: int) -> int:
        """Return the first word of a record; 0 if a later one has taken its slot."""
        word = _FIRST + (index % RECORDS) * RECORD_WORDS
        return word if self.words[word] == index + 1 else 0

    def number(self, index: int) -> int:
        """Return the call number in a record that was just written."""
        return self.words[_FIRST + (index % RECORDS) * RECORD_WORDS + rings.WORD_SEQ]

    def flags(self, index: int) -> int:
        """Return the flags of a record; 0 if a later one has taken its slot."""
        word = self._kept(index)
        return self.words[word + WORD_FLAGS] if word else 0

    def template(self, index: int) -> bytes:
        """Return the body of a record that was just written, for `replay`."""
        word = _FIRST + (index % RECORDS) * RECORD_WORDS
        return bytes(self.buffer[word * 8 + 8 : (word + RECORD_WORDS) * 8])

    def replay(
        self,
        same: tuple[bytes, bytes],
        seq: int,
        ordinal: int = 0,
        _now: Any = time.monotonic_ns,
        _pack: Any = rings.AGAIN.pack_into,
    ) -> int:
        """Write a record that differs from an earlier one only in time and numbers; *same* is what `stays`."""
        index: int = next(self.numbers)
        word = _FIRST + (index % RECORDS) * RECORD_WORDS
        words = self.words
        _pack(self.buffer, word * 8, 0, _now(), same[0], seq, same[1], ordinal)
        words[word] = words[_CHANGING] = index + 1
        return index

    def mark(self, index: int, flags: int) -> None:
        """Add flags to a record, unless its slot was taken by a later call."""
        if word := self._kept(index):
            self.words[word + WORD_FLAGS] |= flags

    def unmark(self, index: int, flags: int) -> None:
        """Remove flags from a record."""
        if word := self._kept(index):
            self.words[word + WORD_FLAGS] &= ~flags

    def finish(self, index: int, state: int, _now: Any = time.monotonic_ns) -> None:
        """Stamp the end of a call: *state* is COMPLETED or rings.FAILED, with further flags to add."""
        word = _FIRST + (index % RECORDS) * RECORD_WORDS
        words = self.words
        if words[word] == index + 1:
            words[word + WORD_COMPLETED] = _now()
            words[word + WORD_FLAGS] = words[word + WORD_FLAGS] & ~(STATE_MASK | WAITING) | state

    def finish_as(self, index: int, flags: int, _now: Any = time.monotonic_ns) -> None:
        """Record the end of a call with known flags."""
        word = _FIRST + (index % RECORDS) * RECORD_WORDS
        words = self.words
        if words[word] == index + 1:
            words[word + WORD_COMPLETED] = _now()
            words[word + WORD_FLAGS] = flags

    def error(self, index: int, text: str) -> None:
        """Attach an error's text to a record."""
        if word := self._kept(index):
            self.words[word + rings.WORD_ERROR] = self.text(text[:2000])

    def fail(self, index: int, text: str) -> None:
        """Stamp the end of a call that raised."""
        self.error(index, text)
        self.finish(index, rings.FAILED)

    def meeting_row(self, name: str) -> int | None:
        """Return the position of the row that holds a group's fingerprints; None if all rows are taken."""
        if self._rows >= rings.MEETING_GROUPS:
            return None
        word = rings.MEETING_AT // 8 + self._rows * rings.MEETING_WORDS
        self._rows += 1
        self.words[word] = rings.name_hash(name)
        return word

    def publish(self, row: int, seq: int, print_: int, index: int) -> None:
        """Show the members of a group what this rank's call number *seq* is."""
        word = row + rings.meeting_slot(seq)
        words = self.words
        words[word] = 0
        words[word + 1] = print_
        words[word + 2] = index + 1
        words[word] = seq

    def peer(self, index: int, peer: int) -> None:
        """Record the sender of a receive from any source, once it is known."""
        if word := self._kept(index):
            struct.pack_into("<i", self.buffer, (word + rings.WORD_PEER) * 8, peer)

    def number_rref(self, index: int, rank: int, number: int) -> None:
        """Record which value a remote call creates or fetches: the rank that requested it, and its number there plus
        one.
        """
        if word := self._kept(index):
            struct.pack_into("<i", self.buffer, (word + rings.WORD_PEER) * 8 + 4, rank)
            self.words[word + rings.WORD_ORDINAL] = number

    def set_site(self, index: int, site: int) -> None:
        """Record the current line of the thread that serves a remote call."""
        if word := self._kept(index):
            self.words[word + rings.WORD_SITE] = site

    def position(self, position: MainPosition) -> None:
        """Record where the main thread stands.

        The entry is overwritten in place, so that the table does not grow. What does not fit is left out: the outer
        frames of other threads first, then the last threads.
        """
        room = rings.POSITION_BYTES - 8
        whole = replace(position, keys=position.keys[:8])
        data = encode(whole)
        if len(data) > room:
            threads = tuple(replace(thread, stack=thread.stack[:1]) for thread in position.threads)
            data = encode(replace(whole, threads=threads, cut=True))
            while len(data) > room and threads:
                threads = threads[:-1]
                data = encode(replace(whole, threads=threads, cut=True))
        if len(data) > room:
            short = replace(position, frames=position.frames[:1], keys=(), threads=(), cut=True)
            data = encode(short)[:room]
        if not position.threads:  # else it stands where it stood
            self.header(rings.W_POSITION_SINCE, time.monotonic_ns())
        word = _CHANGING + rings.W_POSITION
        self.words[word] += 1
        self.words[rings.POSITION_AT // 8] = len(data)
        self.buffer[rings.POSITION_AT + 8 : rings.POSITION_AT + 8 + len(data)] = data
        self.words[word] += 1

    def beat(self) -> None:
        """Note that this process lives and gives its threads the interpreter."""
        self.header(rings.W_BEAT, time.monotonic_ns())

    def close(self) -> None:
        """Unmap the file, which remains."""
        if sys.is_finalizing():
            return
        self.words.release()
        self.buffer.release()
        self._map.close()
