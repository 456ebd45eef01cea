"""One rule a kind of fault, as pure functions of the facts; `CHECKS` is the table of all.

Each answers the sightings of its kind; `judge.py` makes findings of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from distsim.debug.diagnosis.silent.checks.replicas import (
    changed_outside_step,
    hyperparameter_differs,
    optimizer_state_differs,
    replicas_differ_at_start,
    replicas_diverge,
)
from distsim.debug.diagnosis.silent.finding import Sighting, SilentKind
from distsim.debug.diagnosis.silent.replicas import ReplicaSet
from distsim.debug.diagnosis.silent.view import Key, View

__all__ = ["CHECKS", "Check"]

Check = Callable[[View, dict[Key, list[ReplicaSet]]], Iterable[Sighting]]

CHECKS: dict[SilentKind, Check] = {
    SilentKind.REPLICAS_DIFFER_AT_START: replicas_differ_at_start,
    SilentKind.HYPERPARAMETER_DIFFERS: hyperparameter_differs,
    SilentKind.OPTIMIZER_STATE_DIFFERS: optimizer_state_differs,
    SilentKind.CHANGED_OUTSIDE_STEP: changed_outside_step,
    SilentKind.REPLICAS_DIVERGE: replicas_diverge,
}
"""A cause stands before its consequences."""
