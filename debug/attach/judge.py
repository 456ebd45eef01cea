"""Diagnosis from the positions of ranks: which ranks are elsewhere than the others. Pure functions.

Stacks show where ranks are, but not what they called before, so every sentence says what it is based on. A diagnosis
names the ranks that are not where most of the others wait: in another call, on the host, or in another iteration of
the same loop.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from distsim.debug.attach.positions import Doing, Position
from distsim.debug.attach.ranks import APART_S
from distsim.debug.matching.agreement import majority
from distsim.debug.messages import are, capital, ranks_text, site_text
from distsim.debug.records import Evidence, Phase, RankState, Site
from distsim.debug.records.diagnosis import Diagnosis, Stuck
from distsim.debug.records.kinds import Kind
from distsim.debug.report.rank_states import Inconclusive

__all__ = ["Judged", "judge"]

BY_STACKS = "By stacks only: the earlier calls of the ranks are not known."


@dataclass(frozen=True, slots=True)
class Judged:
    """Result of the stacks of a job."""

    diagnoses: list[Diagnosis]
    evidence: Evidence
    inconclusive: Inconclusive | None = None
    running: str = ""
    """Locations of the ranks, if no rank waits for another."""


def judge(
    positions: Iterable[Position], world_size: int, gone: Iterable[int] = (), sources: Mapping[str, str] = {}
) -> Judged:
    """Diagnose a job by the *positions* of its ranks.

    *gone* are ranks that should run on these hosts and have no process; *sources* are texts of the program's files.
    Ranks of other hosts are not judged.
    """
    by_rank = {position.rank: position for position in positions}
    gone = sorted(set(gone) - set(by_rank))
    evidence = Evidence(
        max(world_size, len(by_rank)),
        {rank: _state(position) for rank, position in by_rank.items()},
        sources=sources,
        notes=_notes(by_rank, world_size, gone),
    )
    unread = [rank for rank, position in by_rank.items() if position.doing is Doing.UNKNOWN]
    seen = {rank: position for rank, position in by_rank.items() if position.doing is not Doing.UNKNOWN}
    waiting = {rank: position for rank, position in seen.items() if position.waits and not position.moved}
    diagnosis = None
    if waiting or gone:
        diagnosis = (
            _gone(gone, waiting)
            or _circle(waiting)
            or _unmatched(waiting)
            or _other_members(waiting)
            or _roots(waiting)
            or _elsewhere(seen, waiting)
            or _meeting(waiting, world_size)
        )
    elif seen and all(position.doing is Doing.HOST and not position.moved for position in seen.values()):
        diagnosis = _all_on_host(seen)
    if diagnosis is not None:
        return Judged([diagnosis], evidence)
    nothing = _nothing(seen, waiting, unread)
    return Judged([], evidence, nothing, "" if nothing else f"{_listed(seen)}.")


def _gone(gone: Sequence[int], waiting: Mapping[int, Position]) -> Diagnosis | None:
    if not gone or not waiting:
        return None
    return _diagnosis(
        Kind.RANK_EXITED,
        gone,
        waiting,
        waiting,
        f"{capital(ranks_text(gone))} {are(gone, 'has', 'have')} no process on this host, and the others wait.",
        f"Read the end of the log of {ranks_text(gone)}: it exited, raised or was killed (the kernel's log names the "
        "out-of-memory killer). Then end the others.",
    )


def _circle(waiting: Mapping[int, Position]) -> Diagnosis | None:
    """Return messages that wait for each other in a circle."""
    for first in waiting:
        path: list[int] = []
        rank: int | None = first
        while rank is not None and rank in waiting and rank not in path:
            path.append(rank)
            rank = waiting[rank].peer
        if rank is None or rank not in path:
            continue
        circle = path[path.index(rank) :]
        if len(circle) == 2 and len({waiting[rank].op.lstrip("i") for rank in circle}) == 2:
            continue  # a send and a receive of one pair meet
        steps = "; ".join(_message(waiting, rank) for rank in circle)
        return _diagnosis(
            Kind.DEADLOCK_CYCLE, circle, waiting, waiting,
            f"Each waits for the next: {steps}.",
            "Let one of them call in the other order, or start all with isend and irecv before the first wait "
            "(batch_isend_irecv on NCCL).",
            cycle=tuple(circle),
        )  # fmt: skip
    return None


def _unmatched(waiting: Mapping[int, Position]) -> Diagnosis | None:
    """Return messages whose peer waits in a collective."""
    alone = {
        rank: position.peer
        for rank, position in waiting.items()
        if position.peer is not None and position.peer in waiting
    }
    alone = {rank: peer for rank, peer in alone.items() if waiting[peer].peer is None}
    if not alone:
        return None
    if (wrong := _wrong_peer(waiting, alone)) is not None:
        return wrong
    culprits = sorted(set(alone.values()))
    messages = "; ".join(_message(waiting, rank) for rank in list(alone)[:4])
    return _diagnosis(
        Kind.P2P_UNMATCHED, culprits, waiting, waiting,
        f"The other end of a message is missing: {messages}, which {are(culprits, 'waits', 'wait')} in "
        f"{_op({rank: waiting[rank] for rank in culprits})}.",
        "Find the call that should be the message's other end, or leave the message out.",
    )  # fmt: skip


def _wrong_peer(waiting: Mapping[int, Position], alone: Mapping[int, int]) -> Diagnosis | None:
    """Return ranks whose message goes to a rank that does not want it, while another rank waits for one of theirs."""
    missed: dict[int, int] = {}
    for rank, position in waiting.items():
        peer = position.peer
        if peer is None or peer not in alone:
            continue
        if {position.op.lstrip("i"), waiting[peer].op.lstrip("i")} == {"send", "recv"}:
            missed[peer] = rank
    culprits = sorted(rank for rank in alone if rank in missed)
    if not culprits:
        return None
    sentences = [
        f"{_message(waiting, rank)}, which waits in {_op({alone[rank]: waiting[alone[rank]]})}; "
        f"{_message(waiting, missed[rank])}"
        for rank in culprits[:4]
    ]
    return _diagnosis(
        Kind.P2P_UNMATCHED, culprits, waiting, waiting,
        f"The two ends of a message name other ranks than each other: {'; '.join(sentences)}.",
        f"Check the peer's rank in the call of {ranks_text(culprits)}.",
    )  # fmt: skip


def _message(waiting: Mapping[int, Position], rank: int) -> str:
    return f"rank {rank} waits in {waiting[rank].op} for rank {waiting[rank].peer}"


def _elsewhere(seen: Mapping[int, Position], waiting: Mapping[int, Position]) -> Diagnosis | None:
    """Return the diagnosis if some ranks are not where most ranks are, else None."""
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, position in seen.items():
        groups[position.key].append(rank)
    main = max(groups.values(), key=len)
    host = [rank for rank in seen if rank not in waiting]
    if host and not (len(main) > len(seen) / 2 and set(main) <= set(host) and _idle(seen, main)):
        return _not_in_call(seen, waiting, host)
    turns = _turns(seen)
    if turns is not None and (len(main) <= len(seen) / 2 or len(main) == len(seen)):
        return _other_turn(seen, waiting, turns)
    if len(groups) == 1:
        return _groups_cross(waiting) if len(waiting) == len(seen) else None
    if len(main) <= len(seen) / 2 and (skipped := _skipped(seen, waiting)) is not None:
        return skipped
    creating = [rank for rank, position in waiting.items() if position.op in CREATING]
    if len(main) <= len(seen) / 2 and creating:
        return _diagnosis(
            Kind.GROUP_CREATION_ORDER, sorted(seen), seen, seen,
            f"{capital(ranks_text(creating))} {are(creating, 'creates', 'create')} a group, and not all ranks do: "
            f"{_listed(seen)}.",
            "Let every rank of the job call new_group for the same groups in the same order, members or not.",
        )  # fmt: skip
    culprits = sorted(set(seen) - set(main)) if len(main) > len(seen) / 2 else sorted(seen)
    turns_text = f" They are {turns[2]}." if turns is not None else ""
    return _diagnosis(
        Kind.MISSING_RANK if len(culprits) < len(seen) else Kind.WRONG_ORDER, culprits, seen, seen,
        f"The ranks are at different lines: {_listed(seen)}.{turns_text}",
        "Compare the paths to these lines: a call behind a condition, an exception that was handled, or a loop of "
        "another length.",
    )  # fmt: skip


def _idle(seen: Mapping[int, Position], ranks: Iterable[int]) -> bool:
    return not any(seen[rank].moved or seen[rank].busy for rank in ranks)


def _other_members(waiting: Mapping[int, Position]) -> Diagnosis | None:
    """Return ranks that create another group than most."""
    members_of = {rank: position.members for rank, position in waiting.items() if position.members}
    if len(set(members_of.values())) < 2:
        return None
    usual = _usual(members_of)
    culprits = [rank for rank, members in members_of.items() if members != usual]
    listed = "; ".join(
        f"{ranks_text(rank for rank in members_of if members_of[rank] == members)} {members}"
        for members in dict.fromkeys(members_of.values())
    )
    return _diagnosis(
        Kind.GROUP_CREATION_ORDER, culprits, waiting, waiting,
        f"The ranks are in new_group for different members: {listed}.",
        "Every rank of the job calls new_group for the same groups in the same order, members or not.",
    )  # fmt: skip


def _usual(values: Mapping[int, Hashable]) -> Hashable:
    """Return the most frequent value, or the lowest rank's of several."""
    counts = Counter(values[rank] for rank in sorted(values))
    return max(counts, key=lambda value: counts[value])


def _roots(waiting: Mapping[int, Position]) -> Diagnosis | None:
    """Return a collective of the whole job in which ranks pass different roots."""
    rooted = {
        rank: position for rank, position in waiting.items() if position.root is not None and not position.on_group
    }
    key = None if not rooted else _usual({rank: position.key for rank, position in rooted.items()})
    roots = {rank: position.root for rank, position in sorted(rooted.items()) if position.key == key}
    if len(set(roots.values())) < 2:
        return None
    vote = majority(roots)
    tie = " The group is split evenly: the culprit is chosen by rank order." if vote.tie else ""
    listed = "; ".join(
        f"{ranks_text(rank for rank in roots if roots[rank] == root)} {root}" for root in dict.fromkeys(roots.values())
    )
    return _diagnosis(
        Kind.ROOT_MISMATCH, vote.culprits, waiting, waiting,
        f"The ranks wait in {_op({rank: rooted[rank] for rank in roots})} with different roots: {listed}.{tie}",
        "Give every rank the same root (src or dst is a rank of the whole job; group_src one of the group).",
    )  # fmt: skip


def _groups_cross(waiting: Mapping[int, Position]) -> Diagnosis | None:
    """Diagnose ranks that all wait at one line in calls with a group.

    The groups must differ, because the calls on one group would have completed.
    """
    if len(waiting) < 2 or not all(position.on_group and position.doing is Doing.CALL for position in waiting.values()):
        return None
    return _diagnosis(
        Kind.DEADLOCK_CYCLE, sorted(waiting), waiting, waiting,
        f"{capital(_listed(waiting))}, in calls on groups. Unless the network holds them, or their tensors differ, the "
        "groups differ: each rank waits in one whose other members wait in another.",
        "Use the groups in the same order on every rank.",
    )  # fmt: skip


def _skipped(seen: Mapping[int, Position], waiting: Mapping[int, Position]) -> Diagnosis | None:
    """Return ranks that are further down in a straight piece of the program than others in a call of the whole job:
    they must have skipped this call."""
    sites = {rank: position.site for rank, position in waiting.items() if position.site is not None}
    if len(sites) < len(seen) or len({(site.file, site.function) for site in sites.values()}) != 1:
        return None
    if len({tuple(map(str, position.stack[1:])) for position in waiting.values()}) != 1:
        return None
    first_rank = min(sites, key=lambda rank: sites[rank].line)
    behind = [rank for rank, site in sites.items() if site == sites[first_rank]]
    ahead = sorted(rank for rank in seen if rank not in behind)
    if not all(waiting[rank].op in MEET_ALL and not waiting[rank].on_group for rank in behind):
        return None
    blocks = waiting[first_rank].blocks
    if blocks is None or len({position.blocks for position in waiting.values()}) > 1:
        return None
    if any(block.startswith(("For", "While", "AsyncFor")) for block in blocks):
        return None  # the upper line may follow the lower one, in another turn
    return _diagnosis(
        Kind.MISSING_RANK, ahead, waiting, waiting,
        f"{capital(_listed(waiting))}. The way to the later line leads past the earlier one, and no rank comes through "
        f"{waiting[first_rank].op} without {ranks_text(behind)}.",
        f"Find why {ranks_text(ahead)} left the earlier call out: a condition, or an exception that was handled.",
    )  # fmt: skip


CREATING = frozenset({"new_group", "split_group", "new_subgroups"})
MEET_ALL = frozenset(
    {"all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single"}
    | {"barrier", "reduce_scatter", "reduce_scatter_tensor"}
)
"""Calls from which no rank returns before all ranks have called."""


def _not_in_call(seen: Mapping[int, Position], waiting: Mapping[int, Position], host: Sequence[int]) -> Diagnosis:
    moving = [rank for rank in host if seen[rank].moved or seen[rank].busy]
    stuck = [rank for rank in host if rank not in moving]
    culprits = stuck or moving
    elsewhere = _listed({rank: seen[rank] for rank in culprits})
    if stuck:
        more = f" {capital(ranks_text(moving))} {are(moving, 'runs', 'run')} on." if moving else ""
        return _diagnosis(
            Kind.HOST_STUCK, stuck, waiting, {**waiting, **{r: seen[r] for r in stuck}},
            f"{capital(ranks_text(waiting))} {are(waiting, 'waits', 'wait')} in {_op(waiting)}; {elsewhere}, outside "
            f"of torch.distributed, and did not move for {APART_S:g} s.{more}",
            f"Look at what {ranks_text(stuck)} {are(stuck, 'waits', 'wait')} for on its host: a lock, a queue, a data "
            "loader, a file system, input.",
        )  # fmt: skip
    return _diagnosis(
        Kind.STRAGGLER, moving, waiting, {**waiting, **{rank: seen[rank] for rank in moving}},
        f"{capital(ranks_text(waiting))} {are(waiting, 'waits', 'wait')} in {_op(waiting)}; {elsewhere}, and still "
        f"{are(moving, 'runs', 'run')}.",
        f"If {ranks_text(moving)} {are(moving, 'is', 'are')} at the same line in a minute, it is a loop that does not "
        "end; otherwise it is slower than the others, or has other work.",
    )  # fmt: skip


Turns = tuple[list[int], list[int], str]


def _turns(seen: Mapping[int, Position]) -> Turns | None:
    """Return ranks whose loop is at another iteration than most, the majority, and the text about it."""
    shared: Counter[tuple[str, str]] = Counter(key for position in seen.values() for key in position.counters)
    for key, count in shared.items():
        if count < len(seen):
            continue
        values = {rank: position.counters[key] for rank, position in seen.items()}
        by_value: dict[int, list[int]] = defaultdict(list)
        for rank, value in values.items():
            by_value[value].append(rank)
        most = max(len(ranks) for ranks in by_value.values())
        main = [value for value, ranks in by_value.items() if len(ranks) == most]
        if len(by_value) == 1 or len(by_value) > max(2, len(seen) // 2) or set(values.values()) == set(seen):
            continue  # equal on all, or a number of the rank's own
        if max(by_value) - min(by_value) > 1 and len(main) != 1:
            continue
        usual = main[0] if len(main) == 1 else max(main)
        others = sorted(rank for rank, value in values.items() if value != usual)
        listed = ", ".join(f"{key[1]}={value} on {ranks_text(ranks)}" for value, ranks in sorted(by_value.items()))
        return others, sorted(by_value[usual]), f"in different iterations of the loop in {key[0]}: {listed}"
    return None


def _other_turn(seen: Mapping[int, Position], waiting: Mapping[int, Position], turns: Turns) -> Diagnosis:
    culprits, main, order_text = turns
    others = {rank: waiting[rank] for rank in main if rank in waiting}
    return _diagnosis(
        Kind.UNEVEN_ITERATIONS, culprits, others, waiting,
        f"The ranks wait {order_text}. {capital(_listed(waiting))}.",
        "Find why the numbers of iterations differ: batches of each rank's own data, a condition on a local value, an "
        "exception that was handled.",
    )  # fmt: skip


def _meeting(waiting: Mapping[int, Position], world_size: int) -> Diagnosis | None:
    """Diagnose ranks that all wait for others to join."""
    if not waiting or any(position.doing is not Doing.MEETING for position in waiting.values()):
        return None
    missing = sorted(set(range(world_size)) - set(waiting))
    if not missing:
        return None
    return _diagnosis(
        Kind.NEVER_JOINED, missing, waiting, waiting,
        f"{capital(ranks_text(waiting))} {are(waiting, 'waits', 'wait')} in {_op(waiting)} for a world of "
        f"{world_size} ranks; {ranks_text(missing)} {are(missing, 'is', 'are')} not on the hosts that were looked at.",
        "Check whether they run on another host, with the same MASTER_ADDR and MASTER_PORT (distsim attach there).",
    )  # fmt: skip


def _all_on_host(seen: Mapping[int, Position]) -> Diagnosis:
    return _diagnosis(
        Kind.HOST_STUCK, sorted(seen), {}, seen,
        f"No rank is in a call of torch.distributed, none computes, and none moved for {APART_S:g} s: {_listed(seen)}.",
        "Look at what they wait for on their hosts: a lock, a queue, a data loader, a file system, input.",
    )  # fmt: skip


def _nothing(
    seen: Mapping[int, Position], waiting: Mapping[int, Position], unread: Sequence[int]
) -> Inconclusive | None:
    if waiting and len(waiting) == len(seen):
        ranks = ranks_text(waiting)
        return Inconclusive(
            f"{ranks} {are(waiting, 'waits', 'wait')} at the same line, so the stacks do not distinguish them",
            (f"{capital(_listed(waiting))}.",),
            "Run it again in a moment: if no rank has moved, the network, tensors of other shapes or another group may "
            "hold them, which stacks do not show. Start the next run under the guard (distsim run --on gloo | nccl).",
        )
    if unread:
        return Inconclusive(
            f"no stack of {ranks_text(unread)} could be read",
            (f"{capital(_listed(seen))}.",) if seen else (),
            "Run distsim attach as the user of the job, with the right to ptrace.",
        )
    return None


def _diagnosis(
    kind: Kind,
    culprits: Sequence[int],
    victims: Mapping[int, Position],
    known: Mapping[int, Position],
    explanation: str,
    suggestion: str,
    cycle: tuple[int, ...] | None = None,
) -> Diagnosis:
    sites: dict[int, Site] = {rank: position.site for rank, position in known.items() if position.site is not None}
    stuck = {
        rank: Stuck(
            position.op,
            file=position.site.file if position.site else None,
            line=position.site.line if position.site else None,
        )
        for rank, position in known.items()
        if position.waits
    }
    return Diagnosis(
        kind,
        cycle or tuple(sorted(culprits)),
        tuple(sorted(set(victims) - set(culprits))),
        sites=sites,
        stuck=stuck,
        cycle=cycle,
        explanation=f"{explanation} {BY_STACKS}",
        suggestion=suggestion,
    )


def _state(position: Position) -> RankState:
    phase = Phase.BLOCKED if position.waits else Phase.RUNNING if position.busy or position.moved else Phase.HOST_STUCK
    return RankState(position.rank, phase, site=position.site, stack=position.stack, pid=position.pid)


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


def _op(positions: Mapping[int, Position]) -> str:
    return " and ".join(dict.fromkeys(_call(position) for position in positions.values()))


def _call(position: Position) -> str:
    at = f" at {site_text(position.site)}" if position.site is not None else ""
    return f"{position.op}{at}"


def _listed(positions: Mapping[int, Position]) -> str:
    """Return a text such as `ranks 0,1 wait in barrier at train.py:11; rank 2 is at data.py:7`."""
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, position in positions.items():
        groups[position.key].append(rank)
    parts = []
    for ranks in sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks)):
        position = positions[ranks[0]]
        if position.waits:
            parts.append(f"{ranks_text(ranks)} {are(ranks, 'waits', 'wait')} in {_call(position)}")
        else:
            operation = f"{position.op} " if position.op else ""
            at = (
                f"at {site_text(position.site, function=True)}"
                if position.site is not None
                else "outside of the program"
            )
            parts.append(f"{ranks_text(ranks)} {are(ranks, 'is', 'are')} {operation}{at}")
    return "; ".join(parts)
