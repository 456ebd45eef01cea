"""Planted faults between groups, of messages and of ranks that are gone or elsewhere."""

from __future__ import annotations

from distsim.debug.records.kinds import Kind
from tests.debug.builders import (
    FILE,
    absent,
    all_reduce,
    barrier,
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
)
from tests.debug.faults import DP, GA, GB, GC, LOOPS, REST, STEP, SUB, TP, Fault, new_group, odd

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
LOOP_THEN_BARRIER = """\
for step in range(steps):
    dist.all_reduce(t, group=mine)
dist.barrier()
"""

STUCK = {
    "the other dimension of a mesh, once": Fault(
        4,
        lambda r: [
            *[all_reduce(2, SHARDS[r // 2])] * 2,
            all_reduce(2, REPLICATES[1] if r == 3 else SHARDS[r // 2]),
            barrier(3),
        ],
        Kind.GROUP_MISMATCH,
        (3,),
        "all_reduce #3",
        4,
        (0, 1, 2),
        ("group replicate (ranks 1,3)", "group shard (ranks 2,3)"),
    ),
    "a round of one dimension skipped": Fault(
        4,
        lambda r: [*[all_reduce(2, SHARDS[r // 2])] * (2 if r == 3 else 3), barrier(3)],
        Kind.UNEVEN_ITERATIONS,
        (3,),
        "all_reduce #3",
        3,
        (0, 1, 2),
        ("for the 3rd time on group shard (ranks 2,3)", "made it 2 times and waits in barrier"),
        evidence={"sources": {FILE: LOOP_THEN_BARRIER}},
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
    "world for the group, the others end": Fault(
        4,
        lambda r: {0: [all_reduce(3)], 1: [all_reduce(5, SUB)]}.get(r, []),
        Kind.GROUP_MISMATCH,
        (0,),
        "all_reduce #1",
        4,
        (1,),
        ("group sub (ranks 0,1)", "group default_pg (ranks 0-3)"),
        evidence={"sources": {FILE: ONE_OF_TWO_GROUPS}},
    ),
    "world before the group, the others end": Fault(
        4,
        lambda r: {0: [all_reduce(3), all_reduce(4, SUB)], 1: [all_reduce(6, SUB)]}.get(r, []),
        Kind.EXTRA_COLLECTIVE,
        (0,),
        "all_reduce #1",
        4,
        evidence={"sources": {FILE: WORLD_THEN_GROUP}},
    ),
    "send against a barrier": Fault(
        2,
        {0: [send(1, 3), barrier(4)], 1: [barrier(6), recv(0, 8)]},
        Kind.DEADLOCK_CYCLE,
        (0, 1),
        "send #1",
        3,
        (),
        cycle=(0, 1),
        evidence={"sources": {FILE: SEND_AGAINST_BARRIER}},
    ),
    "send that only another branch receives": Fault(
        2,
        {0: [send(1, 3)], 1: [barrier(6)]},
        Kind.P2P_UNMATCHED,
        (1,),
        "send #1",
        3,
        (0,),
        cycle=(0, 1),
        pair=(0, 1),
        evidence={"sources": {FILE: RECEIVED_IN_ANOTHER_BRANCH}},
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
    "fewer iterations, seen in calls under way": Fault(
        4,
        odd(
            [all_reduce(4, is_async=True)] * 5 + [barrier(5, is_async=True), wait_all()],
            [all_reduce(4, is_async=True)] * 3 + [barrier(5, is_async=True), wait_all()],
        ),
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
        "recv #1",
        3,
        says=("tag 5", "tag 7", "The records do not show which"),
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
        "recv #1",
        3,
        (1, 2),
        ("Rank 0 sends to rank 2",),
        pair=(0, 1),
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
