"""Makes Evidence from rings and /proc: the state of every rank, and the relevant calls.

These are the last calls of each group, and all calls that have not completed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Meta, Struct

from distsim.debug.evidence.processes import (
    Numbering,
    SystemProcess,
    crash_stack,
    is_library,
    look,
    signal_name,
    user_part,
)
from distsim.debug.matching.secondary_errors import settle_given_up
from distsim.debug.messages import OUT_OF_MEMORY, second_wait
from distsim.debug.records import (
    CallRecord,
    CallWait,
    Evidence,
    HostWait,
    Phase,
    RankState,
    RankThread,
    Site,
    StoreWait,
)
from distsim.debug.records.call import SERVE, was_refused
from distsim.debug.records.frames import absolute, is_ours
from distsim.debug.rings import layout as rings
from distsim.debug.rings.files import WorldKind
from distsim.debug.rings.reader import Records, RingReader, origin_of, wall_offsets
from distsim.text.codec import Rank, Whole, read
from distsim.text.untrusted_input import read_bytes, within

MOST_SOURCES = 64
LONGEST_SOURCE = 1 << 20
STORE_STILL_S = 1.0
"""Seconds after which a wait for a key counts, because a process outside of the job may set it."""
STORE_BESIDE_CALLS_S = 5.0
"""The same while another rank waits in a call: that may end by a short time limit, and the rank then sets the key."""
STILL_S = 0.3
"""Seconds after which a main thread inside a library counts as blocked, if it has a call under way."""

MAIN = "MainThread"
WAITS_FOR_THREADS = ("/threading.py", "/queue.py", "/concurrent/futures/_base.py")
"""Files in which a main thread waits for another thread of its process."""
HELD_S = 5.0
"""Seconds after which a rank that holds the interpreter lock while others wait is a warning. An import of a compiled
module holds it for three seconds on a busy host.
"""
SILENT_S = 1.0
"""A heartbeat this old (it beats ten times a second) means that no thread of the process gets the interpreter."""
HISTORY = 48
"""Calls before the last common one of each group that a diagnosis may look at."""
MANY_RANKS_WINDOW = 1024
"""Number of last calls of each rank that are read in large jobs. The call that all wait for is among the last."""


@dataclass
class Snapshot:
    """State of a rank at one moment."""

    reader: RingReader
    process: SystemProcess | None
    unfinished: Records
    exit_code: int | None = None

    @property
    def dead(self) -> bool:
        return self.process is None or self.process.state in "ZX"

    @property
    def given_up(self) -> bool:
        """Return whether its program is over, though threads or exit handlers may keep the process."""
        return given_up(self.reader)


@dataclass
class Knowledge:
    """Facts that only the monitor knows, in addition to the rings."""

    exits: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """(rank, attempt) -> exit code, negative for a signal."""
    stacks: Mapping[int, Sequence[Site]] = field(default_factory=dict)
    children: Mapping[int, tuple[RankThread, ...]] = field(default_factory=dict)
    hang_after_s: float | None = None
    quiet_after_s: float | None = None
    straggler_after_s: float | None = None
    oom_kills: int = 0
    """Number of processes that the kernel has killed for want of memory while the job ran."""
    all_over: bool = False
    """Whether all ranks here have failed and none has ended yet, so that they are exiting together."""
    post_mortem: bool = False
    """Whether the job is over, so that process ids and heartbeats have no meaning."""
    directory: Path | None = None
    roots: Sequence[Path] | None = None
    """Folders from which source lines may be shown; None for any, because the ranks are running and are our own."""
    now_ns: int | None = None
    away_ns: Sequence[tuple[int, int]] = ()
    """Periods (monotonic, from and to) in which the monitor was stopped; they count for no rank's wait."""
    idle_since_ns: Mapping[int, int] = field(default_factory=dict)
    """Rank -> since when it has shown no sign of progress."""
    asleep_since_ns: Mapping[int, int] = field(default_factory=dict)
    """Rank -> since when its main thread has slept."""

    def watched_ns(self, since_ns: int, now_ns: int) -> int:
        """Return the time between both moments in which the monitor was running, in nanoseconds."""
        return max(0, now_ns - since_ns - sum(max(0, end - max(begin, since_ns)) for begin, end in self.away_ns))


def given_up(reader: RingReader) -> bool:
    """Return whether an exception or an exit code other than 0 has ended the program.

    Its exit handlers may still make calls, in which all ranks that failed in this way meet, without anything being
    wrong from their point of view (`Knowledge.all_over`).
    """
    failed = reader.word(rings.W_EXIT_CODE) not in (0, rings.EXIT_CODE_0)
    return failed or reader.word(rings.W_LIFE) in (rings.LIFE_RAISED, rings.LIFE_OVER)


class _End(Struct):
    """A process's end, as its launcher wrote it."""

    rank: Rank
    attempt: Whole
    code: Annotated[int, Meta(ge=-255, le=255)]


def read_exits(directory: Path) -> dict[tuple[int, int], int]:
    """Return the exit codes that the launcher wrote."""
    result: dict[tuple[int, int], int] = {}
    for path in directory.glob("exit.*.json"):
        try:
            end = read(path, _End)
        except (OSError, ValueError):
            continue
        result[end.rank, end.attempt] = end.code
    return result


def exits_by_number(exits: Mapping[tuple[int, int], int], numbering: Numbering, attempt: int) -> dict[int, int]:
    """Return the exit codes of one attempt by rank, numbered as in diagnoses."""
    codes = {numbering.of_launcher(rank): code for (rank, number), code in exits.items() if number == attempt}
    return {rank: code for rank, code in codes.items() if rank is not None}


def ended_state(rank: int, code: int) -> RankState:
    """Return the state of a rank without a ring that has ended with this exit code."""
    if code < 0:
        return RankState(rank, Phase.KILLED, exit_code=code, signal=signal_name(-code))
    return RankState(rank, Phase.EXITED if code else Phase.FINISHED, exit_code=code)


def snapshot(reader: RingReader, known: Knowledge) -> Snapshot:
    """Return the current state of one rank."""
    header = reader.header
    process = None if known.post_mortem else look(header.pid, header.start_ticks)
    code = known.exits.get((header.rank, header.attempt)) if header.local_rank >= 0 else None
    if code is None and process is not None:
        code = process.exit_code
    if code is None and (word := reader.word(rings.W_EXIT_CODE)):
        code = word - rings.EXIT_CODE_0
    return Snapshot(reader, process, reader.unfinished(), code)


def rank_state(
    snap: Snapshot, records: Sequence[CallRecord], known: Knowledge, now_ns: int, origin_ns: int
) -> RankState:
    """Return the state of one rank. *records* are its decoded calls, of which the unfinished ones are looked up."""
    reader = snap.reader
    header = reader.header
    state = RankState(reader.number, host=header.host, pid=header.pid)
    state.folder = None if known.roots is not None else str(reader.path.parent)  # who names it knows it
    state.caught, state.stores = reader.caught(), reader.stores()
    state.children = known.children.get(reader.number, ())
    world = next((world for world in reversed(reader.worlds) if world.kind is WorldKind.DEFAULT), None)
    state.reused_store = world.where if world is not None and world.reuses_store else None
    _exception(state, reader, records)
    inner, frames, keys = reader.position()
    state.threads, state.through, state.threads_cut = reader.threads()
    if (call := _since(reader, records, origin_ns)) is not None:
        inner, frames, keys = None, call.stack, ()
    stack = tuple(known.stacks.get(reader.number, ()))
    state.stack = tuple(site for site in stack if not is_ours(absolute(site.file))) or frames
    own = user_part(stack) or frames
    state.site = own[0] if own else None
    state.since_s = None
    unfinished = {int(record["commit"]) - 1: int(record["flags"]) for record in snap.unfinished}
    # Who could end a wait in a group that could not be read, nobody knows: it says nothing.
    readable = [r for r in records if r.group.ranks]
    waiting = _by_itself([r for r in readable if unfinished.get(r.index, 0) & rings.WAITING], records)
    beat_ns = reader.word(rings.W_BEAT)
    state.seen_s = (beat_ns - origin_ns) / 1e9 if beat_ns else None
    if stands_ns := reader.word(rings.W_POSITION_SINCE):
        state.stood_s = max(0, beat_ns - max(stands_ns, reader.last_call_ns())) / 1e9
    if (idle_ns := known.idle_since_ns.get(reader.number)) is not None:
        state.idle_s = known.watched_ns(idle_ns, now_ns) / 1e9
    life = reader.word(rings.W_LIFE)
    # A ring without a recorded end is of a process that was cut off during its work.
    looks_alive = life in (rings.LIFE_STARTED, rings.LIFE_JOINED) and snap.exit_code is None
    if (snap.dead and not (known.post_mortem and looks_alive)) or (
        snap.given_up and not waiting and not known.all_over
    ):
        _dead(state, snap, life, known, waiting)
        return state
    state.exception = state.exception if _pending(reader, waiting, unfinished) else None
    process = snap.process
    if process is not None and process.state == "T":
        state.phase = Phase.FROZEN
        state.since_s = state.seen_s
        return state
    meeting = reader.meets()
    if meeting.by_hand:
        state.meets_by_hand = meeting.at
    else:
        state.meets_at, state.reached_store = meeting.at, meeting.reached
    state.left_group = bool(reader.word(rings.W_LEFT))
    state.leaving = bool(reader.word(rings.W_EXIT_CODE)) or life not in (rings.LIFE_STARTED, rings.LIFE_JOINED)
    if process is not None and beat_ns and not state.leaving:
        silent_s = known.watched_ns(beat_ns, now_ns) / 1e9
        state.silent_s = silent_s if silent_s > SILENT_S else None
    makes_calls_elsewhere = reader.word(rings.W_THREADS) > 1 or (records and records[-1].thread != MAIN)
    if (asleep_ns := known.asleep_since_ns.get(reader.number)) is not None and not makes_calls_elsewhere:
        state.asleep_s = known.watched_ns(asleep_ns, now_ns) / 1e9
    if not waiting:
        waiting = _implicit(reader, readable, unfinished, inner, process, now_ns)
    outside = _outside_calls(reader, keys, origin_ns)
    if waiting:
        state.phase = Phase.BLOCKED
        state.waits = tuple(CallWait(record) for record in waiting)
        first = min(waiting, key=lambda r: r.issued_s)
        state.since_s = first.issued_s
        state.site = first.site or state.site
        state.stack = first.stack or state.stack
        state.at_large = _at_large(reader, waiting, inner)
    elif outside is not None and known.watched_ns(reader.word(rings.W_POSITION_SINCE), now_ns) / 1e9 > STORE_STILL_S:
        state.phase = Phase.BLOCKED
        state.waits = (outside,)
        state.since_s = (reader.word(rings.W_POSITION_SINCE) - origin_ns) / 1e9
    elif life == rings.LIFE_STARTED and reader.count == 0:
        state.joining = True
        if known.post_mortem or known.hang_after_s == 0:  # it had all the time there was
            state.phase = Phase.ABSENT
    return state


def _outside_calls(reader: RingReader, keys: tuple[str, ...], origin_ns: int) -> StoreWait | HostWait | None:
    """Return what the main thread waits for if it is not a call: keys of a store, or a message that has ended."""
    if keys:
        return StoreWait(keys)
    waiting = reader.hits(rings.WAITING)
    ended = waiting[waiting["flags"] & (rings.P2P_CALL | rings.STATE_MASK) == rings.P2P_CALL | rings.COMPLETED]
    return second_wait(reader.decode(ended[-1], origin_ns)) if len(ended) else None


def _by_itself(waiting: Sequence[CallRecord], records: Sequence[CallRecord]) -> list[CallRecord]:
    """Drop calls in which threads wait that serve a remote call: they block its caller, not this program."""
    serves = {r.thread: r.index for r in records if r.op == SERVE and not r.done and not r.is_async}
    return [r for r in waiting if r.index < serves.get(r.thread, r.index + 1)]


def _since(reader: RingReader, records: Sequence[CallRecord], origin_ns: int) -> CallRecord | None:
    """Return the main thread's last call if it was made after the last heartbeat that saw this thread not moving."""
    last = next((call for call in reversed(records) if call.thread == "MainThread"), None)
    if last is None or origin_ns + last.issued_s * 1e9 <= reader.word(rings.W_POSITION_SINCE):
        return None
    return last


def settle_stuck(evidence: Evidence) -> None:
    """Mark running ranks as stuck on their host if others have waited for them until the hang timeout.

    That is a rank that was outside any call all that time: in a loop, or at a lock. A rank that holds the
    interpreter shows it at once. A rank that has not made its first call by then never joined; its own age proves
    nothing, because the waiting rank may have just arrived. A rank whose program has ended is not stuck.
    """
    patience_s = evidence.hang_after_s
    settle_given_up(evidence)
    blocked = [s.since_s for s in evidence.ranks.values() if s.phase is Phase.BLOCKED and s.since_s is not None]
    if patience_s is None or not blocked:
        return
    waited_s = max(evidence.watched_s(since_s) for since_s in blocked)
    for rank, state in evidence.ranks.items():
        if state.phase is Phase.RUNNING and state.joining and waited_s >= patience_s:
            state.phase = Phase.ABSENT
        if state.phase is not Phase.RUNNING or state.host is None or state.leaving:
            continue
        calls = evidence.records.get(rank, ())
        last_s = max((call.completed_s or call.issued_s for call in calls[-8:]), default=None)
        if last_s is None:
            continue
        silent_s = state.silent_s or 0.0
        holds = min(silent_s, waited_s) > HELD_S
        if holds or min(evidence.watched_s(last_s), waited_s) > max(patience_s, 0.5):
            state.phase = Phase.HOST_STUCK
            state.since_s = evidence.now_s - silent_s if holds else last_s


def _at_large(reader: RingReader, waiting: Sequence[CallRecord], inner: Site | None) -> bool:
    """Return whether another thread that makes calls does not wait in one.

    The main thread counts, unless it waits for a thread of its own, or for one of several.
    """
    threads = {record.thread for record in waiting}
    if MAIN not in threads:
        return inner is None or not inner.file.endswith(WAITS_FOR_THREADS)
    return reader.word(rings.W_THREADS) > len(threads)


def _exception(state: RankState, reader: RingReader, records: Sequence[CallRecord]) -> None:
    """Set the exception of a rank; if level strict refused a call on its way out, the original exception."""
    refused_on_the_way = bool(records) and records[-1].fleeing and was_refused(records[-1])
    which = rings.W_EXCEPTION if reader.word(rings.W_EXCEPTION) and not refused_on_the_way else rings.W_PENDING
    raised = reader.raised(which)
    state.exception, state.traceback, state.origins = raised.error, raised.traceback, raised.origins


def _pending(reader: RingReader, waiting: Sequence[CallRecord], unfinished: Mapping[int, int]) -> bool:
    return any(unfinished.get(record.index, 0) & rings.PENDING_EXCEPTION for record in waiting)


def _dead(state: RankState, snap: Snapshot, life: int, known: Knowledge, waiting: Sequence[CallRecord]) -> None:
    reader, code = snap.reader, snap.exit_code
    state.exit_code = code
    raised = reader.raised(rings.W_EXCEPTION).frames
    if life == rings.LIFE_RAISED:
        state.phase = Phase.RAISED
        state.site = raised[0] if raised else state.site
        state.stack = raised or state.stack
    elif code is not None and code < 0:
        state.phase = Phase.KILLED
        state.signal = signal_name(-code)
        if state.signal == "SIGKILL" and known.oom_kills:
            state.reason = OUT_OF_MEMORY
        failed = reader.word(rings.W_EXIT_CODE) not in (0, rings.EXIT_CODE_0)
        state.over = life in (rings.LIFE_OVER, rings.LIFE_ENDED) and not failed and not len(snap.unfinished)
        crashed = crash_stack(reader) if known.directory else ()
        own = user_part(crashed)
        if own:
            state.site, state.stack = own[0], own
        elif state.over:
            state.site, state.stack = None, ()
    elif life in rings.LIFE_LEAVING or code is not None:
        # sys.exit(0) and os._exit(0) are no end of the program's own.
        by_itself = not code and not reader.word(rings.W_EXIT_CODE)
        state.phase = Phase.FINISHED if by_itself else Phase.EXITED
        if by_itself and not reader.word(rings.W_JOINED) and reader.count == 0:
            state.phase, state.leaving = Phase.ABSENT, True
        elif by_itself:  # where it stood some time ago says nothing: its last call does
            state.site, state.stack = None, ()
    else:
        state.phase = Phase.KILLED
    if state.phase is not Phase.RAISED:
        state.exception = state.traceback = state.origins = None
    if waiting:
        state.waits = tuple(CallWait(record) for record in waiting)
        if state.phase is Phase.KILLED:
            first = waiting[0]
            state.site, state.stack = first.site, first.stack
    elif state.phase is Phase.KILLED and (keys := reader.position()[2]):
        state.waits = (StoreWait(keys),)


def _implicit(
    reader: RingReader,
    records: Sequence[CallRecord],
    unfinished: Mapping[int, int],
    inner: Site | None,
    process: SystemProcess | None,
    now_ns: int,
) -> list[CallRecord]:
    """Return calls that C++ waits for without telling: DDP's futures, a stream that the host synchronizes with."""
    if not unfinished or inner is None or (process is not None and process.state not in "SD"):
        return []
    still_s = (now_ns - reader.word(rings.W_POSITION_SINCE)) / 1e9
    if still_s < STILL_S or now_ns - reader.word(rings.W_BEAT) > 1e9:
        return []
    open_calls = [r for r in records if r.index in unfinished]
    on_device = [r for r in open_calls if r.device != "cpu"]
    if on_device:
        return on_device[:1]
    if not is_library(inner):
        return []
    futures = [r for r in open_calls if unfinished[r.index] & rings.FUTURE]
    return futures[:1]


def build_evidence(
    readers: Sequence[RingReader],
    known: Knowledge,
    numbering: Numbering,
    extra: Mapping[int, RankState] | None = None,
    focus: Mapping[tuple[Any, ...], int] | None = None,
    origin_wall: int | None = None,
) -> Evidence:
    """Return the evidence for a diagnosis.

    *readers* are the rings of the processes that have a number. *extra* are states of ranks without a ring.
    """
    import time

    now_ns = known.now_ns if known.now_ns is not None else time.monotonic_ns()
    if origin_wall is None:
        origin_wall = origin_of(readers)
    origins = {rank: origin_wall - offset for rank, offset in wall_offsets(readers).items()}
    snaps = {reader.number: snapshot(reader, known) for reader in readers}
    known.all_over = all(snap.given_up and not snap.dead for snap in snaps.values())
    records = call_records(readers, origins, focus)
    states = {rank: RankState(rank) for rank in sorted(numbering.unseen)}
    states.update(extra or {})
    for rank, snap in snaps.items():
        states[rank] = rank_state(snap, records[rank], known, now_ns, origins[rank])
    if not known.post_mortem and any(isinstance(wait, CallWait) for state in states.values() for wait in state.waits):
        for rank, snap in snaps.items():
            waited_s = known.watched_ns(snap.reader.word(rings.W_POSITION_SINCE), now_ns) / 1e9
            if any(isinstance(wait, StoreWait) for wait in states[rank].waits) and waited_s < STORE_BESIDE_CALLS_S:
                states[rank].phase, states[rank].waits, states[rank].since_s = Phase.RUNNING, (), None
    first = readers[0] if readers else None
    origin_ns = origins[first.number] if first is not None else now_ns
    return Evidence(
        world_size=numbering.total,
        ranks=states,
        records=records,
        now_s=(now_ns - origin_ns) / 1e9,
        straggler_after_s=known.straggler_after_s,
        hang_after_s=known.hang_after_s,
        quiet_after_s=known.quiet_after_s,
        all_ended=known.post_mortem,
        sources=sources(records.values(), known.roots, (site for state in states.values() for site in state.lines)),
        away_s=tuple(((begin - origin_ns) / 1e9, (end - origin_ns) / 1e9) for begin, end in known.away_ns),
        unseen=numbering.unseen,
        processes=numbering.names,
        launched=numbering.launched,
        doubles=numbering.doubles,
        double_ranks=numbering.double_ranks,
    )


def sources(
    records: Iterable[Sequence[CallRecord]], roots: Sequence[Path] | None = None, more: Iterable[Site] = ()
) -> dict[str, str]:
    """Return the text of the user's files from which calls were made, and of the files of *more*, if they can be
    read.

    *roots* restricts the files to these folders, for records from others, which could name any file of the reader.
    """
    stacks = {id(call.stack or call.site): call.way for calls in records for call in calls}  # a line's calls share one
    return sources_at((site for way in (*stacks.values(), tuple(more)) for site in way), roots)


def sources_at(sites: Iterable[Site], roots: Sequence[Path] | None = None) -> dict[str, str]:
    """Return the texts of the files in which *sites* are."""
    sources: dict[str, str] = {}
    for site in sites:
        if site.file in sources or len(sources) >= MOST_SOURCES:
            continue
        file = site.file
        try:
            path = absolute(file) if roots is None else within(absolute(file), list(roots))
            sources[file] = "" if path is None else read_bytes(path, LONGEST_SOURCE).decode()
        except (OSError, ValueError):
            sources[file] = ""
    return {file: text for file, text in sources.items() if text}


def call_records(
    readers: Sequence[RingReader],
    origins: Mapping[int, int],
    focus: Mapping[tuple[Any, ...], int] | None = None,
) -> dict[int, list[CallRecord]]:
    """Return the decoded calls that a diagnosis needs: of each group the last that all its members have, and
    unfinished ones.

    *focus* holds numbers (by group key) that must be among them.
    """
    tails: dict[int, Records] = {}
    seen: dict[tuple[Any, ...], dict[int, tuple[int, int]]] = defaultdict(dict)
    overrun: dict[int, bool] = {}
    newest: dict[tuple[Any, ...], int] = {}
    members: dict[tuple[Any, ...], Sequence[int]] = {}
    current = {_default_world(reader) for reader in readers}
    window = rings.RECORDS if len(readers) <= 64 else MANY_RANKS_WINDOW
    for reader in readers:
        rank = reader.number
        start = max(reader.count - window, 0)
        records, _ = reader.since(start)
        if start:
            older = reader.unfinished()
            records = np.concatenate([older[older["commit"] <= start], records])
        tails[rank] = records
        overrun[rank] = reader.count >= window
        collective = (records["flags"] & rings.OF_TWO) == 0
        for offset in np.unique(records["group"]):
            entry = reader.group(int(offset))
            numbers = records["seq"][(records["group"] == offset) & collective]
            name = entry.key[:2]
            newest[name] = max(newest.get(name, 0), entry.generation)
            members[entry.key] = reader.in_job(entry)
            if len(numbers):
                seen[entry.key][rank] = (int(numbers.min()), int(numbers.max()))
    cuts = {key: _cut(members[key], spans, overrun, (focus or {}).get(key)) for key, spans in seen.items()}
    result: dict[int, list[CallRecord]] = {}
    budget = max(64, 32768 // max(len(readers), 1))
    for reader in readers:
        records = tails[reader.number]
        keep = p2p = (records["flags"] & rings.OF_TWO) != 0
        for offset in np.unique(records["group"]):
            entry = reader.group(int(offset))
            mine = records["group"] == offset
            if entry.generation < newest.get(entry.key[:2], 0) or _is_over(reader, entry.world, current):
                keep = keep & ~mine
            else:
                keep = keep | (mine & ~p2p & (records["seq"] >= cuts.get(entry.key, 1)))
        chosen = np.flatnonzero(keep | ((records["flags"] & rings.STATE_MASK) < rings.COMPLETED))
        if len(chosen) > budget:  # the unfinished ones, then the newest
            ended = (records["flags"][chosen] & rings.STATE_MASK) >= rings.COMPLETED
            surplus = np.flatnonzero(ended)[: len(chosen) - budget]
            chosen = np.delete(chosen, surplus)
        result[reader.number] = [reader.decode(values, origins[reader.number]) for values in records[chosen].tolist()]
    return result


def _default_world(reader: RingReader) -> str:
    return next((world.id for world in reversed(reader.worlds) if world.kind is WorldKind.DEFAULT), "")


def _is_over(reader: RingReader, world: str, current: Collection[str]) -> bool:
    """Return whether every process has left the world of a default group."""
    own = reader.world(world)
    return own is not None and own.kind is WorldKind.DEFAULT and world not in current


def _cut(
    ranks: Sequence[int], spans: Mapping[int, tuple[int, int]], overrun: Mapping[int, bool], focus: int | None
) -> int:
    """Return the first number of a group to read: all members must have it, or have overwritten nothing."""
    members = [rank for rank in ranks if rank in overrun]
    common = min((spans[rank][1] if rank in spans else 0) for rank in members) if members else 0
    if any(rank not in spans and overrun[rank] for rank in members):
        common = max(last for _, last in spans.values())  # somebody's calls on it are overwritten: only the last count
    start = max(common - HISTORY, 1)
    if focus is not None:
        start = min(start, max(focus - HISTORY, 1))
    oldest = max((spans[rank][0] for rank in spans if overrun.get(rank)), default=1)
    return max(start, oldest)
