"""Register of the calls that every rank of a parent group must make.

A rank must make them whether or not it becomes a member of the new group.

Source: torch 2.13, and 2.14 for `PipelineStage`, whose groups 2.15 makes in the schedule's first step. `new_group`
counts its groups to name them. With a device bound to the default group (`init_process_group(device_id=)`), NCCL
divides the parent's communicator, which is a collective of the parent (`split` and `performNocolorSplit` in
ProcessGroupNCCL.cpp). `destroy_process_group` is not such a call: it waits for the rank's own calls. A slice of a
device mesh creates no group.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

RECONFIGURE = "reconfigure"
RECOVERIES = frozenset({"shrink_group", RECONFIGURE})
"""Operations by which members of a group go on without others."""
CREATIONS = frozenset({"new_group", "split_group", *RECOVERIES})
"""Operations of records that create a group. They are numbered apart from the calls that move data."""

_WORLD = "the default group"


@dataclass(frozen=True, slots=True)
class Obligation:
    """A function that every rank of a parent group must call."""

    function: str
    """Name by which a program calls it."""
    parent: str = _WORLD
    """The parent group, in words."""
    makers: tuple[str, ...] = ()
    """The functions of torch.distributed that create its groups, as `module.function`."""
    label: str = ""
    """The circumstance in which torch makes its calls (`circumstances`), if it creates no group."""
    note: str = ""
    """Why every rank must, behind a colon."""


_MESH = ("device_mesh.DeviceMesh._init_one_process_group",)
OBLIGATIONS = (
    Obligation("new_group", makers=("distributed_c10d.new_group", "distributed_c10d._new_group_with_tag")),
    Obligation("new_subgroups", makers=("distributed_c10d.new_subgroups",)),
    Obligation("new_subgroups_by_enumeration", makers=("distributed_c10d.new_subgroups_by_enumeration",)),
    Obligation("split_group", "the parent group", ("distributed_c10d.split_group",)),
    Obligation("shrink_group", "the group but the excluded ones"),
    Obligation("init_device_mesh", makers=_MESH),
    Obligation("DeviceMesh", makers=_MESH),
    Obligation("_flatten", makers=_MESH),
    Obligation("_unflatten", makers=_MESH),
    Obligation(
        "FullyShardedDataParallel",
        makers=(
            "fsdp._init_utils._init_intra_node_process_group",
            "fsdp._init_utils._init_inter_node_process_group",
        ),
    ),
    Obligation(
        "HierarchicalModelAverager",
        makers=("algorithms.model_averaging.hierarchical_model_averager.HierarchicalModelAverager.__init__",),
    ),
    Obligation("PipelineStage", "the group of the stages", ("pipelining.stage._build_p2p_direction_groups",)),
    Obligation("rendezvous", "the group of the symmetric memory"),
    Obligation(
        "the forward and backward of the sharded model",
        "its group",
        label="fsdp",
        note="its parameters are gathered from all of them",
    ),
    Obligation(
        "the forward and backward of the DDP model",
        "its group",
        label="ddp",
        note="model.module has no collectives, so validate and save on one rank with that",
    ),
    Obligation(
        "each step of the pipeline's schedule",
        "its stages' group",
        label="pipeline",
        note="with the same number of micro-batches (drop_last)",
    ),
    Obligation(
        "the save or load of the checkpoint", "its process group", label="dcp", note="each rank plans and writes a part"
    ),
    Obligation(
        "step() and consolidate_state_dict() of the sharded optimizer",
        "its group",
        label="sharded optimizer",
        note="each rank holds a part of its state",
    ),
    Obligation(
        "the forward of SyncBatchNorm", "its group", label="sync batch norm", note="in training it averages over them"
    ),
    Obligation(
        "operations on a DTensor", "its device mesh", label="dtensor", note="a redistribution needs all of them"
    ),
)


def obligation_of(labels: Collection[str]) -> Obligation | None:
    """Return the entry of a call that torch makes in the circumstances *labels*."""
    return next((entry for entry in OBLIGATIONS if entry.label in labels), None)


def obligation(line: str, op: str) -> Obligation | None:
    """Return the entry of the function that *line* of a program calls, or that of the operation *op*."""
    named = [entry for entry in OBLIGATIONS if re.search(rf"(?<!\w){entry.function}\(", line)]
    named += [entry for entry in OBLIGATIONS if entry.function == op]
    return next(iter(named), None)
