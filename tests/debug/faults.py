"""Planted faults that no program of tests/cases can show, or not so small: little programs and the diagnosis of each.

`golden/whole.txt` has all that is said of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distsim.debug.records.kinds import Kind
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
    recv,
    run,
    send,
    spin,
    store,
    wait_all,
    world,
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
    kind: Kind
    culprits: tuple[int, ...]
    size: int
    programs: Programs
    evidence: dict[str, Any]


def fault(
    kind: Kind, programs: Programs, *, culprits: tuple[int, ...] = (1,), size: int = 4, text: str = "", **evidence: Any
) -> Fault:
    """What *programs* leave, and the diagnosis that they must get; *text* is that of their file."""
    return Fault(kind, culprits, size, programs, evidence | ({"sources": {FILE: text}} if text else {}))


A, B = all_reduce(10, is_async=True), barrier(11, is_async=True)
TP, DP = group(0, 1, name="1", desc="tp"), group(0, 1, name="2", desc="dp")
GA, GB, GC = group(0, 1, name="1", desc="a"), group(1, 2, name="2", desc="b"), group(0, 2, name="3", desc="c")
SUB = group(0, 1, desc="sub")
REST = (0, 2, 3)
STEP = [all_reduce(10), barrier(11)]

ONE_OF_TWO_GROUPS = """
if rank == 0:
    all_reduce(t)
elif rank == 1:
    all_reduce(t, group=sub)
"""
WORLD_THEN_GROUP = """
if rank == 0:
    all_reduce(t)
    all_reduce(t, group=sub)
elif rank == 1:
    all_reduce(t, group=sub)
"""
SEND_AGAINST_BARRIER = """
if rank == 0:
    send(t, 1)
    barrier()
else:
    barrier()
    if rank == 1:
        recv(t, 0)
"""
RECEIVED_IN_ANOTHER_BRANCH = """
if rank == 0:
    send(t, 1)
else:
    if rank == 1:
        barrier()
    else:
        recv(t, 0)
"""

SHARDS = (group(0, 1, name="3", desc="shard"), group(2, 3, name="4", desc="shard"))
REPLICATES = (group(0, 2, name="5", desc="replicate"), group(1, 3, name="6", desc="replicate"))
ON_CPU, ON_CPU_OF_TWO = world(4).beside("cpu"), world(2).beside("cpu")
LOOP_THEN_BARRIER = """\
for step in range(steps):
    dist.all_reduce(t, group=mine)
dist.barrier()
"""


MISCALLED = {
    "skipped the last call and finished": fault(Kind.MISSING_RANK, odd(STEP, [all_reduce(10)])),
    "skipped a call that looks like the next": fault(
        Kind.MISSING_RANK, odd([all_reduce(10), all_reduce(11), all_reduce(12)], [all_reduce(10), all_reduce(12)])
    ),
    "skipped a call, by the text": fault(Kind.MISSING_RANK, odd([all_reduce(4), barrier(5)], [barrier(5)]), text=SKIPS),
    "skipped a call, by the loop's past": fault(Kind.MISSING_RANK, odd(STEP * 4, STEP * 2 + [barrier(11)] + STEP)),
    "one more round of an inner loop": fault(
        Kind.UNEVEN_ITERATIONS,
        odd([GRAD, METRIC, METRIC] * 3, [GRAD, METRIC, METRIC, GRAD, METRIC, METRIC, METRIC, GRAD]),
        text=METRICS,
    ),
    "one round less of an inner loop": fault(
        Kind.UNEVEN_ITERATIONS,
        odd([GRAD, METRIC, METRIC] * 3, [GRAD, METRIC, METRIC, GRAD, METRIC, GRAD]),
        text=METRICS,
    ),
    "a call under a condition, in a loop whose other call is made in every round": fault(
        Kind.EXTRA_COLLECTIVE, odd([GRAD, GRAD, GRAD, GRAD], [GRAD, GRAD, GRAD, SCORES]), text=EVERY_THIRD
    ),
    "skipped a call, and the next ones happened to fit": fault(
        Kind.MISSING_RANK,
        odd(
            [*[all_reduce(5, shape=(1,)), all_reduce(6, shape=(18,)), all_reduce(8, shape=())] * 4],
            [*[all_reduce(5, shape=(1,)), all_reduce(6, shape=(18,)), all_reduce(8, shape=())] * 2, *IN_JOIN * 2],
        ),
    ),
    "skipped a call, seen in calls under way": fault(Kind.MISSING_RANK, odd([A, B, A, wait_all()], [B, A, wait_all()])),
    "still runs elsewhere": fault(
        Kind.MISSING_RANK, odd(STEP, [all_reduce(10), run(88)]), hang_after_s=30.0, now_s=40.0
    ),
    "one call more, by the text": fault(
        Kind.EXTRA_COLLECTIVE, odd([all_reduce(5)], [barrier(4), all_reduce(5)]), text=ADDS
    ),
    "one call more in a loop, under a condition": fault(
        Kind.EXTRA_COLLECTIVE, odd([all_reduce(3)] * 4, [*[all_reduce(3)] * 3, coll("broadcast", 5)]), text=NOW_AND_THEN
    ),
    "one call more at the end": fault(Kind.EXTRA_COLLECTIVE, odd([all_reduce(10)], STEP)),
    "one call more, seen in calls under way": fault(
        Kind.EXTRA_COLLECTIVE, odd([A, A, wait_all()], [B, A, A, wait_all()])
    ),
    "swapped, seen in calls under way": fault(Kind.WRONG_ORDER, odd([A, B, wait_all()], [B, A, wait_all()])),
    "swapped, by the text": fault(
        Kind.WRONG_ORDER, odd([all_reduce(7), barrier(8)], [barrier(4), all_reduce(5)]), text=SWAPS
    ),
    "swapped calls that look alike": fault(
        Kind.WRONG_ORDER,
        odd([all_reduce(10), all_reduce(11), barrier(12)], [all_reduce(11), all_reduce(10), barrier(12)]),
    ),
    "another operation": fault(
        Kind.OP_MISMATCH, odd([all_reduce(6)], [coll("all_gather_into_tensor", 4)]), text=BRANCHES
    ),
    "another operation, no text": fault(Kind.OP_MISMATCH, odd([all_reduce(6)], [coll("all_gather_into_tensor", 4)])),
    "another shape": fault(Kind.SHAPE_MISMATCH, odd([all_reduce(10)], [all_reduce(10, shape=(5,))])),
    "another thread's call, nothing after it": fault(
        Kind.THREAD_RACE, odd([all_reduce(10)], [all_reduce(20, shape=(5,), thread="metrics")])
    ),
    "another dtype": fault(Kind.DTYPE_MISMATCH, odd([all_reduce(10)], [all_reduce(10, dtypes=("float64",))])),
    "another reduce op, nobody hangs": fault(
        Kind.REDUCE_OP_MISMATCH, odd([all_reduce(10)] * 3, [all_reduce(10, reduce_op="MAX")] * 3), silent=True
    ),
    "another root": fault(Kind.ROOT_MISMATCH, odd([coll("broadcast", 10, root=0)], [coll("broadcast", 10, root=1)])),
    "one expects more than it is sent": fault(
        Kind.SPLITS_MISMATCH,
        lambda r: [
            coll(
                "all_to_all_single",
                10,
                output_shapes=((5,),) if r == 2 else ((4,),),
                input_splits=(1, 1, 1, 1),
                output_splits=(2, 1, 1, 1) if r == 2 else (1, 1, 1, 1),
            )
        ],
        culprits=(2,),
    ),
    "one sends more than is expected": fault(
        Kind.SPLITS_MISMATCH,
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
    ),
    "two disagree in uneven splits": fault(
        Kind.SPLITS_MISMATCH,
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
        size=2,
    ),
    "other splits": fault(
        Kind.SPLITS_MISMATCH,
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
        size=3,
    ),
}
"""Of one group's collectives."""

STUCK = {
    "the other dimension of a mesh, once": fault(
        Kind.GROUP_MISMATCH,
        lambda r: [
            *[all_reduce(2, SHARDS[r // 2])] * 2,
            all_reduce(2, REPLICATES[1] if r == 3 else SHARDS[r // 2]),
            barrier(3),
        ],
        culprits=(3,),
    ),
    "a round of one dimension skipped": fault(
        Kind.UNEVEN_ITERATIONS,
        lambda r: [*[all_reduce(2, SHARDS[r // 2])] * (2 if r == 3 else 3), barrier(3)],
        culprits=(3,),
        text=LOOP_THEN_BARRIER,
    ),
    "another group": fault(Kind.GROUP_MISMATCH, odd([all_reduce(10)], [all_reduce(10, SUB)])),
    "a tensor on the CPU, where the group has two backends": fault(
        Kind.DEVICE_MISMATCH,
        odd([all_reduce(9), all_reduce(10), barrier(11)], [all_reduce(9), all_reduce(10, ON_CPU), barrier(11)]),
    ),
    "a tensor on the GPU, where the others' are on the CPU": fault(
        Kind.DEVICE_MISMATCH, odd([all_reduce(10, ON_CPU)], [all_reduce(10)])
    ),
    "a tensor on the CPU of one of two": fault(
        Kind.DEVICE_MISMATCH, odd([all_reduce(10, ON_CPU_OF_TWO)], [all_reduce(10)]), culprits=(0,), size=2
    ),
    "a tensor on the CPU that meets the next call there": fault(
        Kind.DEVICE_MISMATCH,
        odd([all_reduce(10, is_async=True), barrier(11, ON_CPU)], [all_reduce(10, ON_CPU), barrier(11, ON_CPU)]),
    ),
    "world for the group, the others end": fault(
        Kind.GROUP_MISMATCH,
        lambda r: {0: [all_reduce(3)], 1: [all_reduce(5, SUB)]}.get(r, []),
        culprits=(0,),
        text=ONE_OF_TWO_GROUPS,
    ),
    "world before the group, the others end": fault(
        Kind.EXTRA_COLLECTIVE,
        lambda r: {0: [all_reduce(3), all_reduce(4, SUB)], 1: [all_reduce(6, SUB)]}.get(r, []),
        culprits=(0,),
        text=WORLD_THEN_GROUP,
    ),
    "send against a barrier": fault(
        Kind.DEADLOCK_CYCLE,
        {0: [send(1, 3), barrier(4)], 1: [barrier(6), recv(0, 8)]},
        culprits=(0, 1),
        size=2,
        text=SEND_AGAINST_BARRIER,
    ),
    "send that only another branch receives": fault(
        Kind.P2P_UNMATCHED, {0: [send(1, 3)], 1: [barrier(6)]}, size=2, text=RECEIVED_IN_ANOTHER_BRANCH
    ),
    "groups made in another order": fault(
        Kind.GROUP_CREATION_ORDER,
        odd([new_group(5, 0, 1), new_group(6, 2, 3)], [new_group(6, 2, 3), new_group(5, 0, 1)]),
    ),
    "group made by its members only": fault(
        Kind.GROUP_CREATION_ORDER,
        lambda r: [new_group(5, 0, 1), barrier(7)] if r < 2 else [barrier(7)],
        culprits=(2, 3),
    ),
    "group made by its members only, the others end": fault(
        Kind.GROUP_CREATION_ORDER, lambda r: [new_group(5, 0, 1)] if r < 2 else [], culprits=(2, 3)
    ),
    "raised": fault(Kind.RANK_RAISED, odd(STEP, [all_reduce(10), fail("ValueError: bad batch", 33)])),
    "left early": fault(Kind.RANK_EXITED, odd(STEP, [all_reduce(10), leave(3, 33)])),
    "killed": fault(Kind.RANK_KILLED, odd(STEP, [all_reduce(10), killed("SIGKILL")])),
    "stopped": fault(Kind.PROCESS_FROZEN, odd(STEP, [frozen(9)])),
    "spins": fault(Kind.HOST_STUCK, odd(STEP, [spin(9)])),
    "waits for a lock": fault(Kind.HOST_STUCK, odd(STEP, [host("Lock.acquire()", 9)])),
    "waits for a key nobody sets": fault(Kind.MISSING_RANK, odd(STEP, [store("ready", 9)])),
    "never joined": fault(Kind.NEVER_JOINED, odd([store("init/", 3, "rendezvous")], [absent()])),
    "fewer iterations, then finished": fault(Kind.UNEVEN_ITERATIONS, odd([all_reduce(4)] * 5, [all_reduce(4)] * 3)),
    "fewer iterations, then out of the loop": fault(
        Kind.UNEVEN_ITERATIONS, odd([all_reduce(4)] * 5 + [barrier(5)], [all_reduce(4)] * 3 + [barrier(5)]), text=LOOPS
    ),
    "fewer iterations, seen in calls under way": fault(
        Kind.UNEVEN_ITERATIONS,
        odd(
            [all_reduce(4, is_async=True)] * 5 + [barrier(5, is_async=True), wait_all()],
            [all_reduce(4, is_async=True)] * 3 + [barrier(5, is_async=True), wait_all()],
        ),
        text=LOOPS,
    ),
    "more iterations": fault(
        Kind.UNEVEN_ITERATIONS, odd([all_reduce(4)] * 3 + [barrier(5)], [all_reduce(4)] * 5 + [barrier(5)]), text=LOOPS
    ),
    "two groups in opposite order": fault(
        Kind.DEADLOCK_CYCLE,
        odd([all_reduce(10, TP), all_reduce(11, DP)], [all_reduce(20, DP), all_reduce(21, TP)]),
        culprits=(0, 1),
        size=2,
    ),
    "three groups in a circle": fault(
        Kind.DEADLOCK_CYCLE,
        {
            0: [all_reduce(10, GA), all_reduce(11, GC), barrier(30)],
            1: [all_reduce(12, GB), all_reduce(13, GA), barrier(30)],
            2: [all_reduce(14, GC), all_reduce(15, GB), barrier(30)],
            3: [barrier(30)],
        },
        culprits=(0, 1, 2),
    ),
    "both send first": fault(
        Kind.DEADLOCK_CYCLE, {0: [send(1, 10), recv(1, 11)], 1: [send(0, 10), recv(0, 11)]}, culprits=(0, 1), size=2
    ),
    "a ring of receives": fault(
        Kind.DEADLOCK_CYCLE, lambda r: [recv((r - 1) % 3, 10), send((r + 1) % 3, 11)], culprits=(0, 1, 2), size=3
    ),
    "crossed tags": fault(
        Kind.P2P_UNMATCHED, {0: [send(1, 10, tag=5)], 1: [recv(0, 11, tag=7)]}, culprits=(0, 1), size=2
    ),
    "crossed tags, one breaks its habit": fault(
        Kind.P2P_UNMATCHED,
        {0: [send(1, 10, tag=7), send(1, 10, tag=5)], 1: [recv(0, 11, tag=7)] * 2},
        culprits=(0,),
        size=2,
    ),
    "sent to the wrong rank": fault(
        Kind.P2P_UNMATCHED,
        {0: [send(2, 10), barrier(12)], 1: [recv(0, 11), barrier(12)], 2: [barrier(12)]},
        culprits=(0,),
        size=3,
    ),
    "never sent": fault(Kind.P2P_UNMATCHED, odd([barrier(12)], [recv(0, 11), barrier(12)]), culprits=(0,)),
    "the sender has finished": fault(Kind.P2P_UNMATCHED, odd([], [recv(0, 11)]), culprits=(0,), size=3),
    "a message too few for any-source receives": fault(
        Kind.P2P_UNMATCHED, {0: [recv(None, 10)] * 3, 1: [send(0, 11)], 2: [send(0, 11)]}, culprits=(0,), size=3
    ),
    "a message of another size": fault(
        Kind.P2P_SIZE_MISMATCH, {0: [send(1, 10, shape=(4,))], 1: [recv(0, 11, shape=(8,))]}, culprits=(0, 1), size=2
    ),
    "a chain that ends in an exception": fault(
        Kind.RANK_RAISED,
        {
            0: [all_reduce(10)],
            1: [recv(2, 11), all_reduce(10)],
            2: [recv(3, 12), all_reduce(10)],
            3: [fail("KeyError: 'x'", 40)],
        },
        culprits=(3,),
    ),
    "two threads on one group": fault(
        Kind.THREAD_RACE,
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
        size=2,
    ),
    "late, but running": fault(Kind.STRAGGLER, odd(STEP, [all_reduce(10), run(88)]), straggler_after_s=5.0, now_s=20.0),
}
"""Between groups, of messages, and of ranks that are gone or elsewhere."""
FAULTS = MISCALLED | STUCK
