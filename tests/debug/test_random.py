"""Random programs: legal ones are never alarming, one planted fault names the rank it was planted on."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from distsim.debug.diagnosis.diagnose import diagnose
from distsim.debug.records import Group
from distsim.debug.records.kinds import Kind
from tests.debug.builders import (
    Step,
    all_reduce,
    barrier,
    coll,
    fail,
    group,
    killed,
    leave,
    play,
    recv,
    send,
    wait_all,
)

SKIP = {
    Kind.MISSING_RANK,
    Kind.OP_MISMATCH,
    Kind.SHAPE_MISMATCH,
    Kind.DEADLOCK_CYCLE,
    Kind.UNEVEN_ITERATIONS,
    Kind.WRONG_ORDER,
}
ADD = {
    Kind.EXTRA_COLLECTIVE,
    Kind.OP_MISMATCH,
    Kind.SHAPE_MISMATCH,
    Kind.DEADLOCK_CYCLE,
    Kind.UNEVEN_ITERATIONS,
}
EXPECTED = {
    "skip": SKIP,
    "add": ADD,
    "shape": {Kind.SHAPE_MISMATCH},
    "dtype": {Kind.DTYPE_MISMATCH},
    "raise": {Kind.RANK_RAISED},
    "exit": {Kind.RANK_EXITED},
    "kill": {Kind.RANK_KILLED},
}


def groups_of(size: int, rng: random.Random) -> list[list[Group]]:
    """Routes to cut the world into groups; each rank is in one group of each."""
    half = size // 2
    ways = [[group(*range(size), name="0", desc="default_pg")]]
    low, high, even, odd = range(half), range(half, size), range(0, size, 2), range(1, size, 2)
    ways.append([group(*low, name="1", desc="low"), group(*high, name="2", desc="high")])
    ways.append([group(*even, name="3", desc="even"), group(*odd, name="4", desc="odd")])
    rng.shuffle(ways)
    return ways


def program(size: int, rng: random.Random) -> dict[int, list[Step]]:
    """A random legal program: loops over collectives on groups, rings of messages, calls under way."""
    ways = groups_of(size, rng)
    steps: dict[int, list[Step]] = {r: [] for r in range(size)}
    line = 10
    for _ in range(rng.randint(1, 3)):
        body: dict[int, list[Step]] = {r: [] for r in range(size)}
        for _ in range(rng.randint(1, 4)):
            line += 1
            what = rng.choice(["all_reduce", "all_reduce", "barrier", "broadcast", "ring", "async", "branch"])
            cut, shape = rng.choice(ways), (rng.randint(1, 3),)
            for rank in range(size):
                own = next(g for g in cut if rank in g.ranks)
                add = body[rank].append
                if what == "all_reduce":
                    add(all_reduce(line, own, shape=shape))
                elif what == "branch":
                    add(all_reduce(line + (100 if rank == own.ranks[0] else 0), own, shape=shape))
                elif what == "barrier":
                    add(barrier(line, own))
                elif what == "broadcast":
                    add(coll("broadcast", line, own, root=own.ranks[-1], shape=shape))
                elif what == "async":
                    add(all_reduce(line, own, shape=shape, is_async=True))
                else:
                    add(send((rank + 1) % size, line, is_async=True))
                    add(recv((rank - 1) % size, line, is_async=True))
                    add(wait_all())
        for _ in range(rng.randint(1, 3)):
            for rank in range(size):
                steps[rank].extend(body[rank])
                steps[rank].append(wait_all())
    for rank in range(size):
        steps[rank].append(barrier(99))
    return steps


def plant(steps: list[Step], fault: str, rng: random.Random) -> None:
    """Put one fault at a random collective of one rank's program."""
    at = rng.choice([i for i, s in enumerate(steps) if s.op in ("all_reduce", "barrier", "broadcast")])
    step = steps[at]
    match fault:
        case "skip":
            del steps[at]
        case "add":
            steps.insert(at, coll("reduce", 55, root=0))
        case "raise":
            steps[at:] = [fail("ValueError: planted", 55)]
        case "exit":
            steps[at:] = [leave(3, 55)]
        case "kill":
            steps[at:] = [killed()]
        case _:
            changed = {"input_shapes": ((17,),)} if fault == "shape" else {"dtypes": ("int8",)}
            while step.op == "barrier":
                at = (at + 1) % len(steps)
                if not any(s.op in ("all_reduce", "broadcast") for s in steps):
                    return
                step = steps[at] if steps[at].op in ("all_reduce", "broadcast") else step
            steps[at] = replace(step, kwargs={**step.kwargs, **changed})


@pytest.mark.parametrize("seed", range(60))
def test_legal_random_program(seed: int) -> None:
    """Nothing legal raises an alarm, finished or stopped at any moment."""
    rng = random.Random(seed)
    size = rng.randint(4, 7)
    found = diagnose(play(size, program(size, rng)))
    assert found == [], [(d.kind, d.culprits, d.explanation) for d in found]


@pytest.mark.parametrize("fault", EXPECTED)
@pytest.mark.parametrize("seed", range(20))
def test_planted_fault(fault: str, seed: int) -> None:
    """The rank with the planted fault is the culprit of the first diagnosis."""
    rng = random.Random(1000 + seed)
    size = rng.randint(5, 8)
    steps = program(size, rng)
    culprit = rng.randrange(size)
    plant(steps[culprit], fault, rng)
    found = diagnose(play(size, steps))
    if fault in ("shape", "dtype") and not found:
        return  # nothing to plant it on
    assert found, "the fault went unseen"
    first = found[0]
    assert first.kind in EXPECTED[fault], [(d.kind, d.culprits, d.explanation) for d in found]
    assert culprit in first.culprits, [(d.kind, d.culprits, d.explanation) for d in found]
