"""One host's ranks, as its monitor sees them: rings found, calls compared, states looked up."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from distsim.debug.evidence.forked_calls import count_notes
from distsim.debug.evidence.procfs import look
from distsim.debug.evidence.rank_state import Knowledge, given_up, read_exits
from distsim.debug.matching.comparer import Comparer, GroupKey
from distsim.debug.monitor.activity import ActivityWatch, Away
from distsim.debug.monitor.peers.protocol import Rows
from distsim.debug.records import Group, Phase, RankState
from distsim.debug.rings import layout as rings
from distsim.debug.rings.reader import RingReader
from distsim.errors import UsageError

__all__ = ["Host"]

FAILED_MESSAGE = rings.P2P_CALL | rings.STATE_MASK, rings.P2P_CALL | rings.FAILED
"""Bits of a record's flags to look at, and what they are."""

MOST_FLAGGED = 256
"""Calls of a rank that a guard has flagged, of which each is looked at; NaN stays for the rest of a job."""


Route = Callable[[int, GroupKey, Rows, set[int]], bool]
"""(rank, group, its calls, ranks of this host) -> whether another host has them now."""


class Host:
    """Looks at a directory of rings again and again."""

    def __init__(self, directory: Path, job: str | None) -> None:
        self.directory = directory
        self.job = job
        self.readers: dict[int, RingReader] = {}
        self.comparer = Comparer()
        self.exits: dict[tuple[int, int], int] = {}
        self._next: dict[int, int] = {}
        self._bad: set[Path] = set()
        self._newest = 0
        self.notes: list[str] = []
        self.away = Away()
        self.activity = ActivityWatch()
        self._flagged: dict[tuple[int, int], set[tuple[int, int]]] = {}
        """(attempt, rank) -> flags seen, and on which calls."""

    @property
    def world_size(self) -> int:
        return max((reader.header.world_size for reader in self.readers.values()), default=0)

    @property
    def attempt(self) -> int:
        return max((reader.header.attempt for reader in self.readers.values()), default=0)

    @property
    def local_world(self) -> int:
        """How many ranks this host was given."""
        said = [int(reader.word(rings.W_LOCAL_WORLD)) for reader in self.readers.values()]
        return max([word for word in said if word] or [self.world_size])

    def joined(self) -> bool:
        """Whether a rank of this host came through init_process_group."""
        return any(reader.word(rings.W_JOINED) for reader in self.readers.values())

    def find(self) -> None:
        """Map rings that are new; a restart's rings replace those of the attempt before it."""
        for path in sorted(self.directory.glob("rank*.ring")):
            if path in self._bad or any(path == reader.path and reader.current() for reader in self.readers.values()):
                continue
            try:
                reader = RingReader(path)
            except UsageError as error:
                self._bad.add(path)
                self.notes.append(str(error))
                continue
            if self.job is not None and reader.header.job != self.job:
                self._bad.add(path)
                continue
            if reader.header.attempt < self._newest:
                self._bad.add(path)
                continue
            if reader.header.attempt > self._newest:
                self._newest = reader.header.attempt
                self._restart()
            self.readers[reader.header.rank] = reader
            self._next[reader.header.rank] = 0

    def _restart(self) -> None:
        self._bad.update(reader.path for reader in self.readers.values())
        self.readers.clear()
        self._next.clear()
        self.activity.forget()
        self.comparer = Comparer()

    def read(self, elsewhere: Route | None = None) -> int:
        """Take in the calls made since the last look; answers how many. *elsewhere* takes those that another host
        compares."""
        total = 0
        here = set(self.readers)
        several = len(here) < self.world_size and self.local_world < self.world_size

        def route(rank: int, key: GroupKey, rows: Rows) -> bool:
            return elsewhere is not None and elsewhere(rank, key, rows, here)

        for rank, reader in self.readers.items():
            reader.refresh()
            records, self._next[rank] = reader.since(self._next[rank])
            total += len(records)
            key_of = partial(self._group_key, reader)
            # Before what came after them: it may go to another host, which knows nothing of them.
            failed = reader._records[(reader._records["flags"] & FAILED_MESSAGE[0]) == FAILED_MESSAGE[1]]
            if len(failed):
                self.comparer.messages.note_failed(rank, failed, key_of, reader.signature)
            if len(records):
                self.comparer.feed(rank, records, key_of, reader.signature, route if several else None)
        return total

    def _group_key(self, reader: RingReader, offset: int) -> GroupKey | None:
        entry = reader.group(offset)
        return entry.key if entry.group.ranks else None

    def knowledge(self, hang_after_s: float | None, straggler_after_s: float | None) -> Knowledge:
        self.exits = read_exits(self.directory)
        return Knowledge(
            exits=self.exits,
            hang_after_s=hang_after_s,
            straggler_after_s=straggler_after_s,
            directory=self.directory,
            away_ns=tuple(self.away.spans_ns),
            idle_since_ns=self.activity.idle_since_ns(),
        )

    def missing_states(self, ranks: Mapping[int, object]) -> dict[int, RankState]:
        """States of ranks of this host without a ring: dead before they could make one, or not there yet."""
        states: dict[int, RankState] = {}
        attempt = self.attempt
        # Once a rank has joined, all have: one without a ring found no place for it.
        awaited = () if self.joined() else self._given()
        for rank in range(self.world_size):
            if rank in ranks:
                continue
            code = self.exits.get((rank, attempt))
            if code is None:
                states[rank] = RankState(rank, joining=rank in awaited)
            elif code < 0:
                from distsim.debug.evidence.procfs import signal_name

                states[rank] = RankState(rank, Phase.KILLED, exit_code=code, signal=signal_name(-code))
            else:
                states[rank] = RankState(rank, Phase.EXITED if code else Phase.FINISHED, exit_code=code)
        return states

    def _given(self) -> range:
        """The ranks that must come up on this host."""
        for reader in self.readers.values():
            first = reader.header.rank - reader.header.local_rank
            return range(first, first + self.local_world)
        return range(self.world_size)

    def oldest_wait_s(self) -> float:
        """How long the longest-blocked rank has been waiting in a call; 0: nobody waits."""
        now = time.monotonic_ns()
        oldest = now
        for reader in self.readers.values():
            for record in reader.unfinished():
                if int(record["flags"]) & (rings.WAITING | rings.FUTURE):
                    oldest = min(oldest, int(record["issued"]))
        return (now - oldest) / 1e9

    def quiet_s(self) -> float:
        """How long no rank of this host has made a call; 0 while one waits in a call, and before all have come up."""
        if not self.readers or len(self.readers) < min(self.local_world, self.world_size) or self.oldest_wait_s():
            return 0.0
        last_ns = max(reader.last_call_ns() for reader in self.readers.values())
        return (time.monotonic_ns() - last_ns) / 1e9

    def flagged(self) -> int:
        """How many calls carry a flag that a guard raised (NaN, a changed buffer, a race), or were made in a forked
        child, so far: a ring keeps the last calls only, so what was counted before stays counted."""
        for rank, reader in self.readers.items():
            found = self._flagged.setdefault((self._newest, rank), set())
            for flag in (rings.NAN_INPUT, rings.MODIFIED, rings.RACE):
                if len(found) < MOST_FLAGGED:
                    found.update((flag, int(record["commit"])) for record in reader.hits(flag))
        return sum(map(len, self._flagged.values())) + count_notes(self.directory)

    def counts(self) -> tuple[int, ...]:
        return tuple(self.readers[rank].count for rank in sorted(self.readers))

    def ended(self) -> dict[int, bool]:
        """Rank -> its process is gone."""
        answer = {}
        for rank, reader in self.readers.items():
            process = look(reader.header.pid, reader.header.start_ticks)
            answer[rank] = process is None or process.state in "ZX"
        return answer

    def gone(self) -> bool:
        """A rank has ended, or given up where others go on: nobody need wait for it any longer."""
        ended = self.ended()
        over = [given_up(reader) for reader in self.readers.values()]
        return any(ended.values()) or (any(over) and not all(over))

    def group(self, key: GroupKey) -> Group:
        for reader in self.readers.values():
            for entry in reader._groups.values():
                if entry.key == key:
                    return entry.group
        return Group(key[0], "", key[1])
