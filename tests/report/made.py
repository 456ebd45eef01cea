"""Outcomes made by hand: two ranks that finish, many ranks, two that raised."""

from __future__ import annotations

from typing import Any

from distsim.debug.records import CallRecord, Group, Phase, Site, State
from distsim.sim.outcome import CollectiveTotal, Failure, LinkUse, Outcome, RankSummary

__all__ = ["call", "finished", "raised", "summary"]

WORLD = Group("0", "default_pg", (0, 1))


def call(
    rank: int, op: str, seq: int, issued_s: float, started_s: float, completed_s: float, **more: Any
) -> CallRecord:
    """A completed call on a float32[1024] tensor, at line 12."""
    values: dict[str, Any] = {
        "group": WORLD,
        "input_shapes": ((1024,),),
        "output_shapes": ((1024,),),
        "dtypes": ("float32",),
        "reduce_op": "SUM" if "reduce" in op else None,
        "site": Site("train.py", 12, "step"),
        "state": State.COMPLETED,
        **more,
    }
    times = {"issued_s": issued_s, "started_s": started_s, "completed_s": completed_s}
    return CallRecord(rank=rank, op=op, seq=seq, **times, **values)


def summary(rank: int, **more: Any) -> RankSummary:
    """A rank that finished after 10 ms: 6 of compute, 3 of communication, 2 of them exposed."""
    values: dict[str, Any] = {
        "host": rank // 8,
        "device": f"n{rank // 8}/gpu{rank % 8}",
        "end_s": 0.010,
        "compute_s": 0.006,
        "communication_s": 0.003,
        "exposed_s": 0.002,
        "idle_s": 0.002,
        "exit_code": 0,
        "phase": Phase.FINISHED,
        **more,
    }
    return RankSummary(rank=rank, **values)


def outcome(num_ranks: int, **more: Any) -> Outcome:
    """A healthy run of train.py with one all_reduce."""
    values: dict[str, Any] = {
        "world_size": num_ranks,
        "cluster": "dgx-h100:1",
        "backend": "nccl",
        "seed": 7,
        "program": "train.py",
        "exit_code": 0,
        "virtual_time_s": 0.010,
        "wall_time_s": 1.25,
        "events": 12345,
        "results": [None] * num_ranks,
        "ranks": [summary(rank) for rank in range(num_ranks)],
        "records": {},
        "diagnoses": [],
        "failures": [],
        "collectives": [],
        "links": [],
        "link_samples": [],
        "compute": {},
        "notes": [],
        **more,
    }
    return Outcome(**values)


def finished() -> Outcome:
    """Two ranks, two collectives, a send and its receive; rank 1 comes late to the all_reduce."""
    records = {
        0: [
            call(0, "new_group", 1, 0.0, 0.0, 0.0001),
            call(0, "all_reduce", 2, 0.001, 0.003, 0.004),
            call(0, "send", 1, 0.005, 0.005, 0.006, peer=1, tag=3, reduce_op=None),
        ],
        1: [
            call(1, "new_group", 1, 0.0, 0.0, 0.0001),
            call(1, "all_reduce", 2, 0.003, 0.003, 0.004, is_async=True),
            call(1, "recv", 1, 0.0035, 0.005, 0.006, peer=0, tag=3, reduce_op=None),
        ],
    }
    totals = [
        CollectiveTotal(
            group="default_pg",
            op="all_reduce",
            dtype="float32",
            num_ranks=2,
            count=1,
            bytes=4096,
            time_s=0.001,
            algbw_bytes_per_s=4.096e6,
            busbw_bytes_per_s=4.096e6,
        ),
        CollectiveTotal(
            group="default_pg",
            op="barrier",
            dtype="",
            num_ranks=2,
            count=12_000,
            bytes=0,
            time_s=0.0002,
            algbw_bytes_per_s=0.0,
            busbw_bytes_per_s=0.0,
        ),
    ]
    links = [
        LinkUse(
            name=name,
            kind=kind,
            bandwidth_bytes_per_s=speed,
            bytes=moved,
            busy_s=0.001,
            mean_utilisation=mean,
            peak_utilisation=peak,
        )
        for name, kind, speed, moved, mean, peak in (
            ("n0/gpu0->n0/nvswitch0", "nvlink", 450e9, 4096, 0.42, 0.97),
            ("n0/gpu1->n0/nvswitch0", "nvlink", 450e9, 4096, 0.42, 0.97),
            ("n0/gpu0->n0/gpu0", "loopback", float("inf"), 0, 0.0, 0.0),
            ("n0/nic0->leaf0", "fabric", 50e9, 1 << 20, 0.93, 1.0),
        )
    ]
    return outcome(
        2,
        records=records,
        collectives=totals,
        links=links,
        link_samples=[(0.003, 0, 0.97), (0.004, 0, 0.0)],
        compute={0: [(0.0002, 0.001, "aten::mm")], 1: [(0.0002, 0.003, "aten::mm")]},
        notes=["DataLoader workers run in-process"],
    )


def raised() -> Outcome:
    """Four ranks; two raised alike (but for an address), one otherwise."""
    text = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    boom({0})\n'
    text += "ValueError: no {0}\n"
    return outcome(
        4,
        exit_code=1,
        failures=[
            Failure(
                ranks=(rank,),
                type="ValueError",
                message=f"no {what}",
                traceback=text.format(what),
            )
            for rank, what in ((3, "cat"), (0, "<dog 0x7f00aa11>"), (1, "<dog 0x7f00bb22>"))
        ],
        ranks=[summary(rank, exit_code=0 if rank == 2 else 1) for rank in range(4)],
    )
