"""Row 5: point to point, beyond what `test_torchs_own` has."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conformance.arms import Conform
from conformance.plain import ALL_DTYPES, error_of, says


def dtypes(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for dtype in ALL_DTYPES:
        t = torch.tensor([1, 0, 1, 1]).to(dtype) if rank == 0 else torch.zeros(4).to(dtype)
        if rank == 0:
            dist.send(t, 3)
        if rank == 3:
            dist.recv(t, 0)
        found[str(dtype)] = t
    return found


def layouts(rank: int, world_size: int) -> dict[str, Any]:
    """Views, several dimensions, one element, no element."""
    found: dict[str, Any] = {}
    base = torch.arange(12.0).reshape(3, 4) * (rank + 1)
    if rank == 0:
        dist.send(base[1], 1)
        dist.send(base, 1)
        dist.send(torch.tensor(7.5), 1)
        dist.send(torch.empty(0), 1)
        dist.send(base[1:, :], 1)
        dist.send(base.clone(memory_format=torch.contiguous_format).view(4, 3), 1)
        found["send of columns"] = error_of(dist.send, base.t(), 1)
    if rank == 1:
        row, scalar, nothing, part = torch.zeros(4), torch.tensor(0.0), torch.empty(0), torch.zeros(2, 4)
        dist.recv(row, 0)
        dist.recv(base, 0)
        found["scalar returns"] = dist.recv(scalar, 0)
        found["nothing returns"] = dist.recv(nothing, 0)
        dist.recv(part, 0)
        flat = torch.zeros(12)
        dist.recv(flat, 0)
        found |= {"row": row, "base": base, "scalar": scalar, "nothing": nothing, "part": part, "flat": flat}
        found["recv into columns"] = error_of(dist.recv, base.t(), 0)
    return found


def in_groups(rank: int, world_size: int) -> dict[str, Any]:
    """Peers by global rank, and by rank in the group."""
    found: dict[str, Any] = {}
    odd = dist.new_group([3, 1])
    if rank in (1, 3):
        t = torch.zeros(1)
        if rank == 3:
            dist.send(torch.tensor([31.0]), 1, group=odd)
            dist.send(torch.tensor([32.0]), group=odd, group_dst=0)
            found["both"] = error_of(dist.send, t, 1, group=odd, group_dst=0)
            found["neither"] = error_of(dist.send, t, group=odd)
            found["stranger"] = error_of(dist.send, t, 0, group=odd)
        else:
            found["from"] = dist.recv(t, 3, group=odd)
            found["first"] = t.clone()
            found["group_src"] = dist.recv(t, group=odd, group_src=1)
            found["second"] = t.clone()
            found["both"] = error_of(dist.recv, t, 3, group=odd, group_src=1)
        # Any source in a group answers with the global rank.
        if rank == 1:
            dist.send(torch.tensor([13.0]), 3, group=odd)
        else:
            found["any"] = dist.recv(t, group=odd)
            found["third"] = t.clone()
        dist.barrier(odd)
    else:
        t = torch.ones(1)
        found["send of a stranger"] = says(dist.send, t, 1, group=odd)
        found["recv of a stranger"] = dist.recv(t, 1, group=odd)
        found["isend of a stranger"] = dist.isend(t, 1, group=odd)
        found["irecv of a stranger"] = dist.irecv(t, 1, group=odd)
        found["t"] = t
    # The same two ranks speak in two groups; a message stays in its group.
    if rank == 1:
        a = dist.isend(torch.tensor([100.0]), 3)
        b = dist.isend(torch.tensor([200.0]), 3, group=odd)
        assert a is not None
        assert b is not None
        a.wait()
        b.wait()
    if rank == 3:
        t = torch.zeros(1)
        dist.recv(t, 1, group=odd)
        found["by group"] = t.clone()
        dist.recv(t, 1)
        found["by world"] = t.clone()
    return found


def mistakes(rank: int, world_size: int) -> dict[str, Any]:
    t = torch.zeros(2)
    return {
        "send to self": says(dist.send, t, rank),
        "isend to self": error_of(dist.isend, t, rank),
        "send of a list": error_of(dist.send, [t], (rank + 1) % world_size),
        "recv of a number": error_of(dist.recv, 3, (rank + 1) % world_size),
        "isend of a string": error_of(dist.isend, "x", (rank + 1) % world_size),
        "negative tag": error_of(dist.send, t, (rank + 1) % world_size, None, -5),
        "sparse": error_of(dist.send, torch.eye(2).to_sparse(), (rank + 1) % world_size),
    }


def objects(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    sent = [{"a": [1, 2]}, "text", None, (3.5, b"bytes"), list(range(50))]
    if rank == 0:
        found["send returns"] = dist.send_object_list(sent, dst=1)
        dist.send_object_list(["to two"], 2)
        dist.send_object_list([1, 2], group=dist.group.WORLD, group_dst=3)
    elif rank == 1:
        heard: list[Any] = [None] * 5
        found["from"] = dist.recv_object_list(heard, src=0)
        found["heard"] = heard
        found["tuple stays"] = isinstance(heard[3], tuple)
    elif rank == 2:
        heard = [None]
        found["from anyone"] = says(dist.recv_object_list, heard)
        dist.recv_object_list(heard, src=0)
        found["heard"] = heard
    else:
        heard = [None, None]
        found["group_src"] = dist.recv_object_list(heard, group_src=0)
        found["heard"] = heard
    return found


def batch(rank: int, world_size: int) -> dict[str, Any]:
    """Both neighbours at once, by rank in the group, with tags; and what is no batch."""
    ahead, back = (rank + 1) % world_size, (rank - 1) % world_size
    left, right, world = torch.zeros(1), torch.zeros(1), dist.group.WORLD
    ops = [
        dist.P2POp(dist.irecv, left, group=world, group_peer=back, tag=1),
        dist.P2POp(dist.irecv, right, ahead, tag=2),
        dist.P2POp(dist.isend, torch.tensor([rank + 0.25]), ahead, tag=1),
        dist.P2POp(dist.isend, torch.tensor([rank + 0.5]), back, tag=2),
    ]
    works = dist.batch_isend_irecv(ops)
    found: dict[str, Any] = {"works": len(works), "heard": [left, right] if [work.wait() for work in works] else []}
    found["op"] = [ops[0].peer, ops[0].tag, ops[0].group_peer, ops[0].op is dist.irecv]
    found["refused"] = [says(dist.batch_isend_irecv, wrong) for wrong in ([], [1])]
    found["not a list"] = error_of(dist.batch_isend_irecv, ops[0])
    found["bad op"] = says(dist.P2POp, dist.all_reduce, left, ahead)
    found["no peer"] = error_of(dist.P2POp, dist.isend, left)
    two = [dist.P2POp(dist.isend, left, 0, group=group) for group in (None, dist.new_group())]
    found["two groups"] = error_of(dist.batch_isend_irecv, two) if rank == 1 else "not asked"
    return found


def timeout(rank: int, world_size: int) -> dict[str, Any]:
    """A receive nobody sends to ends with what gloo raises."""
    found: dict[str, Any] = {}
    group = dist.new_group([0, 1], timeout=timedelta(milliseconds=300))
    if rank == 0:
        found["recv"] = error_of(dist.recv, torch.zeros(1), 1, group=group)
    dist.barrier()
    return found or {"bystander": rank}


def wait_with_timeout(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {"rank": rank}
    group = dist.new_group([0, 1])
    if rank == 0:
        work = dist.irecv(torch.zeros(1), 1, group=group)
        assert work is not None
        found["early"] = work.is_completed()
        found["wait"] = error_of(work.wait, timedelta(milliseconds=200))
    dist.barrier()
    return found


def waited_twice(rank: int, world_size: int) -> dict[str, Any]:
    """A message ends in its first wait(), only there, and a second one waits for ever."""
    found: dict[str, Any] = {"rank": rank}
    group = dist.new_group([0, 1])
    t = torch.full((2,), float(rank))
    work = None
    if rank < 2:
        work = dist.isend(t, 1, group=group) if rank == 0 else dist.irecv(t, 0, group=group)
    dist.barrier()
    if work is not None:
        found["polled"] = [work.is_completed() for _ in range(3)]
        found["wait"] = work.wait()
        found["completed"] = work.is_completed()
        found["t"] = t
        found["again"] = error_of(work.wait, timedelta(milliseconds=200))
    dist.barrier()
    return found


def send_waits_for_recv(rank: int, world_size: int, count: int) -> dict[str, Any]:
    """gloo's send is a rendezvous, whatever the size: it is over when the other end takes the bytes."""
    found: dict[str, Any] = {}
    group = dist.new_group(timeout=timedelta(milliseconds=500))
    if rank == 0:
        work = dist.isend(torch.zeros(count), 1)
        assert work is not None
        dist.barrier()
        found["before the recv"] = work.is_completed()
        dist.barrier()
        found["wait"] = work.wait()
    else:
        dist.barrier()
        dist.barrier()
        if rank == 1:
            dist.recv(torch.zeros(count), 0)
    if rank in (2, 3):
        found["both send first"] = error_of(dist.send, torch.zeros(count), 5 - rank, group=group)
    else:
        found["rank"] = rank
    dist.barrier()
    return found


BODIES = [
    dtypes,
    layouts,
    in_groups,
    mistakes,
    objects,
    batch,
    timeout,
    wait_with_timeout,
    waited_twice,
]


@pytest.mark.parametrize("body", BODIES)
def test_point_to_point(conform: Conform, body: Any) -> None:
    """Send and receive in all their forms answer what gloo answers."""
    conform(body)


@pytest.mark.parametrize("count", [1, 300_000])
def test_send_waits(conform: Conform, count: int) -> None:
    """A send waits for its receive, and two ranks that send first wait for each other."""
    conform(send_waits_for_recv, count)
