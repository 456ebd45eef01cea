"""One host's ranks, as its monitor sees them: rings found, calls compared, states looked up.

Since when each rank shows no sign of progress, and when the monitor did not run itself.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from distsim.debug.evidence.guard_findings import count_notes
from distsim.debug.evidence.processes import (
    Numbering,
    Work,
    has_ended,
    number_processes,
    number_readers,
    oom_kills,
    work_of,
)
from distsim.debug.evidence.rank_state import (
    STORE_STILL_S,
    Knowledge,
    ended_state,
    exits_by_number,
    given_up,
    read_exits,
)
from distsim.debug.matching.comparer import Comparer, GroupKey, world_of
from distsim.debug.monitor.protocol import Rows
from distsim.debug.records import RankState
from distsim.debug.rings import layout as rings
from distsim.debug.rings.files import Process, WorldKind
from distsim.debug.rings.reader import RingReader
from distsim.debug.settings import Settings
from distsim.errors import UsageError

FAILED_MESSAGE = rings.P2P_CALL | rings.STATE_MASK, rings.P2P_CALL | rings.FAILED
"""Bits of a record's flags to look at, and what they are."""

MOST_FLAGGED = 256
"""Largest number of flagged calls of a rank that are examined, because NaN usually persists for the rest of a job."""


Route = Callable[[int, GroupKey, Rows, set[int]], bool]
"""(rank, group, its calls, ranks of its world that are on this host) -> whether another host has them now."""
SAMPLE_S = 1.0
"""Seconds between two samples of a rank that makes no calls."""
WORKS = 0.03
"""Share of one core from which a process tree counts as computing; the heartbeat of an idle rank needs less."""

NAP_S = 0.1
AWAY_S = 1.0
"""Delay of a wake-up in seconds from which the monitor counts as having been suspended."""
MOST_ABSENCES = 64


class Host:
    """Repeatedly reads a directory of rings."""

    def __init__(self, directory: Path, job: str | None) -> None:
        self.directory = directory
        self.job = job
        self.readers: dict[int, RingReader] = {}
        """Rings by the rank that diagnoses use for the process."""
        self.numbering = Numbering()
        self._mapped: dict[Path, RingReader] = {}
        """All rings of this attempt, also of processes that are not ranks."""
        self.comparer = Comparer()
        self.exits: dict[tuple[int, int], int] = {}
        self._next: dict[Path, int] = {}
        self._bad: set[Path] = set()
        self._newest = 0
        self.notes: list[str] = []
        self.away = SuspensionDetector()
        self.activity = ActivityWatch()
        self._oom_kills = oom_kills()
        self._flagged: dict[Path, set[tuple[int, int]]] = {}
        """Ring -> flags seen, and on which calls."""

    @property
    def world_size(self) -> int:
        """Return the number of ranks in the world that the program uses."""
        return self.numbering.size

    @property
    def attempt(self) -> int:
        return max((reader.header.attempt for reader in self.readers.values()), default=0)

    @property
    def local_world(self) -> int:
        """Return the number of ranks on this host: from the launcher, or counted after they met."""
        sizes = [int(reader.word(rings.W_LOCAL_WORLD)) for reader in self.readers.values()]
        if sizes := [word for word in sizes if word]:
            return max(sizes)
        if self.numbering.main and self.joined():
            return sum(number < self.world_size for number in self.readers)
        return self.world_size

    def joined(self) -> bool:
        """Return whether a rank of this host completed init_process_group in the world that the program uses."""
        main = self.numbering.main
        for reader in self.readers.values():
            defaults = [w.id for w in reader.worlds if w.kind in (WorldKind.DEFAULT, WorldKind.REPLICAS)]
            if main in defaults[:-1] or (reader.word(rings.W_JOINED) and (not main or main in defaults)):
                return True
        return False

    def find(self, elsewhere: Sequence[Process] = ()) -> None:
        """Map rings that are new; a restart's rings replace those of the attempt before it. *elsewhere*: the processes
        of other hosts."""
        for path in sorted(self.directory.glob("rank*.ring")):
            if path in self._bad or (path in self._mapped and self._mapped[path].current()):
                continue
            try:
                reader = RingReader(path)
            except UsageError as error:
                self._bad.add(path)
                self.notes.append(str(error))
                continue
            if self.job not in (None, reader.header.job) or reader.header.attempt < self._newest:
                self._bad.add(path)
                continue
            if reader.header.attempt > self._newest:
                self._newest = reader.header.attempt
                self._restart()
            self._mapped[path] = reader
            self._next[path] = 0
        self.use(number_processes([*self.processes(), *elsewhere]))
        for text in self.numbering.doubles:
            if text not in self.notes:
                self.notes.append(text)

    def use(self, numbering: Numbering) -> None:
        """Number the processes according to *numbering*."""
        self.numbering = numbering
        self.readers = {reader.number: reader for reader in number_readers(self._mapped.values(), numbering)}

    def processes(self) -> list[Process]:
        """Return processes of this host."""
        return [reader.process for reader in self._mapped.values()]

    def _restart(self) -> None:
        self._bad.update(self._mapped)
        self._mapped.clear()
        self.readers.clear()
        self._next.clear()
        self.activity.forget()
        self.comparer = Comparer()

    def read(self, elsewhere: Route | None = None) -> int:
        """Read the calls since the last look and return their number. *elsewhere* takes those that another host
        compares."""
        total = 0
        several = len(self.readers) < self.world_size and self.local_world < self.world_size
        here = _ranks_by_world(self.readers.values())

        def route(rank: int, key: GroupKey, rows: Rows) -> bool:
            return elsewhere is not None and elsewhere(rank, key, rows, here[world_of(key)])

        for path, reader in self._mapped.items():
            if self.readers.get(reader.number) is not reader:
                continue
            reader.refresh()
            records, self._next[path] = reader.since(self._next[path])
            total += len(records)
            key_of, rank_in = partial(self._group_key, reader), partial(_rank_in, reader)
            # Before what came after them: it may go to another host, which knows nothing of them.
            failed = reader._records[(reader._records["flags"] & FAILED_MESSAGE[0]) == FAILED_MESSAGE[1]]
            if len(failed):
                self.comparer.messages.note_failed(rank_in, failed, key_of, reader.signature)
            if len(records):
                take = route if several else None
                self.comparer.feed(path, records, key_of, reader.signature, take, rank_in)
        return total

    def feed(self, rank: int, key: GroupKey, rows: Rows) -> None:
        """Compare rows of another host, or of this one that no other host took."""
        self.comparer.feed_rows(rank, key, rows)

    def _group_key(self, reader: RingReader, offset: int) -> GroupKey | None:
        entry = reader.group(offset)
        return entry.key if entry.group.ranks else None

    def knowledge(self, settings: Settings) -> Knowledge:
        self.exits = read_exits(self.directory)
        return Knowledge(
            exits=self.exits,
            hang_after_s=settings.patience_s,
            quiet_after_s=settings.hang_after_s,
            straggler_after_s=settings.straggler_after_s,
            directory=self.directory,
            away_ns=tuple(self.away.spans_ns),
            idle_since_ns=self.activity.idle_since_ns(),
            asleep_since_ns=self.activity.asleep_since_ns(),
            oom_kills=oom_kills() - self._oom_kills,
        )

    def missing_states(self, ranks: Mapping[int, object]) -> dict[int, RankState]:
        """Return the states of ranks of this host without a ring: they died before they created one, or have not
        started yet.
        """
        codes = exits_by_number(self.exits, self.numbering, self.attempt)
        # Once a rank has joined, all have: one without a ring found no place for it.
        awaited = () if self.joined() else self._given()
        return {
            rank: ended_state(rank, codes[rank]) if rank in codes else RankState(rank, joining=rank in awaited)
            for rank in range(self.world_size)
            if rank not in ranks
        }

    def _given(self) -> range:
        """Return the ranks that are expected on this host."""
        for reader in self.readers.values():
            if reader.header.local_rank >= 0 and reader.header.world_size == self.world_size:
                first = reader.header.rank - reader.header.local_rank
                return range(first, first + self.local_world)
        return range(self.world_size)

    def oldest_wait_s(self) -> float:
        """Return how long the longest-blocked rank has waited in a call, or for a key of a store; 0 if none waits."""
        now = time.monotonic_ns()
        oldest = now
        for reader in self.readers.values():
            if (key_wait_ns := reader.key_wait_ns(now)) > STORE_STILL_S * 1e9:
                oldest = min(oldest, now - key_wait_ns)
            for record in reader.unfinished():
                if int(record["flags"]) & (rings.WAITING | rings.FUTURE):
                    oldest = min(oldest, int(record["issued"]))
        return (now - oldest) / 1e9

    def quiet_s(self) -> float:
        """Return how long no rank of this host has made a call; 0 while one waits in a call, and before all have
        started."""
        if not self.readers or len(self.readers) < min(self.local_world, self.world_size) or self.oldest_wait_s():
            return 0.0
        last_ns = max(reader.last_call_ns() for reader in self.readers.values())
        return (time.monotonic_ns() - last_ns) / 1e9

    def flagged(self) -> int:
        """Return how many calls a guard flagged (NaN, a changed buffer, a race) or a forked child made. Counts are
        kept, because a ring keeps the last calls only."""
        for reader in self.readers.values():
            hits = self._flagged.setdefault(reader.path, set())
            for flag in (rings.NAN_INPUT, rings.MODIFIED, rings.RACE):
                if len(hits) < MOST_FLAGGED:
                    hits.update((flag, int(record["commit"])) for record in reader.hits(flag))
        return sum(map(len, self._flagged.values())) + count_notes(self.directory)

    def counts(self) -> tuple[int, ...]:
        return tuple(self.readers[rank].count for rank in sorted(self.readers))

    def ended(self) -> dict[int, bool]:
        """Whether the process of each rank has ended, by rank."""
        headers = {rank: reader.header for rank, reader in self.readers.items()}
        return {rank: has_ended(header.pid, header.start_ticks) for rank, header in headers.items()}

    def gone(self) -> bool:
        """Return whether a rank has ended, or failed while others continue, so that waiting for it is useless."""
        ended = self.ended()
        over = [given_up(reader) for reader in self.readers.values()]
        return any(ended.values()) or (any(over) and not all(over))


def _ranks_by_world(readers: Iterable[RingReader]) -> dict[str, set[int]]:
    ranks: dict[str, set[int]] = defaultdict(set)
    for reader in readers:
        ranks[""].add(reader.header.rank)
        for world in reader.worlds:
            ranks[world.id].add(world.rank)
    return ranks


def _rank_in(reader: RingReader, key: GroupKey) -> int:
    """Return the rank of a process in the world of a group."""
    world = reader.world(world_of(key))
    return reader.header.rank if world is None else world.rank


@dataclass(frozen=True)
class _Sample:
    taken_ns: int
    count: int
    position: object
    """Position of the main thread, as its heartbeat wrote it."""
    work: Work | None
    """Work done so far; None if the rank had made calls since the previous sample, so that it was not measured."""
    idle_since_ns: int
    asleep_since_ns: int
    """Time since which the main thread has used no CPU time, regardless of other threads and child processes."""


class ActivityWatch:
    """Samples every rank once a second."""

    def __init__(self) -> None:
        self._samples: dict[int, _Sample] = {}

    def step(self, readers: Mapping[int, RingReader]) -> None:
        """Sample the ranks whose last sample is old enough."""
        now_ns = time.monotonic_ns()
        for rank, reader in readers.items():
            before = self._samples.get(rank)
            if before is not None and now_ns - before.taken_ns < SAMPLE_S * 1e9:
                continue
            work = None if before is None or before.count != reader.count else work_of(reader.header.pid)
            after = _Sample(now_ns, reader.count, reader.position(), work, now_ns, now_ns)
            if before is not None and not _main_active(before, after):
                after = replace(after, asleep_since_ns=before.asleep_since_ns)
                if not _works(before, after):
                    after = replace(after, idle_since_ns=before.idle_since_ns)
            self._samples[rank] = after

    def pass_over(self, readers: Mapping[int, RingReader]) -> None:
        """Ignore what the ranks just did for this monitor (writing their stacks) as progress."""
        for rank, reader in readers.items():
            sample = self._samples.get(rank)
            if sample is not None and sample.work is not None:
                self._samples[rank] = replace(sample, work=work_of(reader.header.pid))

    def idle_since_ns(self) -> dict[int, int]:
        """Rank -> since when (monotonic) it has been idle."""
        return {rank: sample.idle_since_ns for rank, sample in self._samples.items()}

    def asleep_since_ns(self) -> dict[int, int]:
        """Rank -> since when (monotonic) its main thread has slept."""
        return {rank: sample.asleep_since_ns for rank, sample in self._samples.items()}

    def forget(self) -> None:
        """Drop the samples of an attempt that is over."""
        self._samples.clear()


def _main_active(before: _Sample, after: _Sample) -> bool:
    if before.count != after.count or before.position != after.position or before.work is None or after.work is None:
        return True
    return after.work.main_cpu_s - before.work.main_cpu_s > WORKS * (after.taken_ns - before.taken_ns) / 1e9


def _works(before: _Sample, after: _Sample) -> bool:
    """Return whether any thread or child process has computed, read or written between two samples."""
    assert before.work is not None
    assert after.work is not None
    # A process that ends takes its CPU time out of the sum: less than before is a change, too.
    cpu_s = abs(after.work.cpu_s - before.work.cpu_s)
    span_s = (after.taken_ns - before.taken_ns) / 1e9
    return cpu_s > WORKS * span_s or before.work.transferred != after.work.transferred


class SuspensionDetector:
    """Detects periods without a watcher: the monitor was stopped with its container, or its host was suspended.

    The monitor's own work may take long (hundreds of ranks, another host that answers slowly) and is not an absence,
    so a second thread naps and reads the clock. Only if neither has run was the monitor away. *clock* returns
    monotonic nanoseconds.
    """

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.spans_ns: list[tuple[int, int]] = []
        """The last periods (from, to)."""
        self.times = 0
        self._clock = clock
        self._last_ns = clock()
        self._lock = threading.Lock()
        self._over = threading.Event()

    def look(self) -> int:
        """Return how often the monitor was suspended so far."""
        with self._lock:
            now_ns = self._clock()
            if now_ns - self._last_ns > (NAP_S + AWAY_S) * 1e9:
                self.times += 1
                self.spans_ns.append((self._last_ns, now_ns))
                del self.spans_ns[:-MOST_ABSENCES]
            self._last_ns = now_ns
            return self.times

    def __enter__(self) -> None:
        """Look from now on, ten times a second."""
        self._last_ns = self._clock()
        threading.Thread(target=self._nap, name="distsim-away", daemon=True).start()

    def __exit__(self, *exception: object) -> None:
        """Stop reading, and end the thread."""
        self._over.set()

    def _nap(self) -> None:
        while not self._over.wait(NAP_S):
            self.look()
