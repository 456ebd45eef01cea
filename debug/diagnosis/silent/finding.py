"""Findings of the silent search, and the user's exceptions from it.

A sighting is one tensor in one step in which a check saw a fault. A finding combines the sightings of one cause. The
user can mark parameters that may differ between ranks, and suppress findings by patterns.
"""

from __future__ import annotations

import difflib
import enum
import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from distsim.debug.records import Site
from distsim.errors import UsageError

__all__ = ["Severity", "Sighting", "SilentFinding", "SilentKind", "check_patterns", "is_allowed", "may_vary", "varies"]

_MARK = "_distsim_varies"

Marked = TypeVar("Marked")


class Severity(enum.StrEnum):
    """Severity of a finding."""

    ERROR = "error"
    WARNING = "warning"
    NOTICE = "notice"


class SilentKind(enum.StrEnum):
    """Kind of a silent fault. The values are part of the report's schema."""

    REPLICAS_DIFFER_AT_START = "replicas_differ_at_start"
    REPLICAS_DIVERGE = "replicas_diverge"
    CHANGED_OUTSIDE_STEP = "changed_outside_step"
    HYPERPARAMETER_DIFFERS = "hyperparameter_differs"
    OPTIMIZER_STATE_DIFFERS = "optimizer_state_differs"
    ALIASED_OUTPUTS = "aliased_outputs"
    GRADIENT_REDUCE_OP = "gradient_reduce_op"
    REPLICATE_IS_NOT = "replicate_is_not"
    SAME_BATCH = "same_batch"
    MODE_DIFFERS = "mode_differs"
    EPOCHS_ALIKE = "epochs_alike"
    STEP_WITHOUT_GRADIENTS = "step_without_gradients"
    GRADIENT_SCALE = "gradient_scale"
    MIXED_SCALE = "mixed_scale"
    STALE_GRADIENT = "stale_gradient"
    TOKENS_WEIGH_DIFFERENTLY = "tokens_weigh_differently"
    DROPOUT_DIFFERS = "dropout_differs"
    EQUAL_DROPOUT = "equal_dropout"
    CLIPPED_BY_LOCAL_NORM = "clipped_by_local_norm"
    TIED_NOT_SYNCHRONIZED = "tied_not_synchronized"
    UNSHARDED_WRITE_LOST = "unsharded_write_lost"
    BUFFERS_DIFFER = "buffers_differ"

    @property
    def label(self) -> str:
        """Return the kind as text, such as `replicas diverge`."""
        return self.value.replace("_", " ")


@dataclass(frozen=True, slots=True)
class Sighting:
    """Fault that a check saw in one tensor of one set of ranks."""

    kind: SilentKind
    level: Severity
    ranks: tuple[int, ...]
    tensor: str
    """Name of the tensor; empty if the fault does not concern a tensor."""
    step: int
    """Number of the optimizer's step; 0 is before the first step."""
    site: Site | None
    evidence: str
    """Sentence on why the ranks should agree, with the fields `{tensor}` and `{ranks}`."""
    reason: str
    """Sentence on the fault, with the fields `{tensor}` and `{ranks}`. Sightings with equal reasons become one
    finding.
    """
    suggestion: str
    """Sentence on the remedy, with the same fields and `{first}`, the name of the first tensor."""
    distance: float | None = None
    is_guess: bool = False


@dataclass(frozen=True, slots=True)
class SilentFinding:
    """One fault with one cause, and all tensors that show it."""

    kind: SilentKind
    level: Severity
    ranks: tuple[int, ...]
    tensors: tuple[str, ...]
    step: int
    site: Site | None
    evidence: str
    explanation: str
    suggestion: str
    distance: float | None = None

    @property
    def see(self) -> str:
        """Return the section of the documentation that describes the kind."""
        return f"docs/silent.md#{self.kind.value}"

    def to_json(self) -> dict[str, Any]:
        """Return the finding as plain data for a report."""
        return {
            "kind": self.kind.value,
            "level": self.level.value,
            "ranks": list(self.ranks),
            "tensors": list(self.tensors),
            "step": self.step,
            "site": None if self.site is None else self.site.to_json(),
            "evidence": self.evidence,
            "distance": self.distance,
            "explanation": self.explanation,
            "suggestion": self.suggestion,
            "see": self.see,
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> SilentFinding:
        """Return the finding that `to_json` wrote."""
        site = document["site"]
        return cls(
            SilentKind(document["kind"]),
            Severity(document["level"]),
            tuple(document["ranks"]),
            tuple(document["tensors"]),
            document["step"],
            None if site is None else Site.from_json(site),
            document["evidence"],
            document["explanation"],
            document["suggestion"],
            document["distance"],
        )


def varies(module_or_parameter: Marked) -> Marked:
    """Mark parameters that may differ between ranks, such as experts, adapters or ensembles.

    The search for silent faults does not compare them; without this search the call has no effect. Mark the parameters
    that the optimizer receives: after `fully_shard` or another wrapper that replaces them.

    Args:
        module_or_parameter: A `torch.nn.Module`, with all parameters in it, or one parameter.

    Returns:
        The argument.

    Raises:
        UsageError: The argument is neither a module nor a parameter.
    """
    parameters = getattr(module_or_parameter, "parameters", None)
    if callable(parameters):
        for parameter in parameters():
            setattr(parameter, _MARK, True)
    elif hasattr(module_or_parameter, "requires_grad"):
        setattr(module_or_parameter, _MARK, True)
    else:
        raise UsageError(f"distsim.varies: expected a module or a parameter, got {type(module_or_parameter).__name__}")
    return module_or_parameter


def may_vary(parameter: object) -> bool:
    """Return whether the program marked *parameter* with `varies`."""
    return hasattr(parameter, _MARK)


def is_allowed(sighting: Sighting, patterns: Sequence[str]) -> bool:
    """Return whether a pattern, `KIND:TENSOR` or `KIND` for every tensor, matches the sighting."""
    for pattern in patterns:
        kind, _, tensor = pattern.partition(":")
        if fnmatch.fnmatchcase(sighting.kind.value, kind) and fnmatch.fnmatchcase(sighting.tensor, tensor or "*"):
            return True
    return False


def check_patterns(patterns: Sequence[str]) -> None:
    """Raise `UsageError` for a pattern with an unknown kind."""
    kinds = [kind.value for kind in SilentKind]
    for pattern in patterns:
        kind = pattern.partition(":")[0]
        if not fnmatch.filter(kinds, kind):
            near = difflib.get_close_matches(kind, kinds, n=1) or ["replicas_diverge"]
            raise UsageError(
                f"silent_allow: expected KIND:TENSOR with a kind of docs/silent.md, such as {near[0]}:*.experts.*, "
                f"got {pattern!r}"
            )
