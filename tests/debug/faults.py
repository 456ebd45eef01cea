"""Planted faults of one group's collectives: little programs and the diagnosis each must get."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from distsim.debug.records.kinds import Kind
from tests.debug.builders import (
    FILE,
    Programs,
    Step,
    all_reduce,
    barrier,
    coll,
    group,
    run,
    wait_all,
)

NOW_AND_THEN = """\
import torch.distributed as dist
for step in range(10):
    dist.all_reduce(t)
    if rank == 1 and step == 2:
        dist.broadcast(t, 0)
"""
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
METRICS = """
def main():
    for step in range(9):
        all_reduce(grad)
        for name in metrics:
            all_reduce(metrics[name])
"""
EVERY_THIRD = """
def main():
    for step in range(start, 9):
        all_reduce(grad)
        if step % 3 == 2:
            all_gather(scores, score)
"""
LOOPS = """
def main():
    for batch in data:
        all_reduce(batch)
    barrier()
"""


GRAD, METRIC = all_reduce(4), all_reduce(6, shape=())
SCORES = coll("all_gather", 6, output_shapes=((4,),) * 4)
IN_JOIN = [all_reduce(3, shape=(1,)), all_reduce(3, shape=(18,))]


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

MISCALLED = {
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
    "one more round of an inner loop": Fault(
        4,
        odd([GRAD, METRIC, METRIC] * 3, [GRAD, METRIC, METRIC, GRAD, METRIC, METRIC, METRIC, GRAD]),
        Kind.UNEVEN_ITERATIONS,
        (1,),
        "all_reduce #7",
        3,
        REST,
        ("goes through a loop more often than the others", "train.py:6"),
        evidence={"sources": {FILE: METRICS}},
    ),
    "one round less of an inner loop": Fault(
        4,
        odd([GRAD, METRIC, METRIC] * 3, [GRAD, METRIC, METRIC, GRAD, METRIC, GRAD]),
        Kind.UNEVEN_ITERATIONS,
        (1,),
        "all_reduce #6",
        3,
        REST,
        ("has left a loop that the others are still in", "train.py:4"),
        evidence={"sources": {FILE: METRICS}},
    ),
    "a call under a condition, in a loop whose other call is made in every round": Fault(
        4,
        odd([GRAD, GRAD, GRAD, GRAD], [GRAD, GRAD, GRAD, SCORES]),
        Kind.EXTRA_COLLECTIVE,
        (1,),
        "all_gather #4",
        4,
        REST,
        evidence={"sources": {FILE: EVERY_THIRD}},
    ),
    "skipped a call, and the next ones happened to fit": Fault(
        4,
        odd(
            [*[all_reduce(5, shape=(1,)), all_reduce(6, shape=(18,)), all_reduce(8, shape=())] * 4],
            [*[all_reduce(5, shape=(1,)), all_reduce(6, shape=(18,)), all_reduce(8, shape=())] * 2, *IN_JOIN * 2],
        ),
        Kind.MISSING_RANK,
        (1,),
        "all_reduce #9",
        3,
        REST,
        ("train.py:8",),
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
    "one call more in a loop, under a condition": Fault(
        4,
        odd([all_reduce(3)] * 4, [*[all_reduce(3)] * 3, coll("broadcast", 5)]),
        Kind.EXTRA_COLLECTIVE,
        (1,),
        "broadcast #4",
        4,
        REST,
        ("train.py:5",),
        evidence={"sources": {FILE: NOW_AND_THEN}},
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
    "another thread's call, nothing after it": Fault(
        4,
        odd([all_reduce(10)], [all_reduce(20, shape=(5,), thread="metrics")]),
        Kind.THREAD_RACE,
        (1,),
        "all_reduce #1",
        4,
        REST,
        ("from several threads", "train.py:20"),
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
    "one expects more than it is sent": Fault(
        4,
        lambda r: [
            coll(
                "all_to_all_single",
                10,
                output_shapes=((5,),) if r == 2 else ((4,),),
                input_splits=(1, 1, 1, 1),
                output_splits=(2, 1, 1, 1) if r == 2 else (1, 1, 1, 1),
            )
        ],
        Kind.SPLITS_MISMATCH,
        (2,),
        "all_to_all_single #1",
        4,
        (0, 1, 3),
        ("Rank 2 expects 2 elements from rank 0", "rank 0 sends it 1 element"),
    ),
    "one sends more than is expected": Fault(
        4,
        lambda r: [
            coll(
                "all_to_all_single",
                10,
                shape=(5,) if r == 1 else (4,),
                output_shapes=((4,),),
                input_splits=(1, 1, 1, 2) if r == 1 else (1, 1, 1, 1),
                output_splits=(1, 1, 1, 1),
            )
        ],
        Kind.SPLITS_MISMATCH,
        (1,),
        "all_to_all_single #1",
        4,
        (0, 2, 3),
        ("Rank 1 sends 2 elements to rank 3", "rank 3 expects 1 element"),
    ),
    "two disagree in uneven splits": Fault(
        2,
        lambda r: [
            coll(
                "all_to_all_single",
                10,
                shape=(4,),
                output_shapes=((3,),) if r == 0 else ((7,),),
                input_splits=(1, 3) if r == 0 else (2, 2),
                output_splits=(1, 2) if r == 0 else (5, 2),
            )
        ],
        Kind.SPLITS_MISMATCH,
        (1,),
        "all_to_all_single #1",
        4,
        (0,),
        ("The records do not show which of the two is wrong.",),
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
}
