"""Rules for silent faults, one for each kind, as pure functions of the recorded facts.

`CHECKS` lists all of them. Each rule yields the sightings of its kind, and `judge.py` combines sightings into
findings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from distsim.debug.diagnosis.silent.checks.gradients import (
    aliased_outputs,
    gradient_reduce_op,
    gradient_scale,
    mixed_scale,
    stale_gradient,
    step_without_gradients,
    tokens_weigh_differently,
)
from distsim.debug.diagnosis.silent.checks.inputs import epochs_alike, mode_differs, replicate_is_not, same_batch
from distsim.debug.diagnosis.silent.checks.model_parallel import (
    clipped_by_local_norm,
    dropout_differs,
    equal_dropout,
    tied_not_synchronized,
)
from distsim.debug.diagnosis.silent.checks.replicas import (
    buffers_differ,
    changed_outside_step,
    hyperparameter_differs,
    optimizer_state_differs,
    replicas_differ_at_start,
    replicas_diverge,
    unsharded_write_lost,
)
from distsim.debug.diagnosis.silent.facts import Sighting, SilentKind
from distsim.debug.diagnosis.silent.view import ParameterKey, ReplicaSet, View

__all__ = ["CHECKS", "Check"]

Check = Callable[[View, dict[ParameterKey, list[ReplicaSet]]], Iterable[Sighting]]

CHECKS: dict[SilentKind, Check] = {
    SilentKind.REPLICAS_DIFFER_AT_START: replicas_differ_at_start,
    SilentKind.HYPERPARAMETER_DIFFERS: hyperparameter_differs,
    SilentKind.OPTIMIZER_STATE_DIFFERS: optimizer_state_differs,
    SilentKind.CHANGED_OUTSIDE_STEP: changed_outside_step,
    SilentKind.ALIASED_OUTPUTS: aliased_outputs,
    SilentKind.GRADIENT_REDUCE_OP: gradient_reduce_op,
    SilentKind.REPLICATE_IS_NOT: replicate_is_not,
    SilentKind.SAME_BATCH: same_batch,
    SilentKind.MODE_DIFFERS: mode_differs,
    SilentKind.EPOCHS_ALIKE: epochs_alike,
    SilentKind.STEP_WITHOUT_GRADIENTS: step_without_gradients,
    SilentKind.GRADIENT_SCALE: gradient_scale,
    SilentKind.MIXED_SCALE: mixed_scale,
    SilentKind.STALE_GRADIENT: stale_gradient,
    SilentKind.TOKENS_WEIGH_DIFFERENTLY: tokens_weigh_differently,
    SilentKind.DROPOUT_DIFFERS: dropout_differs,
    SilentKind.EQUAL_DROPOUT: equal_dropout,
    SilentKind.CLIPPED_BY_LOCAL_NORM: clipped_by_local_norm,
    SilentKind.TIED_NOT_SYNCHRONIZED: tied_not_synchronized,
    SilentKind.UNSHARDED_WRITE_LOST: unsharded_write_lost,
    SilentKind.BUFFERS_DIFFER: buffers_differ,
    SilentKind.REPLICAS_DIVERGE: replicas_diverge,
}
"""Rule for each kind of fault. Kinds that cause others come first."""
