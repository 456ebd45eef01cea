"""Rules on the positions of ranks that need no text of the program, and the sentences that name positions."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence

from distsim.debug.attach.positions import Doing, Position
from distsim.debug.attach.ranks import APART_S
from distsim.debug.matching.agreement import majority
from distsim.debug.messages import are, capital, ranks_text, site_text
from distsim.debug.records import Site
from distsim.debug.records.diagnosis import Diagnosis, Stuck
from distsim.debug.records.kinds import Kind

JOINS = frozenset({"init_process_group", "rendezvous", "store_based_barrier", "init_rpc"})
"""Calls in which the ranks of a job first meet."""


def without_process(gone: Sequence[int], waiting: Mapping[int, Position]) -> Diagnosis | None:
    """Return the ranks that have no process, and for which others wait; a message waits for its peer alone."""
    gone = [rank for rank in gone if any(position.peer in (None, rank) for position in waiting.values())]
    if not gone:
        return None
    return diagnosis_of(
        Kind.RANK_EXITED,
        gone,
        waiting,
        waiting,
        f"{capital(ranks_text(gone))} {are(gone, 'has', 'have')} no process on this host, and the others wait.",
        f"Read the end of the log of {ranks_text(gone)}: it exited, raised or was killed (the kernel's log names the "
        "out-of-memory killer). Then end the others.",
    )


def stopped(seen: Mapping[int, Position], stopped: Sequence[int], waiting: Mapping[int, Position]) -> Diagnosis:
    """Return the diagnosis of stopped processes, with the command that lets them go on."""
    pids = " ".join(str(seen[rank].pid) for rank in stopped)
    waits = f"; {ranks_text(waiting)} {are(waiting, 'waits', 'wait')} in {ops_text(waiting)}" if waiting else ""
    return diagnosis_of(
        Kind.PROCESS_FROZEN, stopped, waiting, {**waiting, **{rank: seen[rank] for rank in stopped}},
        f"{capital(listed({rank: seen[rank] for rank in stopped}))}{waits}.",
        f"kill -CONT {pids} lets {are(stopped, 'it', 'them')} go on: a debugger, Ctrl-Z, a container's pause or a "
        "scheduler's suspension has stopped it.",
    )  # fmt: skip


def unmatched(waiting: Mapping[int, Position]) -> Diagnosis | None:
    """Return messages whose peer waits in a collective, or for another message than this one."""
    alone = {
        rank: position.peer
        for rank, position in waiting.items()
        if position.peer is not None and position.peer in waiting and waiting[position.peer].peer is None
    }
    missed = {
        position.peer: rank
        for rank, position in waiting.items()
        if position.peer in alone
        and {position.op.lstrip("i"), waiting[position.peer].op.lstrip("i")} == {"send", "recv"}
    }
    if not alone:
        return None
    wrong = sorted(rank for rank in alone if rank in missed)
    culprits = wrong or sorted(set(alone.values()))
    messages = [
        f"{message_text(waiting, rank)}, which waits in {ops_text({alone[rank]: waiting[alone[rank]]})}"
        + (f"; {message_text(waiting, missed[rank])}" if wrong else "")
        for rank in (wrong or list(alone))[:4]
    ]
    return diagnosis_of(
        Kind.P2P_UNMATCHED, culprits, waiting, waiting,
        f"{'The two ends of a message name other ranks than each other' if wrong else 'The other end is missing'}: "
        f"{'; '.join(messages)}.",
        f"Check the peer's rank in the call of {ranks_text(culprits)}."
        if wrong
        else "Find the call that should be the message's other end, or leave the message out.",
    )  # fmt: skip


def message_text(waiting: Mapping[int, Position], rank: int) -> str:
    """Return the sentence on a message that is waited for."""
    return f"rank {rank} waits in {waiting[rank].op} for rank {waiting[rank].peer}"


def other_members(waiting: Mapping[int, Position]) -> Diagnosis | None:
    """Return ranks that create another group than most."""
    members_of = {rank: position.members for rank, position in waiting.items() if position.members}
    if len(set(members_of.values())) < 2:
        return None
    culprits = majority(members_of).culprits
    return diagnosis_of(
        Kind.GROUP_CREATION_ORDER, culprits, waiting, waiting,
        f"The ranks are in new_group for different members: {_by_value(members_of)}.",
        "Every rank of the job calls new_group for the same groups in the same order, members or not.",
    )  # fmt: skip


def other_roots(waiting: Mapping[int, Position]) -> Diagnosis | None:
    """Return a collective of the whole job in which ranks pass different roots."""
    rooted = {
        rank: position for rank, position in waiting.items() if position.root is not None and not position.on_group
    }
    keys = Counter(position.key for position in rooted.values())
    key = max(keys, key=lambda one: keys[one], default=None)  # of several that of the lowest rank
    roots = {rank: position.root for rank, position in sorted(rooted.items()) if position.key == key}
    if len(set(roots.values())) < 2:
        return None
    vote = majority(roots)
    tie = " The group is split evenly: the culprit is chosen by rank order." if vote.tie else ""
    return diagnosis_of(
        Kind.ROOT_MISMATCH, vote.culprits, waiting, waiting,
        f"The ranks wait in {ops_text({rank: rooted[rank] for rank in roots})} with different roots: "
        f"{_by_value(roots)}.{tie}",
        "Give every rank the same root (src or dst is a rank of the whole job; group_src one of the group).",
    )  # fmt: skip


def _by_value(values: Mapping[int, Hashable]) -> str:
    """Return a text such as `ranks 0,1 [0, 1]; rank 2 [0, 2]`."""
    ranks_of = {value: [rank for rank in values if values[rank] == value] for value in values.values()}
    return "; ".join(f"{ranks_text(ranks)} {value}" for value, ranks in ranks_of.items())


def groups_cross(waiting: Mapping[int, Position]) -> Diagnosis | None:
    """Diagnose ranks that all wait at one line in calls with a group.

    The groups must differ, because the calls on one group would have completed.
    """
    if len(waiting) < 2 or not all(position.on_group and position.doing is Doing.CALL for position in waiting.values()):
        return None
    return diagnosis_of(
        Kind.DEADLOCK_CYCLE, sorted(waiting), waiting, waiting,
        f"{capital(listed(waiting))}, in calls on groups. Unless the network holds them, or their tensors differ, the "
        "groups differ: each rank waits in one whose other members wait in another.",
        "Use the groups in the same order on every rank.",
    )  # fmt: skip


def not_in_call(seen: Mapping[int, Position], waiting: Mapping[int, Position], host: Sequence[int]) -> Diagnosis:
    """Return the diagnosis of the ranks in no call, for which the others wait."""
    moving = [rank for rank in host if not seen[rank].idle]
    stuck = [rank for rank in host if rank not in moving]
    culprits = stuck or moving
    known = {**waiting, **{rank: seen[rank] for rank in culprits}}
    elsewhere = listed({rank: seen[rank] for rank in culprits})
    wait = f"{capital(ranks_text(waiting))} {are(waiting, 'waits', 'wait')} in {ops_text(waiting)}"
    more = f" {capital(ranks_text(moving))} {are(moving, 'runs', 'run')} on." if stuck and moving else ""
    ended = [rank for rank in stuck if seen[rank].doing is Doing.ENDING]
    if ended:
        return diagnosis_of(
            Kind.RANK_EXITED, ended, waiting, known, f"{wait}; {elsewhere}: no call of theirs will come.{more}",
            f"Let {ranks_text(ended)} make the calls that the others wait for before the program ends, or let all "
            "ranks end together.",
        )  # fmt: skip
    if all(position.op in JOINS for position in waiting.values()):
        still = f"did not move for {APART_S:g} s" if stuck else f"still {are(moving, 'runs', 'run')}"
        return diagnosis_of(
            Kind.NEVER_JOINED if stuck else Kind.STRAGGLER, culprits, waiting, known,
            f"{wait}; {elsewhere}, {are(culprits, 'has', 'have')} not come to it yet, and {still}.{more}",
            f"Look at what {ranks_text(culprits)} {are(culprits, 'does', 'do')} before {ops_text(waiting)}: an import, "
            "a download, a lock, a file system.",
        )  # fmt: skip
    if stuck:
        return diagnosis_of(
            Kind.HOST_STUCK, stuck, waiting, known,
            f"{wait}; {elsewhere}, outside of torch.distributed, and did not move for {APART_S:g} s.{more}",
            _look(seen, stuck),
        )  # fmt: skip
    return diagnosis_of(
        Kind.STRAGGLER, moving, waiting, known,
        f"{wait}; {elsewhere}, and still {are(moving, 'runs', 'run')}.",
        f"If {ranks_text(moving)} {are(moving, 'is', 'are')} at the same line in a minute, it is a loop that does not "
        "end; otherwise it is slower than the others, or has other work.",
    )  # fmt: skip


def _look(seen: Mapping[int, Position], stuck: Sequence[int]) -> str:
    """Return where to look for what ranks outside of calls wait for."""
    workers = [seen[rank] for rank in stuck if seen[rank].worker]
    if workers:
        at = site_text(workers[0].worker_stack[0], function=True)
        return (
            f"Look at what process {workers[0].worker}, a worker of rank {workers[0].rank}, waits for at {at}; give it "
            "a time limit (timeout= of the DataLoader raises instead of waiting)."
        )
    return (
        f"Look at what {ranks_text(stuck)} {are(stuck, 'waits', 'wait')} for on {are(stuck, 'its host', 'their hosts')}"
        ": a lock, a queue, a data loader, a file system, input."
    )


Turns = tuple[list[int], list[int], str]


def turns_of(seen: Mapping[int, Position]) -> Turns | None:
    """Return ranks whose loop is at another iteration than most, the majority, and the text about it."""
    shared: Counter[str] = Counter(key for position in seen.values() for key in position.counters)
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
        function, _, variable = key.rpartition(".")
        listed = ", ".join(f"{variable}={value} on {ranks_text(ranks)}" for value, ranks in sorted(by_value.items()))
        return others, sorted(by_value[usual]), f"in different iterations of the loop in {function}: {listed}"
    return None


def other_turn(seen: Mapping[int, Position], waiting: Mapping[int, Position], turns: Turns) -> Diagnosis:
    """Return the diagnosis of ranks in other iterations of a loop than most."""
    culprits, main, order_text = turns
    others = {rank: waiting[rank] for rank in main if rank in waiting}
    return diagnosis_of(
        Kind.UNEVEN_ITERATIONS, culprits, others, waiting,
        f"The ranks wait {order_text}. {capital(listed(waiting))}.",
        "Find why the numbers of iterations differ: batches of each rank's own data, a condition on a local value, an "
        "exception that was handled.",
    )  # fmt: skip


def meeting(waiting: Mapping[int, Position], world_size: int) -> Diagnosis | None:
    """Diagnose ranks that all wait for others to join."""
    if not waiting or any(position.doing is not Doing.MEETING for position in waiting.values()):
        return None
    missing = sorted(set(range(world_size)) - set(waiting))
    if not missing:
        return None
    return diagnosis_of(
        Kind.NEVER_JOINED, missing, waiting, waiting,
        f"{capital(ranks_text(waiting))} {are(waiting, 'waits', 'wait')} in {ops_text(waiting)} for a world of "
        f"{world_size} ranks; {ranks_text(missing)} {are(missing, 'is', 'are')} not on the hosts that were looked at.",
        "Check whether they run on another host, with the same MASTER_ADDR and MASTER_PORT (distsim attach there).",
    )  # fmt: skip


def all_on_host(seen: Mapping[int, Position]) -> Diagnosis:
    """Return the diagnosis of ranks none of which is in a collective."""
    return diagnosis_of(
        Kind.HOST_STUCK, sorted(seen), {}, seen,
        f"No rank is in a collective, none computes, and none moved for {APART_S:g} s: {listed(seen)}.",
        _look(seen, sorted(seen)),
    )  # fmt: skip


def diagnosis_of(
    kind: Kind,
    culprits: Sequence[int],
    victims: Mapping[int, Position],
    known: Mapping[int, Position],
    explanation: str,
    suggestion: str,
    cycle: tuple[int, ...] | None = None,
) -> Diagnosis:
    """Return a diagnosis with the sites and waits of the *known* ranks."""
    stacks = {rank: position.worker_stack or position.stack for rank, position in known.items()}
    sites: dict[int, Site] = {rank: stack[0] for rank, stack in stacks.items() if stack}
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
        explanation=explanation,
        suggestion=suggestion,
    )


def ops_text(positions: Mapping[int, Position]) -> str:
    """Return the calls of the positions, as words."""
    return " and ".join(dict.fromkeys(call_text(position) for position in positions.values()))


def call_text(position: Position) -> str:
    """Return the call of a position, with its line."""
    at = f" at {site_text(position.site)}" if position.site is not None else ""
    return f"{position.op}{at}"


def listed(positions: Mapping[int, Position]) -> str:
    """Return a text such as `ranks 0,1 wait in barrier at train.py:11; rank 2 is at data.py:7`."""
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, position in positions.items():
        groups[position.key].append(rank)
    parts = []
    for ranks in sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks)):
        position = positions[ranks[0]]
        if position.waits:
            parts.append(f"{ranks_text(ranks)} {are(ranks, 'waits', 'wait')} in {call_text(position)}")
        elif position.worker:
            at = site_text(position.worker_stack[0], function=True)
            parts.append(
                f"{ranks_text(ranks)} {are(ranks, 'waits', 'wait')} for process {position.worker}, a worker, at {at}"
            )
        else:
            doing = {Doing.ENDING: "has finished its program", Doing.STARTING: "imports modules"}.get(position.doing)
            operation = f"{position.op} " if position.op else ""
            site = position.site
            at = f"at {site_text(site, function=True)}" if site is not None else "outside of the program"
            parts.append(f"{ranks_text(ranks)} {doing or are(ranks, 'is', 'are') + ' ' + operation + at}")
    return "; ".join(parts)
