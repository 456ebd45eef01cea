"""Calls that every rank of a parent group must make, made by half of the ranks: each entry of the register is told."""

from __future__ import annotations

import ast
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import nn
from torch.distributed import config
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.pipelining import PipelineStage

import distsim
from distsim.debug.records.kinds import Kind
from distsim.debug.records.obligations import OBLIGATIONS
from distsim.errors import RankFailure

MESH = ("a", "b", "c")


def fully_sharded() -> None:
    model = nn.Sequential(nn.Linear(4, 4)).cuda()
    hybrid, each = ShardingStrategy.HYBRID_SHARD, ModuleWrapPolicy({nn.Linear})
    FullyShardedDataParallel(model, sharding_strategy=hybrid, auto_wrap_policy=each)


def pipeline_stage() -> None:
    with config.patch(pipeline_per_direction_p2p=True):
        PipelineStage(nn.Linear(4, 4).cuda(), dist.get_rank(), 4, torch.device("cuda"))


CALLS: dict[str, Callable[..., Any]] = {
    "new_group": lambda: dist.new_group([0, 1]),
    "new_subgroups": lambda: dist.new_subgroups(2),
    "new_subgroups_by_enumeration": lambda: dist.new_subgroups_by_enumeration([[0, 1], [2, 3]]),
    "split_group": lambda: dist.split_group(split_ranks=[[0, 1], [2, 3]]),
    "init_device_mesh": lambda: init_device_mesh("cuda", (2, 2)),
    "DeviceMesh": lambda: DeviceMesh("cuda", [[0, 1], [2, 3]]),
    "_flatten": lambda mesh: mesh["b", "c"]._flatten("bc"),
    "_unflatten": lambda mesh: mesh["a"]._unflatten(0, (2, 1), ("x", "y")),
    "FullyShardedDataParallel": fully_sharded,
    "HierarchicalModelAverager": lambda: HierarchicalModelAverager(OrderedDict([(2, 2), (4, 4)])),
    "PipelineStage": pipeline_stage,
    "rendezvous": lambda: symm_mem.rendezvous(symm_mem.empty(64, device="cuda"), dist.group.WORLD),
    "shrink_group": lambda: dist.get_rank() == 3 or dist.shrink_group([3]),
}


OF_214 = {"PipelineStage"}
"""Torch 2.14's constructor makes groups; that of 2.15 leaves them to the schedule's first step."""
HERE = [name for name in CALLS if name not in OF_214 or hasattr(config, "pipeline_per_direction_p2p")]


def diagnoses(name: str, everybody: bool, device: bool = True) -> Any:
    """What is told of four ranks of which half, or all, make the call *name*, and then reduce."""
    call = CALLS[name]

    def body() -> None:
        os.environ["CUDA_VISIBLE_DEVICES"] = "0,1,2,3"  # FSDP counts those of a node
        rank = int(os.environ["RANK"])
        torch.cuda.set_device(rank)
        own = {"device_id": torch.device("cuda", rank)} if device else {}
        dist.init_process_group("nccl", **own)
        given = [init_device_mesh("cuda", (2, 1, 2), mesh_dim_names=MESH)] if name in ("_flatten", "_unflatten") else []
        if rank < 2 or everybody:
            call(*given)
        if name != "shrink_group":
            dist.all_reduce(torch.ones(4, device="cuda"))

    try:
        return distsim.simulate(body, on="dgx-h100:1", nproc_per_node=4).diagnoses
    except RankFailure as failure:
        raise AssertionError(str(failure)) from None


def test_every_entry_has_a_call() -> None:
    """So that none is added without its test."""
    assert {entry.function for entry in OBLIGATIONS if not entry.label} == set(CALLS)


@pytest.mark.parametrize("entry", [e for e in OBLIGATIONS if e.function in HERE], ids=lambda entry: entry.function)
def test_members_only_is_told(entry: Any) -> None:
    """The ranks that leave it out, the line of those who wait, and that every rank of the parent must call it."""
    (told,) = diagnoses(entry.function, everybody=False)
    assert told.culprits == ((2,) if entry.function == "shrink_group" else (2, 3))
    assert told.victims == (0, 1)
    assert told.sites[0].line == max(line for *_, line in CALLS[entry.function].__code__.co_lines() if line)
    if told.kind is not Kind.MISSING_RANK:  # a collective in it
        assert told.kind is Kind.GROUP_CREATION_ORDER
        assert f"Call {entry.function} on every rank of {entry.parent}" in told.suggestion


@pytest.mark.parametrize("name", HERE)
def test_all_ranks_may(name: str) -> None:
    """The same call by all ranks."""
    assert not diagnoses(name, everybody=True)


def test_local_synchronization_does_not_help_where_nccl_divides() -> None:
    """With device_id, torch divides the default group's communicator for those groups, too (pytorch#129965)."""

    def body(device: bool) -> None:
        rank = int(os.environ["RANK"])
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", **({"device_id": torch.device("cuda", rank)} if device else {}))
        if rank < 2:
            dist.new_group([0, 1], use_local_synchronization=True)
        dist.all_reduce(torch.ones(4, device="cuda"))

    (told,) = distsim.simulate(body, args=(True,), on="dgx-h100:1", nproc_per_node=4).diagnoses
    assert (told.kind, told.culprits) == (Kind.GROUP_CREATION_ORDER, (2, 3))
    assert "without use_local_synchronization: with device_id=" in told.suggestion
    assert not distsim.simulate(body, args=(False,), on="dgx-h100:1", nproc_per_node=4).diagnoses


def test_groups_of_gloo_are_not_divided() -> None:
    """The members alone connect, whatever the default group is bound to."""

    def body() -> Any:
        rank = int(os.environ["RANK"])
        dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
        total = torch.ones(1)
        if rank < 2:
            dist.all_reduce(total, group=dist.new_group([0, 1], backend="gloo"))
        return total.item()

    assert distsim.simulate(body, on="dgx-h100:1", nproc_per_node=4).results == [2.0, 2.0, 1.0, 1.0]


MAKERS = {"new_group", "split_group", "new_subgroups", "new_subgroups_by_enumeration", "_new_group_with_tag"}
INSIDE = {
    "distributed_c10d._new_group_via_split_group": "new_group with torchcomms",
    "distributed_c10d._find_or_create_pg_by_ranks_and_tag": "a functional collective of a list of ranks",
    "fsdp._fully_shard._fsdp_param_group.FSDPParamGroup._set_separate_reduce_scatter_group": "the members alone",
    "algorithms.ddp_comm_hooks.post_localSGD_hook.post_localSGD_hook": "the backward of DDP, on every rank",
    "pipelining._p2p._build_p2p_edge_groups": "the first step of a pipeline's schedule, on every rank (torch 2.15)",
}
"""Functions of torch that create groups, and are no entries because of where they are called."""


def made_in(tree: ast.AST, name: str) -> Iterator[str]:
    """The functions of a module that call one that creates groups."""
    for node in ast.iter_child_nodes(tree):
        inner = isinstance(node, ast.FunctionDef | ast.ClassDef)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in MAKERS:
            yield name
        yield from made_in(node, f"{name}.{node.name}" if inner else name)


def test_the_register_has_all_of_torchs_creators() -> None:
    """Every function of torch.distributed that creates groups belongs to an entry, or says why it does not."""
    folder = Path(dist.__file__).parent
    found = set()
    for path in folder.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if any(f"{maker}(" in text for maker in MAKERS):
            module = ".".join(path.relative_to(folder).with_suffix("").parts)
            found |= {name for name in made_in(ast.parse(text), module) if name != module}
    known = {maker for entry in OBLIGATIONS for maker in entry.makers}
    assert found - known == set(INSIDE) & found
    assert known - found <= {"pipelining.stage._build_p2p_direction_groups"}  # of torch 2.14 alone
