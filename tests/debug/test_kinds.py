"""Every kind of fault that records can show, played out on four ranks or so."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from distsim.debug.diagnosis import diagnose
from distsim.debug.kinds import Kind
from distsim.debug.records import Site
from tests.debug.builders import (
    FILE,
    Programs,
    Step,
    absent,
    all_reduce,
    barrier,
    coll,
    fail,
    frozen,
    group,
    host,
    killed,
    leave,
    play,
    recv,
    run,
    send,
    spin,
    store,
    wait_all,
)

SKIPS = """
def main():
    if rank != 1:
        all_reduce(a)
    barrier()
"""
ADDS = """
def main():
    if rank == 1:
        barrier()
    all_reduce(a)
"""
SWAPS = """
def main():
    if rank == 1:
        barrier()
        all_reduce(a)
    else:
        all_reduce(a)
        barrier()
"""
BRANCHES = """
def main():
    if rank == 1:
        all_gather_into_tensor(b, a)
    else:
        all_reduce(a)
"""
LOOPS = """
def main():
    for batch in data:
        all_reduce(batch)
    barrier()
"""


def odd(most: list[Step], one: list[Step], rank: int = 1) -> Programs:
    """Every rank runs *most*, but *rank* runs *one*."""
    return lambda r: one if r == rank else most


def new_group(line: int, *ranks: int) -> Step:
    return coll("new_group", line, new_ranks=ranks)


@dataclass
class Fault:
    size: int
    programs: Programs
    kind: Kind
    culprits: tuple[int, ...]
    call: str | None
    exit_code: int
    victims: tuple[int, ...] | None = None
    says: tuple[str, ...] = ()
    cycle: tuple[int, ...] | None = None
    pair: tuple[int, int] | None = None
    evidence: dict[str, Any] = field(default_factory=dict)


A, B = all_reduce(10, is_async=True), barrier(11, is_async=True)
TP, DP = group(0, 1, name="1", desc="tp"), group(0, 1, name="2", desc="dp")
GA, GB, GC = group(0, 1, name="1", desc="a"), group(1, 2, name="2", desc="b"), group(0, 2, name="3", desc="c")
SUB = group(0, 1, desc="sub")
REST = (0, 2, 3)
STEP = [all_reduce(10), barrier(11)]

FAULTS = {
    "skipped the last call and finished": Fault(
        4,
        odd(STEP, [all_reduce(10)]),
        Kind.MISSING_RANK,
        (1,),
        "barrier #2",
        3,
        REST,
        (
            "Rank 1 never called barrier #2 on group default_pg (ranks 0-3)",
            "has finished its program",
            "train.py:11",
        ),
    ),
    "skipped a call that looks like the next": Fault(
        4,
        odd([all_reduce(10), all_reduce(11), all_reduce(12)], [all_reduce(10), all_reduce(12)]),
        Kind.MISSING_RANK,
        (1,),
        "all_reduce #2",
        3,
        REST,
        ("train.py:11",),
    ),
    "skipped a call, by the text": Fault(
        4,
        odd([all_reduce(4), barrier(5)], [barrier(5)]),
        Kind.MISSING_RANK,
        (1,),
        "all_reduce #1",
        3,
        REST,
        ("never called all_reduce #1", "it is in barrier at train.py:5"),
        evidence={"sources": {FILE: SKIPS}},
    ),
    "skipped a call, by the loop's past": Fault(
        4,
        odd(STEP * 4, STEP * 2 + [barrier(11)] + STEP),
        Kind.MISSING_RANK,
        (1,),
        "all_reduce #5",
        3,
        REST,
    ),
    "skipped a call, seen in calls under way": Fault(
        4,
        odd([A, B, A, wait_all()], [B, A, wait_all()]),
        Kind.MISSING_RANK,
        (1,),
        "all_reduce #1",
        3,
        REST,
    ),
    "still runs elsewhere": Fault(
        4,
        odd(STEP, [all_reduce(10), run(88)]),
        Kind.MISSING_RANK,
        (1,),
        "barrier #2",
        3,
        REST,
        ("is at train.py:88",),
        evidence={"hang_after_s": 30.0, "now_s": 40.0},
    ),
    "one call more, by the text": Fault(
        4,
        odd([all_reduce(5)], [barrier(4), all_reduce(5)]),
        Kind.EXTRA_COLLECTIVE,
        (1,),
        "barrier #1",
        4,
        REST,
        evidence={"sources": {FILE: ADDS}},
    ),
    "one call more at the end": Fault(
        4,
        odd([all_reduce(10)], STEP),
        Kind.EXTRA_COLLECTIVE,
        (1,),
        "barrier #2",
        4,
        (),
    ),
    "one call more, seen in calls under way": Fault(
        4,
        odd([A, A, wait_all()], [B, A, A, wait_all()]),
        Kind.EXTRA_COLLECTIVE,
        (1,),
        "barrier #1",
        4,
        REST,
    ),
    "swapped, seen in calls under way": Fault(
        4,
        odd([A, B, wait_all()], [B, A, wait_all()]),
        Kind.WRONG_ORDER,
        (1,),
        "all_reduce #1",
        4,
        REST,
    ),
    "swapped, by the text": Fault(
        4,
        odd([all_reduce(7), barrier(8)], [barrier(4), all_reduce(5)]),
        Kind.WRONG_ORDER,
        (1,),
        "all_reduce #1",
        4,
        REST,
        evidence={"sources": {FILE: SWAPS}},
    ),
    "swapped calls that look alike": Fault(
        4,
        odd([all_reduce(10), all_reduce(11), barrier(12)], [all_reduce(11), all_reduce(10), barrier(12)]),
        Kind.WRONG_ORDER,
        (1,),
        "all_reduce #1",
        4,
        (),
        ("train.py:11",),
    ),
    "another operation": Fault(
        4,
        odd([all_reduce(6)], [coll("all_gather_into_tensor", 4)]),
        Kind.OP_MISMATCH,
        (1,),
        "all_reduce #1",
        4,
        REST,
        evidence={"sources": {FILE: BRANCHES}},
    ),
    "another operation, no text": Fault(
        4,
        odd([all_reduce(6)], [coll("all_gather_into_tensor", 4)]),
        Kind.OP_MISMATCH,
        (1,),
        "all_reduce #1",
        4,
    ),
    "another shape": Fault(
        4,
        odd([all_reduce(10)], [all_reduce(10, shape=(5,))]),
        Kind.SHAPE_MISMATCH,
        (1,),
        "all_reduce #1",
        4,
        REST,
        ("float32[5] where float32[4] is expected",),
    ),
    "another dtype": Fault(
        4,
        odd([all_reduce(10)], [all_reduce(10, dtypes=("float64",))]),
        Kind.DTYPE_MISMATCH,
        (1,),
        "all_reduce #1",
        4,
        REST,
        ("float64 where float32 is expected",),
    ),
    "another reduce op, nobody hangs": Fault(
        4,
        odd([all_reduce(10)] * 3, [all_reduce(10, reduce_op="MAX")] * 3),
        Kind.REDUCE_OP_MISMATCH,
        (1,),
        "all_reduce #1",
        4,
        (),
        ("MAX where SUM is expected",),
        evidence={"silent": True},
    ),
    "another root": Fault(
        4,
        odd([coll("broadcast", 10, root=0)], [coll("broadcast", 10, root=1)]),
        Kind.ROOT_MISMATCH,
        (1,),
        "broadcast #1",
        4,
        REST,
        ("root 1 where root 0 is expected",),
    ),
    "other splits": Fault(
        3,
        lambda r: [
            coll(
                "all_to_all_single",
                10,
                shape=(3,),
                output_shapes=((3,),),
                input_splits=(2, 0, 1) if r == 1 else (1, 1, 1),
                output_splits=(1, 1, 1),
            )
        ],
        Kind.SPLITS_MISMATCH,
        (1,),
        "all_to_all_single #1",
        4,
        (0, 2),
    ),
    "another group": Fault(
        4,
        odd([all_reduce(10)], [all_reduce(10, SUB)]),
        Kind.GROUP_MISMATCH,
        (1,),
        "all_reduce #1",
        4,
        REST,
        ("group sub (ranks 0,1)", "group default_pg (ranks 0-3)"),
    ),
    "groups made in another order": Fault(
        4,
        odd([new_group(5, 0, 1), new_group(6, 2, 3)], [new_group(6, 2, 3), new_group(5, 0, 1)]),
        Kind.GROUP_CREATION_ORDER,
        (1,),
        "new_group #1",
        4,
        REST,
    ),
    "group made by its members only": Fault(
        4,
        lambda r: [new_group(5, 0, 1), barrier(7)] if r < 2 else [barrier(7)],
        Kind.GROUP_CREATION_ORDER,
        (2, 3),
        "new_group #1",
        4,
        (0, 1),
    ),
    "group made by its members only, the others end": Fault(
        4,
        lambda r: [new_group(5, 0, 1)] if r < 2 else [],
        Kind.GROUP_CREATION_ORDER,
        (2, 3),
        "new_group #1",
        4,
        (0, 1),
    ),
    "raised": Fault(
        4,
        odd(STEP, [all_reduce(10), fail("ValueError: bad batch", 33)]),
        Kind.RANK_RAISED,
        (1,),
        "barrier #2",
        1,
        REST,
        ("ValueError: bad batch", "train.py:33", "Ranks 0,2,3 wait in barrier #2"),
    ),
    "left early": Fault(
        4,
        odd(STEP, [all_reduce(10), leave(3, 33)]),
        Kind.RANK_EXITED,
        (1,),
        "barrier #2",
        3,
        REST,
        ("exit code 3",),
    ),
    "killed": Fault(
        4,
        odd(STEP, [all_reduce(10), killed("SIGKILL")]),
        Kind.RANK_KILLED,
        (1,),
        "barrier #2",
        3,
        REST,
        ("SIGKILL",),
    ),
    "stopped": Fault(4, odd(STEP, [frozen(9)]), Kind.PROCESS_FROZEN, (1,), "all_reduce #1", 3, REST),
    "spins": Fault(4, odd(STEP, [spin(9)]), Kind.HOST_STUCK, (1,), "all_reduce #1", 3, REST, ("train.py:9",)),
    "waits for a lock": Fault(
        4,
        odd(STEP, [host("Lock.acquire()", 9)]),
        Kind.HOST_STUCK,
        (1,),
        "all_reduce #1",
        3,
        REST,
        ("Lock.acquire()",),
    ),
    "waits for a key nobody sets": Fault(
        4,
        odd(STEP, [store("ready", 9)]),
        Kind.MISSING_RANK,
        (1,),
        "all_reduce #1",
        3,
        REST,
        ("'ready'",),
    ),
    "never joined": Fault(
        4,
        odd([store("init/", 3, "rendezvous")], [absent()]),
        Kind.NEVER_JOINED,
        (1,),
        None,
        3,
        REST,
    ),
    "fewer iterations, then finished": Fault(
        4,
        odd([all_reduce(4)] * 5, [all_reduce(4)] * 3),
        Kind.UNEVEN_ITERATIONS,
        (1,),
        "all_reduce #4",
        3,
        REST,
        ("for the 4th time",),
    ),
    "fewer iterations, then out of the loop": Fault(
        4,
        odd([all_reduce(4)] * 5 + [barrier(5)], [all_reduce(4)] * 3 + [barrier(5)]),
        Kind.UNEVEN_ITERATIONS,
        (1,),
        "all_reduce #4",
        3,
        REST,
        evidence={"sources": {FILE: LOOPS}},
    ),
    "more iterations": Fault(
        4,
        odd([all_reduce(4)] * 3 + [barrier(5)], [all_reduce(4)] * 5 + [barrier(5)]),
        Kind.UNEVEN_ITERATIONS,
        (1,),
        "barrier #4",
        3,
        REST,
        evidence={"sources": {FILE: LOOPS}},
    ),
    "two groups in opposite order": Fault(
        2,
        odd([all_reduce(10, TP), all_reduce(11, DP)], [all_reduce(20, DP), all_reduce(21, TP)]),
        Kind.DEADLOCK_CYCLE,
        (0, 1),
        "all_reduce #1",
        3,
        (),
        ("group tp", "group dp"),
        cycle=(0, 1),
    ),
    "three groups in a circle": Fault(
        4,
        {
            0: [all_reduce(10, GA), all_reduce(11, GC), barrier(30)],
            1: [all_reduce(12, GB), all_reduce(13, GA), barrier(30)],
            2: [all_reduce(14, GC), all_reduce(15, GB), barrier(30)],
            3: [barrier(30)],
        },
        Kind.DEADLOCK_CYCLE,
        (0, 1, 2),
        "all_reduce #1",
        3,
        (3,),
        cycle=(0, 1, 2),
    ),
    "both send first": Fault(
        2,
        {0: [send(1, 10), recv(1, 11)], 1: [send(0, 10), recv(0, 11)]},
        Kind.DEADLOCK_CYCLE,
        (0, 1),
        "send #1",
        3,
        cycle=(0, 1),
    ),
    "a ring of receives": Fault(
        3,
        lambda r: [recv((r - 1) % 3, 10), send((r + 1) % 3, 11)],
        Kind.DEADLOCK_CYCLE,
        (0, 1, 2),
        "recv #1",
        3,
        cycle=(0, 2, 1),
    ),
    "crossed tags": Fault(
        2,
        {0: [send(1, 10, tag=5)], 1: [recv(0, 11, tag=7)]},
        Kind.P2P_UNMATCHED,
        (0, 1),
        "send #1",
        3,
        says=("tag 5", "tag 7", "Nothing recorded says"),
        pair=(0, 1),
    ),
    "crossed tags, one breaks its habit": Fault(
        2,
        {0: [send(1, 10, tag=7), send(1, 10, tag=5)], 1: [recv(0, 11, tag=7)] * 2},
        Kind.P2P_UNMATCHED,
        (0,),
        "recv #2",
        3,
        pair=(0, 1),
    ),
    "sent to the wrong rank": Fault(
        3,
        {0: [send(2, 10), barrier(12)], 1: [recv(0, 11), barrier(12)], 2: [barrier(12)]},
        Kind.P2P_UNMATCHED,
        (0,),
        "send #1",
        3,
        (1, 2),
        ("Rank 1 receives from rank 0",),
        pair=(0, 2),
    ),
    "never sent": Fault(
        4,
        odd([barrier(12)], [recv(0, 11), barrier(12)]),
        Kind.P2P_UNMATCHED,
        (0,),
        "recv #1",
        3,
        (1, 2, 3),
        ("Rank 0 never sent it: it waits in barrier #1",),
        pair=(0, 1),
        cycle=(0, 1),
    ),
    "the sender has finished": Fault(
        3,
        odd([], [recv(0, 11)]),
        Kind.P2P_UNMATCHED,
        (0,),
        "recv #1",
        3,
        (1,),
        ("has finished",),
        pair=(0, 1),
    ),
    "a message too few for any-source receives": Fault(
        3,
        {0: [recv(None, 10)] * 3, 1: [send(0, 11)], 2: [send(0, 11)]},
        Kind.P2P_UNMATCHED,
        (0,),
        "recv #3",
        3,
    ),
    "a message of another size": Fault(
        2,
        {0: [send(1, 10, shape=(4,))], 1: [recv(0, 11, shape=(8,))]},
        Kind.P2P_SIZE_MISMATCH,
        (0, 1),
        "recv #1",
        4,
        says=("sends float32[4]", "receives float32[8]"),
        pair=(0, 1),
    ),
    "a chain that ends in an exception": Fault(
        4,
        {
            0: [all_reduce(10)],
            1: [recv(2, 11), all_reduce(10)],
            2: [recv(3, 12), all_reduce(10)],
            3: [fail("KeyError: 'x'", 40)],
        },
        Kind.RANK_RAISED,
        (3,),
        "all_reduce #1",
        1,
        (0, 1, 2),
    ),
    "two threads on one group": Fault(
        2,
        {
            0: [
                all_reduce(10, is_async=True, thread="a"),
                all_reduce(20, shape=(8,), is_async=True, thread="b"),
                wait_all(),
            ],
            1: [
                all_reduce(20, shape=(8,), is_async=True, thread="b"),
                all_reduce(10, is_async=True, thread="a"),
                wait_all(),
            ],
        },
        Kind.THREAD_RACE,
        (1,),
        "all_reduce #1",
        4,
        (0,),
    ),
    "late, but running": Fault(
        4,
        odd(STEP, [all_reduce(10), run(88)]),
        Kind.STRAGGLER,
        (1,),
        "barrier #2",
        0,
        REST,
        ("still runs",),
        evidence={"straggler_after_s": 5.0, "now_s": 20.0},
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_named(name: str) -> None:
    """The first diagnosis names kind, culprits, call, exit code, and says where."""
    fault = FAULTS[name]
    found = diagnose(play(fault.size, fault.programs, **fault.evidence))
    assert [d.kind for d in found] == [fault.kind], [(d.kind, d.culprits, d.explanation) for d in found]
    (d,) = found
    assert d.culprits == fault.culprits
    assert (str(d.call) if d.call else None) == fault.call
    assert d.exit_code == fault.exit_code
    if fault.victims is not None:
        assert d.victims == fault.victims
    if fault.cycle is not None or fault.pair is not None:
        assert (d.cycle, d.pair) == (fault.cycle, fault.pair)
    for text in fault.says:
        assert text in d.explanation + d.suggestion
    assert d.suggestion
    assert d.detected_after_s is not None or d.kind is Kind.NEVER_JOINED
    assert set(d.stuck) <= {*d.culprits, *d.victims}


def test_exception_on_its_way_through_finally() -> None:
    """A rank that raised and then calls barrier in a finally block is told as the raiser."""
    evidence = play(4, odd([all_reduce(10)], [barrier(90)]))
    evidence.ranks[1].exception = "ValueError: boom"
    (d,) = diagnose(evidence)
    assert (d.kind, d.culprits, d.exit_code) == (Kind.RANK_RAISED, (1,), 1)
    assert "ValueError: boom" in d.explanation
    assert "train.py:90" in d.explanation


def test_site_of_culprit_is_given() -> None:
    """The culprit's own line is among the sites, not only the victims'."""
    (d,) = diagnose(play(4, odd(STEP, [all_reduce(10), fail("ValueError: x", 33)])))
    assert d.sites[1] == Site(FILE, 33, "main")
    assert d.sites[0] == Site(FILE, 11, "main")
