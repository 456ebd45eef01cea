"""Evidence as no healthy job leaves it: rings cut short, groups that name ranks beyond the world, gaps, repeats.

All of it can stand in a ring or a dump that is damaged or was written half; a diagnosis may say little of it,
but never fails on it. By seed, so that a failure can be looked at again.
"""

from __future__ import annotations

import random
from collections import Counter

from distsim.debug.records import (
    COLLECTIVES,
    P2P,
    CallRecord,
    CallWait,
    Evidence,
    Finding,
    Group,
    HostWait,
    Phase,
    RankState,
    Site,
    State,
    StoreWait,
    Wait,
)
from distsim.debug.records.kinds import Kind
from tests.debug import builders as b

__all__ = ["cut_short", "odd_evidence"]

OPS = [*sorted(COLLECTIVES | P2P), "?"]
TEXT = "if rank == 0:\n    f(a)\nelse:\n    f(b)\nfor i in x:\n    g()\n"


def odd_evidence(seed: int) -> Evidence:
    """Ranks, groups, calls and states drawn without any regard for each other."""
    draw = random.Random(seed)
    size = draw.choice([1, 2, 2, 3, 4, 8])
    groups = [
        b.world(size),
        b.group(*range(0, size, 2)),
        b.group(0, 1, name="two"),
        b.group(name="?"),
        b.group(size, size + 1, name="far"),
        b.group(*reversed(range(size)), name="reversed"),
    ]
    records = {rank: _calls(draw, rank, size, groups) for rank in range(size) if draw.random() < 0.85}
    states = {rank: _state(draw, rank, size, records.get(rank, [])) for rank in range(size) if draw.random() < 0.9}
    calls = [call for own in records.values() for call in own]
    findings = []
    if draw.random() < 0.3:
        ranks = tuple(draw.sample(range(size), draw.randint(0, size)))
        call = draw.choice(calls) if calls and draw.random() < 0.5 else None
        kind = draw.choice(list(Kind))
        findings.append(Finding(kind, ranks, "it was seen", call=call, guess=draw.random() < 0.2))
    return Evidence(
        size,
        states,
        records,
        now_s=draw.choice([0.0, 10.0]),
        findings=findings,
        sources={} if draw.random() < 0.5 else {"a.py": TEXT, "b.py": "((("},
        straggler_after_s=draw.choice([None, 1.0]),
        hang_after_s=draw.choice([None, 0.0, 5.0]),
        unrecorded=frozenset(draw.sample(range(size), draw.choice([0, 0, 1]))),
        members_guessed=draw.random() < 0.1,
        away_s=draw.choice([(), ((1.0, 2.0),)]),
    )


def _calls(draw: random.Random, rank: int, size: int, groups: list[Group]) -> list[CallRecord]:
    ops = draw.sample(OPS, 3)
    numbers: Counter[Group] = Counter()
    calls = []
    first = draw.choice([0, 0, 40])
    for index in range(draw.choice([0, 0, 1, 1, 2, 5, 9])):
        group = groups[0] if draw.random() < 0.7 else draw.choice(groups)
        numbers[group] += 1
        site = None if draw.random() < 0.2 else Site(draw.choice(["a.py", "b.py", "c.py"]), draw.choice([0, 1, 9]), "f")
        op = draw.choice(ops)
        calls.append(
            CallRecord(
                rank,
                group,
                numbers[group] if draw.random() < 0.95 else draw.choice([0, 1, 3, 100]),
                op,
                _shapes(draw, size),
                _shapes(draw, size),
                dtypes=draw.choice([(), ("float32",), ("int64", "?")]),
                reduce_op=draw.choice([None, "SUM", "MAX"]),
                root=draw.choice([None, 0, 1, size + 3]),
                peer=draw.choice([None, 0, 1, size + 2]),
                tag=draw.choice([None, 0, 1]),
                input_splits=draw.choice([None, (), (1,), (1,) * size]),
                output_splits=draw.choice([None, (2,), (1,) * size]),
                new_ranks=draw.choice([(), (0,), (0, 1), (size + 4,)]) if op == "new_group" else None,
                is_async=draw.random() < 0.5,
                waited=draw.random() < 0.5,
                site=site,
                stack=() if site is None or draw.random() < 0.5 else (site,),
                thread=draw.choice(["MainThread", "loader"]),
                issued_s=draw.choice([0.0, 1.0, 5.0]),
                completed_s=draw.choice([None, 2.0]),
                state=draw.choice(list(State)),
                error=draw.choice([None, "it broke"]),
                rejected=draw.random() < 0.05,
                index=first + index,
            )
        )
    return calls


def _shapes(draw: random.Random, size: int) -> tuple[tuple[int, ...], ...]:
    many = draw.choice([0, 1, 1, size])
    return tuple(tuple(draw.choice([0, 1, 2, 4]) for _ in range(draw.randint(0, 2))) for _ in range(many))


def _state(draw: random.Random, rank: int, size: int, calls: list[CallRecord]) -> RankState:
    waits: list[Wait] = []
    if calls and draw.random() < 0.4:
        waits.append(CallWait(draw.choice(calls)))
    if draw.random() < 0.1:
        waits.append(StoreWait(draw.choice([(), ("key",)]), draw.choice(["", "barrier"])))
    if draw.random() < 0.1:
        waits.append(HostWait("a lock", draw.choice([(), (0,), (size + 1,)])))
    return RankState(
        rank,
        draw.choice(list(Phase)) if draw.random() < 0.6 else Phase.BLOCKED,
        tuple(waits),
        draw.choice([None, Site("a.py", 3, "g")]),
        since_s=draw.choice([None, 0.0, 3.0]),
        exit_code=draw.choice([None, 0, 1, -9]),
        signal=draw.choice([None, "SIGKILL"]),
        exception=draw.choice([None, "ValueError: x", "RuntimeError: Connection closed by peer"]),
        over=draw.random() < 0.1,
        at_large=draw.random() < 0.1,
        leaving=draw.random() < 0.1,
        silent_s=draw.choice([None, 3.0]),
    )


def cut_short(seed: int) -> Evidence:
    """One program on all ranks, with calls left out, added or swapped on some; then the oldest records are lost."""
    draw = random.Random(seed)
    size = draw.choice([2, 2, 3, 4])
    part = b.group(0, 1, name="part")
    choices = [
        b.all_reduce(1),
        b.all_reduce(2),
        b.all_reduce(2, shape=(8,)),
        b.barrier(3),
        b.coll("broadcast", 4, root=0),
        b.coll("all_to_all_single", 5, input_splits=(2,) * size, output_splits=(2,) * size),
        b.coll("new_group", 6, new_ranks=(0, 1)),
        b.coll("destroy_process_group", 7),
        b.all_reduce(8, is_async=True),
        b.wait_all(9),
    ]
    common = [draw.choice(choices) for _ in range(draw.randint(0, 6))] * draw.choice([1, 2, 3])
    programs = {}
    for rank in range(size):
        own = list(common)
        for _ in range(draw.choice([0, 0, 1, 2])):
            at = draw.randint(0, len(own))
            how = draw.choice(["out", "in", "swap"])
            if how == "in":
                own.insert(at, draw.choice(choices))
            elif how == "out":
                del own[at : at + draw.choice([1, 3])]
            else:
                own[at : at + 2] = reversed(own[at : at + 2])
        if rank in part.ranks and draw.random() < 0.3:
            own.append(draw.choice([b.all_reduce(11, part), b.coll("destroy_process_group", 12, part)]))
        programs[rank] = [
            *own,
            draw.choice([b.finish(), b.run(20), b.killed(), b.spin(21), b.fail("ValueError: x", 22)]),
        ]
    evidence = b.play(size, programs, silent=draw.random() < 0.5, hang_after_s=draw.choice([None, 0.0]))
    evidence.records = {
        rank: list(calls)[draw.choice([0, 0, 0, 1, 2, len(calls)]) :]
        for rank, calls in evidence.records.items()
        if draw.random() < 0.9
    }
    if draw.random() < 0.2:
        evidence.ranks = {rank: state for rank, state in evidence.ranks.items() if draw.random() < 0.7}
    return evidence
