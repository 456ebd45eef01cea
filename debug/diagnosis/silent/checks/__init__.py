"""The kinds of silent faults: for each its rule, its severity and its remedy.

A rule is a pure function of the recorded facts, and yields the sightings of its kind; `judge.py` combines these into
findings. A rule names a severity or a remedy only where that is not its kind's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from distsim.debug.diagnosis.silent.checks import gradients, inputs, model_parallel, replicas
from distsim.debug.diagnosis.silent.facts import Severity, Sighting, SilentKind
from distsim.debug.diagnosis.silent.view import ParameterKey, ReplicaSet, View

__all__ = ["KINDS", "KindRow"]


@dataclass(frozen=True, slots=True)
class KindRow:
    """A kind of silent fault."""

    check: Callable[[View, dict[ParameterKey, list[ReplicaSet]]], Iterable[Sighting]]
    level: Severity
    cure: str = ""
    """Sentence on the remedy, with the fields of a sighting."""


KINDS: dict[SilentKind, KindRow] = {
    SilentKind.REPLICAS_DIFFER_AT_START: KindRow(
        replicas.replicas_differ_at_start,
        Severity.ERROR,
        "Load the checkpoint on every rank, seed all ranks equally, or broadcast {tensor} before training; where "
        "other ranks agree, reduce the gradient over their group.",
    ),
    SilentKind.HYPERPARAMETER_DIFFERS: KindRow(replicas.hyperparameter_differs, Severity.ERROR),
    SilentKind.OPTIMIZER_STATE_DIFFERS: KindRow(replicas.optimizer_state_differs, Severity.ERROR),
    SilentKind.CHANGED_OUTSIDE_STEP: KindRow(replicas.changed_outside_step, Severity.ERROR),
    SilentKind.ALIASED_OUTPUTS: KindRow(
        gradients.aliased_outputs,
        Severity.ERROR,
        "Give each output its own memory: [torch.empty_like(t) for _ in range(world_size)].",
    ),
    SilentKind.GRADIENT_REDUCE_OP: KindRow(
        gradients.gradient_reduce_op,
        Severity.ERROR,
        "Reduce gradients with ReduceOp.SUM and divide by the number of ranks, or with AVG.",
    ),
    SilentKind.REPLICATE_IS_NOT: KindRow(
        inputs.replicate_is_not,
        Severity.ERROR,
        "Give all of {ranks} the same input: load one batch for each data-parallel group, or broadcast it inside the"
        " tensor-parallel group.",
    ),
    SilentKind.SAME_BATCH: KindRow(
        inputs.same_batch,
        Severity.WARNING,
        "Give each rank its own part of the data: DataLoader(..., sampler=DistributedSampler(dataset)), or a "
        "different seed for each rank.",
    ),
    SilentKind.MODE_DIFFERS: KindRow(
        inputs.mode_differs,
        Severity.WARNING,
        "Call model.train() or model.eval() on every rank.",
    ),
    SilentKind.EPOCHS_ALIKE: KindRow(
        inputs.epochs_alike,
        Severity.WARNING,
        "Call sampler.set_epoch(epoch) before each epoch.",
    ),
    SilentKind.STEP_WITHOUT_GRADIENTS: KindRow(
        gradients.step_without_gradients,
        Severity.WARNING,
        "Give the optimizer the parameters that backward reaches (make it after the model is moved, wrapped or "
        "sharded), and do not clear gradients between backward and step.",
    ),
    SilentKind.GRADIENT_SCALE: KindRow(
        gradients.gradient_scale,
        Severity.WARNING,
        "Divide by the number of ranks or of micro-batches exactly once: DistributedDataParallel divides by the "
        "ranks, reduction='mean' by the targets of one micro-batch.",
    ),
    SilentKind.MIXED_SCALE: KindRow(gradients.mixed_scale, Severity.WARNING),
    SilentKind.STALE_GRADIENT: KindRow(
        gradients.stale_gradient,
        Severity.WARNING,
        "Call optimizer.zero_grad() on every rank in every step.",
    ),
    SilentKind.TOKENS_WEIGH_DIFFERENTLY: KindRow(
        gradients.tokens_weigh_differently,
        Severity.NOTICE,
        "Sum the losses (reduction='sum') and divide by the count of targets of all ranks and micro-batches.",
    ),
    SilentKind.DROPOUT_DIFFERS: KindRow(
        model_parallel.dropout_differs,
        Severity.WARNING,
        "Use the same seed on all of {ranks} where activations are replicated.",
    ),
    SilentKind.EQUAL_DROPOUT: KindRow(
        model_parallel.equal_dropout,
        Severity.WARNING,
        "Seed the generator differently on {ranks} where activations are sharded.",
    ),
    SilentKind.SHARDS_ALIKE: KindRow(
        model_parallel.shards_alike,
        Severity.NOTICE,
        "Draw the shards of split weights with a seed of their own on each of {ranks} (torch.manual_seed(seed + "
        "tp_rank)), and the replicated ones with one seed. If these are copies by design, there is nothing to sum.",
    ),
    SilentKind.CLIPPED_BY_LOCAL_NORM: KindRow(model_parallel.clipped_by_local_norm, Severity.WARNING),
    SilentKind.TIED_NOT_SYNCHRONIZED: KindRow(
        model_parallel.tied_not_synchronized,
        Severity.WARNING,
        "All-reduce the gradients of the tied weight over the stages that hold it, before the step.",
    ),
    SilentKind.UNSHARDED_WRITE_LOST: KindRow(
        replicas.unsharded_write_lost,
        Severity.ERROR,
        "Write to the shard: parameter.to_local() of the parameter that the optimizer has, outside of forward and of"
        " unshard().",
    ),
    SilentKind.BUFFERS_DIFFER: KindRow(
        replicas.buffers_differ,
        Severity.WARNING,
        "All-reduce the values that update it, or leave broadcast_buffers=True, which is for buffers alone.",
    ),
    SilentKind.REPLICAS_DIVERGE: KindRow(replicas.replicas_diverge, Severity.ERROR),
    SilentKind.GROUP_RANKS_SORTED: KindRow(
        model_parallel.group_ranks_sorted,
        Severity.NOTICE,
        "Pass sort_ranks=False to new_group, or the ranks in ascending order, and index its parts by "
        "dist.get_process_group_ranks(group).",
    ),
    SilentKind.PARTS_UNLIKE_CHUNKS: KindRow(
        model_parallel.parts_unlike_chunks,
        Severity.WARNING,
        "Divide by torch.chunk (distribute_tensor does), and pass shape= and stride= of the whole where it does not "
        "divide evenly.",
    ),
    SilentKind.SPLITS_DIFFER: KindRow(
        inputs.splits_differ,
        Severity.WARNING,
        "Make the sampler from values that all ranks have, and resume it on all of them or on none: the same seed, "
        "epoch and world size.",
    ),
    SilentKind.SAMPLES_UNSEEN: KindRow(
        inputs.samples_unseen,
        Severity.WARNING,
        "Divide the data by the number of ranks that read it: num_replicas is the size of the data-parallel group, "
        "rank the rank in it.",
    ),
    SilentKind.SAMPLES_OVERLAP: KindRow(
        inputs.samples_overlap,
        Severity.WARNING,
        "Divide the data anew on all ranks, each with its own part: rank of the data-parallel group, one seed and "
        "one epoch; resume all shards or none.",
    ),
}
"""Row of each kind. Kinds that cause others come first."""
