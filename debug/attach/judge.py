"""Diagnosis from the positions of ranks: which ranks are elsewhere than the others. Pure functions.

Stacks show where ranks are, but not what they called before, so every sentence says what it is based on. Each rank is
a node, and what it waits for are its edges: the other end of a message, the ranks that come to a line which sets its
key, the thread that holds its lock, the ranks that are not at its collective. Where the edges end, or close a circle,
are the ranks at fault. Their causes are found by the rules of debug/diagnosis.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from distsim.debug.attach.positions import Doing, Position
from distsim.debug.attach.rules import (
    JOINS,
    all_on_host,
    call_text,
    diagnosis_of,
    groups_cross,
    listed,
    meeting,
    message_text,
    not_in_call,
    ops_text,
    other_members,
    other_roots,
    other_turn,
    stopped,
    turns_of,
    unmatched,
    without_process,
)
from distsim.debug.diagnosis.causes.program_text import Loop, ProgramText
from distsim.debug.diagnosis.causes.rows import with_reason
from distsim.debug.diagnosis.context import Case
from distsim.debug.diagnosis.waits.keys import KeySetters, comes_to, names_key, sets_unseen, setting_lines
from distsim.debug.diagnosis.waits.locks import HeldLock, held_locks
from distsim.debug.diagnosis.waits.wait_graph import WaitGraph
from distsim.debug.matching.agreement import majority
from distsim.debug.matching.index import EvidenceIndex
from distsim.debug.messages import are, capital, ranks_text, site_text
from distsim.debug.records import (
    COLLECTIVES,
    P2P,
    CallRecord,
    CallWait,
    Evidence,
    Group,
    Phase,
    RankState,
    Site,
    StoreWait,
)
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.records.kinds import Kind
from distsim.debug.report.rank_states import Inconclusive

BY_STACKS = "By stacks only: the earlier calls of the ranks are not known."
CREATING = frozenset({"new_group", "split_group", "new_subgroups"})
MEET_ALL = frozenset(
    {"all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single"}
    | {"barrier", "reduce_scatter", "reduce_scatter_tensor"}
)
"""Calls from which no rank returns before all ranks have called."""
GROUP = re.compile(r"\bgroup=([A-Za-z_][\w.]*)")
"""The group that a line passes, by a name that is the same wherever it stands in a file."""
NAMED = 4
"""Largest number of ranks whose processes are named."""


@dataclass(frozen=True, slots=True)
class Judged:
    """Result of the stacks of a job."""

    diagnoses: list[Diagnosis]
    evidence: Evidence
    inconclusive: Inconclusive | None = None
    running: str = ""
    """Sentence on the ranks, if no rank waits for another: they move, or have not begun."""


def judge(
    positions: Iterable[Position],
    world_size: int,
    gone: Iterable[int] = (),
    sources: Mapping[str, str] = {},
    hosts: Mapping[int, str] = {},
) -> Judged:
    """Diagnose a job by the *positions* of its ranks.

    *gone* are ranks that should run on these hosts and have no process; *sources* are texts of the program's files, and
    *hosts* the names of the ranks' hosts. Ranks of other hosts are not judged.
    """
    by_rank = {position.rank: position for position in sorted(positions, key=lambda position: position.rank)}
    gone = sorted(set(gone) - set(by_rank))
    size = max(world_size, len(by_rank))
    records = {r: [_record(p, size)] for r, p in by_rank.items() if p.op in COLLECTIVES | P2P}
    evidence = Evidence(
        size,
        {rank: _state(position, records.get(rank, ()), hosts) for rank, position in by_rank.items()},
        records=records,
        sources=sources,
        notes=_notes(by_rank, world_size, gone),
    )
    unread = [rank for rank, position in by_rank.items() if position.doing is Doing.UNKNOWN]
    seen = {rank: position for rank, position in by_rank.items() if position.doing is not Doing.UNKNOWN}
    job = _Job(evidence, seen, gone)
    diagnosis = job.diagnosis()
    if diagnosis is not None:
        diagnosis = with_reason(Case(job.index, WaitGraph(job.index, ()), [], []), diagnosis)
        words = f"{diagnosis.explanation} {_processes(diagnosis.culprits, by_rank, hosts)}{BY_STACKS}"
        return Judged([replace(diagnosis, explanation=words)], evidence)
    nothing = _nothing(seen, job.waiting, unread)
    return Judged([], evidence, nothing, "" if nothing else _running(seen))


def _running(seen: Mapping[int, Position]) -> str:
    starting = [rank for rank, position in seen.items() if position.doing is Doing.STARTING or position.op in JOINS]
    if starting:
        return f"NOT YET  {ranks_text(starting)} {are(starting, 'has', 'have')} not begun: {listed(seen)}."
    return f"RUNNING  the ranks move. Last seen: {listed(seen)}."


def _record(position: Position, world_size: int) -> CallRecord:
    """Return the call that a rank is in. The members of a group that the program has passed are not known."""
    group = Group("?", "a group", ()) if position.on_group else Group("0", "default_pg", tuple(range(world_size)))
    return CallRecord(
        position.rank, group, 1, position.op, root=position.root, peer=position.peer, site=position.site,
        stack=position.stack, thread=position.thread or "MainThread",
    )  # fmt: skip


class _Job:
    """The positions of a job, and the rules that read them."""

    def __init__(self, evidence: Evidence, seen: Mapping[int, Position], gone: Sequence[int]) -> None:
        self.index = EvidenceIndex(evidence)
        self.text = ProgramText(evidence.sources)
        self.seen = seen
        self.gone = gone
        self.world_size = evidence.world_size
        self.waiting = {rank: position for rank, position in seen.items() if position.waits and not position.moved}

    def diagnosis(self) -> Diagnosis | None:
        """Return the diagnosis by the first rule that explains the positions."""
        still = [p for p in self.seen.values() if p.doing in (Doing.HOST, Doing.ENDING, Doing.STARTING) and p.idle]
        at_rest = [rank for rank, position in self.seen.items() if position.doing is Doing.STOPPED]
        if at_rest:
            return stopped(self.seen, at_rest, self.waiting)
        if self.waiting:
            return (
                without_process(self.gone, self.waiting)
                or self._circle()
                or unmatched(self.waiting)
                or other_members(self.waiting)
                or other_roots(self.waiting)
                or self._other_groups()
                or self._outside()
                or self._elsewhere()
                or meeting(self.waiting, self.world_size)
            )
        if not still or len(still) < len(self.seen) or all(p.doing is Doing.STARTING for p in still):
            return None
        return all_on_host({position.rank: position for position in still})

    # -- edges

    def _circle(self) -> Diagnosis | None:
        """Return ranks that wait for each other in a circle, by messages, keys and locks."""
        needed: dict[int, tuple[int, str]] = {}
        locks = {rank: list(held_locks(self.index, rank, self.text)) for rank in self.waiting}
        setters = KeySetters(self.index, self.text)
        for rank, position in self.waiting.items():
            if position.peer is not None:
                needed[rank] = position.peer, message_text(self.waiting, rank)
            elif position.keys:
                lines = setters.setters(rank) or {}
                others = [other for other in lines if other in self.waiting]
                if len(lines) == 1 and others:
                    words = f"rank {rank} waits for the key {position.keys[0]!r}, which rank {others[0]} sets at "
                    needed[rank] = others[0], words + site_text(lines[others[0]])
            else:
                edge = self._by_thread(position, locks) or self._by_group(position) or self._by_message(position)
                needed.update({} if edge is None else {rank: edge})
        for first in needed:
            path: list[int] = []
            rank = first
            while rank in needed and rank not in path:
                path.append(rank)
                rank = needed[rank][0]
            if rank not in path:
                continue
            circle = path[path.index(rank) :]
            ops = [self.waiting[rank].op.lstrip("i") for rank in circle]
            if len(circle) == 2 and set(ops) == {"send", "recv"}:
                continue  # a send and a receive of one pair meet
            return diagnosis_of(
                Kind.DEADLOCK_CYCLE, circle, self.waiting, self.waiting,
                f"Each waits for the next: {'; '.join(needed[rank][1] for rank in circle)}.",
                _break(ops, [self.waiting[rank] for rank in circle]),
                cycle=tuple(circle),
            )  # fmt: skip
        return None

    def _by_thread(self, position: Position, locks: Mapping[int, Sequence[HeldLock]]) -> tuple[int, str] | None:
        """Return the rank that comes to this one's call in a thread that waits on its host.

        Such an edge is one of a circle only where a rank holds a lock in its call.
        """
        if position.site is None or not any(locks.values()):
            return None
        for other in self.waiting.values():
            waits = {lock.waiter.name: f"once it has the lock `{lock.name}`" for lock in locks[other.rank]}
            for thread in other.threads if other.key != position.key else ():
                in_call = thread.name == (other.thread or "MainThread")
                if not in_call and thread.stack and comes_to(self.text, thread.stack, position.site):
                    words = f"rank {position.rank} waits in {call_text(position)}, to which a thread of rank "
                    words += f"{other.rank} comes from {site_text(thread.stack[0])} {waits.get(thread.name, 'later')}"
                    return other.rank, words
        return None

    def _by_group(self, position: Position) -> tuple[int, str] | None:
        """Return the rank that comes to a call on this one's group, by the group's name, after the call it is in."""
        name = self._group_name(position)
        for other in self.waiting.values() if name else ():
            if self._group_name(other) in ("", name):
                continue
            for at, group in self._lines_with(GROUP, position):
                if group[1] == name and comes_to(self.text, other.stack, at):
                    words = f"rank {position.rank} waits in {call_text(position)} on group {name}, to which rank "
                    return other.rank, f"{words}{other.rank} comes at {site_text(at)}"
        return None

    def _by_message(self, position: Position) -> tuple[int, str] | None:
        """Return the rank that waits for the message which this one sends or receives only after its collective."""
        for other in self.waiting.values() if position.op in COLLECTIVES and not position.on_group else ():
            if other.peer != position.rank:
                continue
            end = re.compile(r"\bi?recv\(" if other.op.endswith("send") else r"\bi?send\(")
            if any(comes_to(self.text, position.stack, at) for at, _ in self._lines_with(end, position)):
                return other.rank, f"rank {position.rank} waits in {call_text(position)} for rank {other.rank}"
        return None

    def _keys_after(self) -> Diagnosis | None:
        """Return the circle of ranks that all wait for keys, and set keys only behind these waits."""
        keys = [key for position in self.waiting.values() for key in position.keys]
        lines = {
            rank: site
            for rank, position in self.waiting.items()
            for site, name in setting_lines(self.text)
            if comes_to(self.text, position.stack, site) and all(names_key(name, key) is not False for key in keys)
        }
        if len(lines) < self.world_size or sets_unseen(self.text):
            return None
        behind = ", ".join(dict.fromkeys(map(site_text, lines.values())))
        return diagnosis_of(
            Kind.DEADLOCK_CYCLE, sorted(lines), self.waiting, self.waiting,
            f"Every rank waits for a key of a store, and comes to the line that sets one ({behind}) only after that: "
            f"{listed(self.waiting)}.",
            _break(["store."], ()),
        )  # fmt: skip

    def _group_name(self, position: Position) -> str:
        if not position.on_group or position.site is None:
            return ""
        match = GROUP.search(self.text.line(position.site))
        return "" if match is None else match[1]

    def _lines_with(self, pattern: re.Pattern[str], position: Position) -> Iterable[tuple[Site, re.Match[str]]]:
        """Return the lines of the file of *position* that *pattern* is in."""
        assert position.site is not None
        lines = (self.index.evidence.sources.get(position.site.file) or "").splitlines()
        for number, line in enumerate(lines, 1):
            if (match := pattern.search(line)) is not None:
                yield Site(position.site.file, number, ""), match

    # -- who is elsewhere

    def _other_groups(self) -> Diagnosis | None:
        """Return ranks that pass no group, or one, where most ranks do otherwise at the same line."""
        calls = {rank: position for rank, position in self.waiting.items() if position.doing is Doing.CALL}
        if len(calls) < len(self.seen) or len({position.key for position in calls.values()}) > 1 or len(calls) < 2:
            return None
        vote = majority({rank: position.on_group for rank, position in sorted(calls.items())})
        if not vote.culprits:
            return groups_cross(calls)
        where = {True: "on a group that the program passes", False: "on default_pg"}
        odd = ranks_text(vote.culprits)
        others = [rank for rank in calls if rank not in vote.culprits]
        tie = " The group is split evenly: the culprit is chosen by rank order." if vote.tie else ""
        return diagnosis_of(
            Kind.GROUP_MISMATCH, vote.culprits, calls, calls,
            f"{capital(odd)} {are(vote.culprits, 'waits', 'wait')} in {ops_text(calls)} "
            f"{where[calls[vote.culprits[0]].on_group]}, {ranks_text(others)} {where[calls[others[0]].on_group]}.{tie}",
            f"Pass the same group= on every rank at {site_text(calls[others[0]].site)}.",
        )  # fmt: skip

    def _outside(self) -> Diagnosis | None:
        """Return the ranks that are in no call, and for which the others wait."""
        host = [rank for rank in self.seen if rank not in self.waiting]
        at_keys = [rank for rank in self.waiting if self.waiting[rank].op.startswith("store.")]
        groups = Counter(position.key for position in self.seen.values())
        key, count = groups.most_common(1)[0]
        most = [rank for rank in host if self.seen[rank].key == key]
        by_threads = count > len(self.seen) / 2 and most and all(self.seen[rank].idle for rank in most)
        if host and not by_threads:
            return not_in_call(self.seen, self.waiting, host)
        if at_keys and len(at_keys) == len(self.seen):
            return self._keys_after() or all_on_host(self.seen)
        if at_keys and not host:
            calls = {rank: position for rank, position in self.waiting.items() if rank not in at_keys}
            keys = {rank: self.waiting[rank] for rank in at_keys}
            return diagnosis_of(
                Kind.MISSING_RANK, at_keys, calls, self.waiting,
                f"{capital(listed(keys))}, for a key; {listed(calls)}.",
                f"Find the rank that should set the key for {ranks_text(at_keys)}: it may be past the line that sets "
                "it, or wait in a call before it.",
            )  # fmt: skip
        return None

    def _elsewhere(self) -> Diagnosis | None:
        """Return the diagnosis if some ranks wait at another line than most, else None."""
        seen, waiting = self.seen, self.waiting
        groups: dict[tuple[str, str], list[int]] = defaultdict(list)
        for rank, position in seen.items():
            groups[position.key].append(rank)
        main = max(groups.values(), key=len)
        turns = turns_of(seen)
        if turns is not None and (len(main) <= len(seen) / 2 or len(main) == len(seen)):
            return other_turn(seen, waiting, turns)
        if len(groups) == 1:
            return None
        creating = [rank for rank, position in waiting.items() if position.op in CREATING]
        if len(main) > len(seen) / 2:
            culprits = sorted(set(seen) - set(main))
            turns_text = f" They are {turns[2]}." if turns is not None else ""
            left = all(self._has_left_loop(seen[rank], seen[main[0]]) for rank in culprits)
            return diagnosis_of(
                Kind.UNEVEN_ITERATIONS if left else Kind.MISSING_RANK, culprits, seen, seen,
                f"The ranks are at different lines: {listed(seen)}.{turns_text}",
                "Compare the paths to these lines: a call behind a condition, an exception that was handled, or a loop "
                "of another length.",
            )  # fmt: skip
        if creating:
            return diagnosis_of(
                Kind.GROUP_CREATION_ORDER, sorted(seen), seen, seen,
                f"{capital(ranks_text(creating))} {are(creating, 'creates', 'create')} a group, and not all ranks do: "
                f"{listed(seen)}.",
                "Let every rank of the job call new_group for the same groups in the same order, members or not.",
            )  # fmt: skip
        return self._by_text(list(groups.values()))

    def _by_text(self, groups: Sequence[Sequence[int]]) -> Diagnosis | None:
        """Return who has skipped a call or calls in another order, as the program's text shows it."""
        if len(groups) != 2 or len(self.waiting) < len(self.seen):
            return None
        first, second = (self.waiting[ranks[0]] for ranks in groups)
        mine, other = first.site, second.site
        if mine is None or other is None or None in (self.text.tree(mine.file), self.text.tree(other.file)):
            return None
        comes = comes_to(self.text, first.stack, other), comes_to(self.text, second.stack, mine)
        if all(comes) and self._in_one_turn(first, second):
            comes = mine.line < other.line, other.line < mine.line
        if all(comes):
            return diagnosis_of(
                Kind.WRONG_ORDER, sorted(self.seen), self.seen, self.seen,
                f"{capital(listed(self.waiting))}. Each of them comes to the other's line later.",
                f"Make the calls at {site_text(mine)} and {site_text(other)} in the same order on every rank.",
            )  # fmt: skip
        behind, ahead = groups if comes[0] else groups[::-1]
        if not any(comes) or self.waiting[behind[0]].op not in MEET_ALL or self.waiting[behind[0]].on_group:
            return None
        return diagnosis_of(
            Kind.MISSING_RANK, ahead, self.waiting, self.waiting,
            f"{capital(listed(self.waiting))}. The way to the later line leads past the earlier one, and no rank "
            f"comes through {self.waiting[behind[0]].op} without {ranks_text(behind)}.",
            f"Find why {ranks_text(ahead)} left the earlier call out: a condition, or an exception that was handled.",
        )  # fmt: skip

    def _has_left_loop(self, ahead: Position, other: Position) -> bool:
        """Return whether *ahead* is below the loop around *other*, in the same function."""
        for frame in other.stack:
            here = next((one for one in ahead.stack if (one.file, one.function) == (frame.file, frame.function)), None)
            loops = [node for node in self.text.around(frame) if isinstance(node, Loop)]
            if here is not None and any(here.line > (loop.end_lineno or 0) for loop in loops):
                return True
        return False

    def _in_one_turn(self, first: Position, second: Position) -> bool:
        """Return whether both are at lines of one loop, in the same turn of it."""
        if first.site is None or second.site is None or first.site.function != second.site.function:
            return False
        loops = [node for node in self.text.around(first.site) if isinstance(node, Loop)]
        if len(loops) != 1 or loops[0] not in self.text.around(second.site):
            return False
        names = {key for key in first.counters if key.rpartition(".")[2] in self.text.changed_by(loops[0])}
        return bool(names) and all(first.counters[key] == second.counters.get(key) for key in names)


def _break(ops: Sequence[str], positions: Sequence[Position]) -> str:
    """Return how to break a circle of waits."""
    if any(op.startswith("store.") for op in ops):
        return "Break the circle: let each rank set its own key first, then wait for the other's."
    if all(position.peer is None for position in positions):
        return "Use the groups in the same order on every rank."
    return (
        "Let one of them call in the other order, or start all with isend and irecv before the first wait "
        "(batch_isend_irecv on NCCL)."
    )


def _nothing(
    seen: Mapping[int, Position], waiting: Mapping[int, Position], unread: Sequence[int]
) -> Inconclusive | None:
    if waiting and len(waiting) == len(seen):
        one_line = len({position.key for position in waiting.values()}) == 1
        where = "at the same line" if one_line else "in different calls"
        return Inconclusive(
            f"{ranks_text(waiting)} {are(waiting, 'waits', 'wait')} {where}, and the stacks do not show who is wrong",
            (f"{capital(listed(waiting))}.",),
            "Run it again in a moment: if no rank has moved, the network, tensors of other shapes or another group may "
            "hold them, which stacks do not show. Start the next run under the guard (distsim run --on gloo | nccl).",
        )
    if unread:
        return Inconclusive(
            f"no stack of {ranks_text(unread)} could be read",
            (f"{capital(listed(seen))}.",) if seen else (),
            "Run distsim attach as the user of the job, with the right to ptrace.",
        )
    return None


def _processes(ranks: Sequence[int], positions: Mapping[int, Position], hosts: Mapping[int, str]) -> str:
    """Return the sentences on the processes of *ranks*, and the folder of their records."""
    known = [positions[rank] for rank in ranks if rank in positions][:NAMED]
    on = {rank: f" on {hosts[rank]}" if rank in hosts else "" for rank in positions}
    text = ", ".join(f"rank {p.rank} is pid {p.pid}{on[p.rank]}" for p in known)
    folder = next((f" Its records are in {p.records}." for p in known if p.records), "")
    return f"{capital(text)}.{folder} " if known else ""


def _state(position: Position, calls: Sequence[CallRecord], hosts: Mapping[int, str]) -> RankState:
    waits: list[CallWait | StoreWait] = [CallWait(call) for call in calls]
    if position.keys:
        waits.append(StoreWait(position.keys))
    phase = Phase.BLOCKED if position.waits else Phase.HOST_STUCK if position.idle else Phase.RUNNING
    if position.doing is Doing.STOPPED:
        phase = Phase.FROZEN
    return RankState(
        position.rank, phase, tuple(waits) if position.waits else (), position.site,
        position.worker_stack or position.stack, pid=position.pid, host=hosts.get(position.rank),
        threads=position.threads, through=position.doing is Doing.ENDING,
    )  # fmt: skip


def _notes(positions: Mapping[int, Position], world_size: int, gone: Sequence[int]) -> list[str]:
    notes = [
        f"the call of rank {position.rank} is in its thread {position.thread}"
        for position in positions.values()
        if position.thread
    ]
    unread = [rank for rank, position in positions.items() if position.doing is Doing.UNKNOWN]
    if unread:
        notes.append(f"no stack of {ranks_text(unread)}: {positions[unread[0]].why}")
    elsewhere = world_size - len(positions) - len(gone)
    if elsewhere > 0:
        notes.append(f"{elsewhere} of {world_size} ranks are not on the examined hosts")
    return notes
