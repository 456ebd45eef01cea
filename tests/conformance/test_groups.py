"""Row 3: groups, and what a rank that is no member is told."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conformance.arms import Conform
from conformance.plain import error_of, says


def total(group: Any) -> torch.Tensor:
    """The sum of 2 ** rank over the group: it tells the members."""
    t = torch.tensor([2.0 ** dist.get_rank()])
    dist.all_reduce(t, group=group)
    return t


def describe(group: Any) -> dict[str, Any]:
    if group is None:
        return {"group": None}
    return {
        "rank": dist.get_rank(group),
        "size": dist.get_world_size(group),
        "ranks": dist.get_process_group_ranks(group),
        "backend": dist.get_backend(group),
        "total": total(group),
    }


def new_group(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    everyone = dist.new_group()
    found["everyone"] = describe(everyone)
    pair = dist.new_group([2, 0])
    found["pair is NON_GROUP_MEMBER"] = pair is dist.GroupMember.NON_GROUP_MEMBER
    if rank in (0, 2):
        found["pair"] = describe(pair)
    given = dist.new_group(ranks=[1, 2, 3], timeout=timedelta(seconds=30), backend="gloo", group_desc="three")
    if rank != 0:
        assert given is not None
        found["given"] = describe(given)
        found["description"] = given.group_desc
    one = dist.new_group([3])
    if rank == 3:
        found["one"] = describe(one)
    unsorted = dist.new_group([3, 0, 2, 1])
    found["unsorted"] = describe(unsorted)
    found["count"] = dist.get_pg_count()
    return found


def non_member(rank: int, world_size: int) -> dict[str, Any]:
    group = dist.new_group([0, 1])
    return {
        "rank": dist.get_rank(group),
        "size": dist.get_world_size(group),
        "backend": says(dist.get_backend, group),
        "ranks": says(dist.get_process_group_ranks, group),
        "group rank": error_of(dist.get_group_rank, group, 0),
        "global rank": error_of(dist.get_global_rank, group, 0),
        "value": group if isinstance(group, int) else "a group",
    }


def translation(rank: int, world_size: int) -> dict[str, Any]:
    group = dist.new_group([1, 3])
    found: dict[str, Any] = {
        "world group rank": dist.get_group_rank(dist.group.WORLD, 2),
        "world global rank": dist.get_global_rank(dist.group.WORLD, 2),
        "world ranks": dist.get_process_group_ranks(dist.group.WORLD),
        "none": error_of(dist.get_process_group_ranks, None),
    }
    if rank in (1, 3):
        found["group rank"] = [dist.get_group_rank(group, r) for r in (1, 3)]
        found["global rank"] = [dist.get_global_rank(group, r) for r in (0, 1)]
        found["stranger"] = error_of(dist.get_group_rank, group, 0)
        found["beyond"] = error_of(dist.get_global_rank, group, 5)
    return found


def mistakes(rank: int, world_size: int) -> dict[str, Any]:
    return {
        "too many": says(dist.new_group, list(range(world_size + 1))),
        "beyond": error_of(dist.new_group, [0, world_size]),
        "negative": error_of(dist.new_group, [0, -1]),
        "unknown backend": error_of(dist.new_group, [0, 1, 2, 3], backend="nonsense"),
        "timeout is a number": error_of(dist.new_group, [0, 1, 2, 3], timeout=3),
        "device_id": error_of(dist.new_group, [0, 1, 2, 3], device_id="cuda:0"),
    }


def local_synchronization(rank: int, world_size: int) -> dict[str, Any]:
    """With use_local_synchronization only the members call new_group."""
    found: dict[str, Any] = {}
    ranks = [0, 1] if rank < 2 else [2, 3]
    group = dist.new_group(ranks, use_local_synchronization=True)
    found["mine"] = describe(group)
    if rank == 0:
        other = dist.new_group([2, 3], use_local_synchronization=True)
        found["not mine"] = other is dist.GroupMember.NON_GROUP_MEMBER
        found["why"] = type(other).__name__
    if rank != 1:
        three = dist.new_group([0, 2, 3], use_local_synchronization=True, group_desc="three")
        found["three"] = describe(three)
    return found


def subgroups(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    mine, groups = dist.new_subgroups(group_size=2)
    found["mine"] = describe(mine)
    found["number"] = len(groups)
    mine, groups = dist.new_subgroups(4, timeout=timedelta(seconds=30), group_desc="all")
    found["all"] = describe(mine)
    found["five"] = error_of(dist.new_subgroups, 5)
    found["three"] = error_of(dist.new_subgroups, 3)
    found["zero"] = error_of(dist.new_subgroups, 0)
    return found


def subgroups_by_enumeration(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    mine, groups = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    found["mine"] = describe(mine)
    found["number"] = len(groups)
    mine, groups = dist.new_subgroups_by_enumeration([[0, 3]])
    found["in none"] = describe(mine) if rank in (0, 3) else mine is None
    found["overlap"] = error_of(dist.new_subgroups_by_enumeration, [[0, 1], [1, 2]])
    found["nothing"] = error_of(dist.new_subgroups_by_enumeration, None)
    found["twice"] = error_of(dist.new_subgroups_by_enumeration, [[], []])
    return found


def split_group(rank: int, world_size: int) -> dict[str, Any]:
    """Up to torch 2.14 gloo has nothing that can be split; the refusal is torch's. From 2.15 on it splits, and a
    simulation refuses that by name (test_splitting_is_refused_by_name)."""
    questions = {"nothing": error_of(dist.split_group), "empty": error_of(dist.split_group, split_ranks=[])}
    if torch.__version__ >= (2, 15):
        return questions
    return questions | {
        "split": error_of(dist.split_group, split_ranks=[[0, 1], [2, 3]]),
        "twice": error_of(dist.split_group, split_ranks=[[0, 1], [1, 2]]),
    }


def destroy_one(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    group = dist.new_group([0, 1, 2])
    other = dist.new_group()
    found["destroy"] = says(dist.destroy_process_group, group)
    found["initialized"] = dist.is_initialized()
    if rank < 3:
        found["all_reduce"] = error_of(dist.all_reduce, torch.ones(1), group=group)
        found["rank"] = error_of(dist.get_rank, group)
        found["size"] = error_of(dist.get_world_size, group)
        found["ranks"] = error_of(dist.get_process_group_ranks, group)
        found["again"] = error_of(dist.destroy_process_group, group)
    found["other"] = describe(other)
    found["world"] = describe(dist.group.WORLD)
    dist.barrier()
    dist.destroy_process_group()
    found["all gone"] = dist.is_initialized()
    found["other gone"] = error_of(dist.all_reduce, torch.ones(1), group=other)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return found


BODIES = [
    new_group,
    non_member,
    translation,
    mistakes,
    local_synchronization,
    subgroups,
    subgroups_by_enumeration,
    split_group,
    destroy_one,
]


@pytest.mark.parametrize("body", BODIES)
def test_groups(conform: Conform, body: Any) -> None:
    """Groups of every kind, their questions, and the answers to a non-member are gloo's."""
    conform(body)
