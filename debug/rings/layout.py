"""The format of one rank's flight records: a memory-mapped file that outlives the process.

A ring file holds, for one rank of one job: a header (who, when, heartbeat, how the process ended),
the last `RECORDS` calls as fixed-size binary records, an append-only *table* of what seldom changes
(groups, call sites, threads, errors) and a *payload* ring of signatures (shapes, splits), which may
change with every call. There is no lock: one process writes, others read while it does, or after
it died. A record is valid when its commit word is its index + 1 before and after it was read.
"""

from __future__ import annotations

import struct
import time
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from distsim.text.untrusted_input import printable

MAGIC = b"DSIMRING"
VERSION = 3

RECORDS = 4096
RECORD_WORDS = 14
RECORD_BODY = struct.Struct("<QQQIIQQQQQiiQQQ")
"""All words of a record but the first, the commit word: issued_ns, completed_ns, flags, group (table),
thread (table), seq, signature (payload), site (table), fingerprint, site hash, peer, tag, error (table),
ordinal (which send to, or receive from, this peer with this tag), spare."""
AGAIN = struct.Struct("<QQ24sQ48sQ")
"""All words but the spare one: commit (0: not valid yet), issued_ns, bytes, seq, bytes, ordinal. What is bytes stays
when a call is made again."""
WORD_COMPLETED, WORD_FLAGS, WORD_SEQ, WORD_SITE, WORD_PEER, WORD_ERROR, WORD_ORDINAL = 2, 3, 5, 7, 10, 11, 12

TABLE_BYTES = 512 * 1024
PAYLOAD_BYTES = 512 * 1024
MEETING_GROUPS = 128
MEETING_WINDOW = 128
"""Strict level: the last `MEETING_WINDOW` fingerprints of each of `MEETING_GROUPS` groups."""

MEETING_WORDS = MEETING_WINDOW * 3 + 1
"""A group's row: hash of its name, then (seq, fingerprint, record index + 1) at seq % MEETING_WINDOW."""

HEADER_BYTES = 4096
HEADER = struct.Struct("<8sIIIIIIIIiiiiQQQ32s64s")
"""The fields of `Header`."""


class Header(NamedTuple):
    """Constant part of a ring."""

    magic: bytes
    version: int
    header_bytes: int
    records: int
    record_words: int
    table_bytes: int
    payload_bytes: int
    meeting_groups: int
    meeting_window: int
    rank: int
    """This and the next two are the launcher's; without a launcher, the local rank is -1 and the others are those of
    the first world that the process joined. Diagnoses use other numbers.
    """
    world_size: int
    local_rank: int
    attempt: int
    pid: int
    start_ticks: int
    """Start time of the process in clock ticks since boot."""
    wall_offset_ns: int
    """Wall minus monotonic clock."""
    job_bytes: bytes
    host_bytes: bytes

    @property
    def job(self) -> str:
        return _text(self.job_bytes)

    @property
    def host(self) -> str:
        return _text(self.host_bytes)


def _text(data: bytes) -> str:
    return printable(data.rstrip(b"\0").decode(errors="replace"))


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
    W_WORLD,  # table offset of the world that the process joined last, 0: none
    W_FINDING,  # table offset of what the rank itself found out
    W_LOCAL_WORLD,  # ranks on this host, 0: all
    W_GUESSED,  # calls made when the rank found that out from outside, + 1; 0: it did not
    W_MEETS,  # table offset + 1: the store that it meets the others in, until it has
    W_LEFT,  # 1: it has destroyed its process group, or made one that is not watched
    W_STORES,  # table offset + 1: the TCPStores that it has used
    W_SAMPLES,  # number of the monitor's last request for `SAMPLES` samples of the main thread's position
) = range(23)

SAMPLES = 300
"""Samples that a rank takes at one request, one at each heartbeat."""

W_CAUGHT, CAUGHT_SLOTS, CAUGHT_WORDS = 34, 10, 3
"""First word, number and length of the slots of the last handled exceptions.

Each has: table offset + 1, how often, number of calls by then.
"""

POSITION_AT = 1024
POSITION_BYTES = HEADER_BYTES - POSITION_AT
"""Length and JSON of the main thread's position: [innermost frame, user frames, awaited keys, other threads, whether
the script has ended, whether something is left out]."""

# Life of a rank, as itself sees it.
LIFE_STARTED, LIFE_JOINED, LIFE_EXITING, LIFE_RAISED, LIFE_OVER, LIFE_ENDED = 1, 2, 3, 4, 5, 6
LIFE_LEAVING = frozenset({LIFE_EXITING, LIFE_OVER, LIFE_ENDED})
"""It makes no further call. OVER and ENDED: the program and its exit handlers have ended, not only its guard."""
EXIT_CODE_0 = 1000
"""Value of W_EXIT_CODE for exit code 0, because 0 means that there is none."""

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
REMOTE = 1 << 16  # a remote call, or the serving of one: see `Signature.remote_call`
ALIASED = 1 << 17  # its outputs are one tensor, several times
READ_WAITS = 1 << 18  # reading its result waits for it (AsyncCollectiveTensor)
OF_TWO = P2P_CALL | REMOTE

TABLE_GROUP, TABLE_SITE, TABLE_THREAD, TABLE_TEXT, TABLE_WORLD = 1, 2, 3, 4, 5
_ENTRY = struct.Struct("<IB")
_PAYLOAD = struct.Struct("<II")


def meeting_slot(seq: int) -> int:
    """Return the slot of a call's number in its group's row."""
    return 1 + seq % MEETING_WINDOW * 3


def file_bytes() -> int:
    """Return the size of a ring file of this version."""
    meeting = MEETING_GROUPS * MEETING_WORDS * 8
    return HEADER_BYTES + RECORDS * RECORD_WORDS * 8 + TABLE_BYTES + PAYLOAD_BYTES + meeting


RECORDS_AT = HEADER_BYTES
TABLE_AT = RECORDS_AT + RECORDS * RECORD_WORDS * 8
PAYLOAD_AT = TABLE_AT + TABLE_BYTES
MEETING_AT = PAYLOAD_AT + PAYLOAD_BYTES


def fingerprint(content: object, pairwise: bool) -> int:
    """Return 64 bits of a hash of a call's content. Bit 0 is set if equal calls may still not match (`all_to_all`)."""
    digest = int.from_bytes(blake2b(repr(content).encode(), digest_size=8).digest(), "little")
    return (digest & ~1) | int(pairwise)


def name_hash(name: str) -> int:
    """Return 64 bits of a hash of a group's name, never 0."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little") | 1


def process_start_ticks(pid: int) -> int:
    """Return field 22 of /proc/PID/stat, which identifies a process uniquely together with its pid; 0 if it does not
    exist.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[19])


def wall_offset_ns() -> int:
    """Return the wall clock minus the monotonic clock in nanoseconds: of several readings, the one with the least time
    between both clocks."""
    readings = []
    for _ in range(5):
        before = time.monotonic_ns()
        wall = time.time_ns()
        after = time.monotonic_ns()
        readings.append((after - before, wall - (before + after) // 2))
    return min(readings)[1]
