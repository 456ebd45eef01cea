"""Facts that one rank records of its training, and the findings of the silent search in the facts of all ranks.

A sighting is one tensor in one step in which a check saw a fault. A finding combines the sightings of one cause. The
user can mark parameters that may differ between ranks, and suppress findings by patterns.

Facts are parameters, optimizer steps, and events between them: plain data without torch. A vector is the sketch of a
tensor (`collect/sketch.py`): 16 numbers that are linear in the tensor. The sketch of a sum of gradients is the sum of
their sketches, and the distance of two sketches estimates the distance of the tensors.
"""

from __future__ import annotations

import difflib
import enum
import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from distsim.debug.records import Site
from distsim.errors import UsageError
from distsim.text.codec import Number, convert, plain

Vector = NDArray[np.float32]
"""Sketch of a tensor: shape (16,)."""


class TrainingPhase(enum.StrEnum):
    """Phase of a training step."""

    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCTION = "reduction"
    """After a backward pass and before the optimizer's step."""
    BETWEEN = "between"
    """Phase after a step and before the next backward pass, outside of any forward pass."""


class ParameterFact(Struct, array_like=True):
    """One parameter of one rank."""

    name: str
    """Name in `named_parameters` of its model."""
    shape: tuple[int, ...]
    """Shape of the part that this rank holds."""
    module: str = ""
    """Name of the module that owns the parameter."""
    constant: bool = False
    """Whether all elements were equal when the parameter was first seen, as for a zero bias or a norm's ones."""
    ddp: tuple[int, ...] = ()
    """Ranks of the DistributedDataParallel that owns the parameter; empty without DDP."""
    mesh: tuple[int, ...] = ()
    """Ranks that hold the same part of the DTensor, by its placements; empty for other tensors."""
    fsdp: tuple[int, ...] = ()
    """Ranks over which FSDP shards the parameter, which are data parallel; empty without FSDP."""
    compressed: bool = False
    """Whether DDP has a communication hook, so that the reduced gradient may be an approximation."""
    varies: bool = False
    """Whether the program marked the parameter by `distsim.varies`: it may differ between ranks."""

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)


class CallCount(Struct, array_like=True):
    """Number of equal collectives or messages between two steps, and the tensors that they carried."""

    op: str
    ranks: tuple[int, ...]
    """Ranks of the group, or the two ends of a message."""
    reduce_op: str | None
    pass_: TrainingPhase
    by_torch: bool
    """Whether torch made the calls (DDP's reducer, FSDP) and not the program."""
    site: Site | None = None
    count: int = 0
    largest: int = 0
    """Number of elements of the largest tensor in the calls."""
    gradients: set[int] = field(default_factory=set)
    """Indices of the parameters whose `.grad` was passed to the calls."""
    values: set[int] = field(default_factory=set)
    """Indices of the parameters that were themselves passed to the calls."""


class InputFact(Struct, array_like=True):
    """Inputs of one call of an outermost model (not of a module inside another)."""

    model: str
    training: bool
    shapes: tuple[tuple[int, ...], ...]
    vectors: tuple[Vector, ...]
    constant: bool
    site: Site | None = None
    samples: tuple[int, ...] = ()
    """A hash of each sample of the batch; empty if the batch is too large, or its samples are not apart."""


class LossFact(Struct, array_like=True):
    """One call of a loss function, and the weight of each target in the gradient."""

    reduction: str
    """`mean`, `sum`, or `none` if the weight of the targets is unknown."""
    targets: int
    """Number of targets, without those that the loss ignores."""
    weight: float | None = None
    """Gradient that arrived at the scalar loss; None if no backward pass reached it."""
    counts_tokens: bool = False
    """Whether the targets are classes, of which some may be ignored (`ignore_index`)."""
    site: Site | None = None


class ClipFact(Struct, array_like=True):
    """One call that clips gradients by their norm."""

    limit: float
    norm: float | None
    is_plain: bool
    """Whether the norm is a plain tensor. The norm of DTensors is the same on all ranks."""
    site: Site | None = None


class EpochFact(Struct, array_like=True):
    """One pass over data that a DistributedSampler divides."""

    sampler: int
    """Number of the sampler on its rank."""
    epoch: int
    site: Site | None = None
    shuffles: bool = True
    replicas: int = 0
    """Number of parts into which it divides the data."""
    part: int = 0
    """Number of the part that this rank reads."""
    size: int = 0
    """Number of samples of the whole data."""
    seed: int = 0


class GroupFact(Struct, array_like=True):
    """A new_group whose ranks torch has sorted, and on which the order of ranks has mattered."""

    ranks: tuple[int, ...]
    """Ranks in the order in which the program passed them."""
    site: Site | None = None
    op: str = ""
    """The first operation on it whose result depends on the order of ranks."""


class LocalFact(Struct, array_like=True):
    """A DTensor that the program made of a part on each rank, divided along one dimension of a mesh."""

    ranks: tuple[int, ...]
    """Ranks that hold the parts, in the order of the mesh."""
    dim: int
    shape: tuple[int, ...]
    """Shape of this rank's part."""
    whole: tuple[int, ...] | None = None
    """Shape of the DTensor, if the program passed it."""
    site: Site | None = None


class PlacementFact(Struct, array_like=True):
    """A DTensor input of a module that is declared as replicated."""

    module: str
    ranks: tuple[int, ...]
    vector: Vector
    shape: tuple[int, ...]
    site: Site | None = None


class DropoutFact(Struct, array_like=True):
    """One call of dropout: the generator's state, and the sketch of the input."""

    state: int
    """Hash of the generator's state."""
    vector: Vector
    shape: tuple[int, ...]
    site: Site | None = None


class SumFact(Struct, array_like=True):
    """What this rank added to one sum over ranks in a forward pass."""

    ranks: tuple[int, ...]
    vector: Vector
    shape: tuple[int, ...]
    site: Site | None = None


class BufferFact(Struct, array_like=True):
    """A floating-point buffer under DDP, of no normalization layer, or parameter without a gradient."""

    name: str
    ranks: tuple[int, ...]
    vector: Vector


class Window(Struct, array_like=True):
    """Events of a rank between two steps of its optimizers."""

    calls: list[CallCount] = field(default_factory=list)
    inputs: list[InputFact] = field(default_factory=list)
    losses: list[LossFact] = field(default_factory=list)
    placements: list[PlacementFact] = field(default_factory=list)
    dropouts: list[DropoutFact] = field(default_factory=list)
    buffers: list[BufferFact] = field(default_factory=list)
    aliased: list[tuple[str, tuple[int, ...], Site | None]] = field(default_factory=list)
    """Operation, ranks and line of each call whose output tensors share memory."""
    clips: list[ClipFact] = field(default_factory=list)
    epochs: list[EpochFact] = field(default_factory=list)
    groups: list[GroupFact] = field(default_factory=list)
    parts: list[LocalFact] = field(default_factory=list)
    lost_writes: list[str] = field(default_factory=list)
    """Names of parameters that were written to while fully_shard had gathered them. fully_shard discards such
    writes.
    """
    sums: list[SumFact] = field(default_factory=list)
    joined: bool = False
    """Whether the rank had run out of data under `Join`, and repeated the calls of the others."""


class StepFact(Struct, array_like=True):
    """One step of one optimizer. It has sketches only for the parameters that were sampled in this step."""

    optimizer: int
    """Number of the optimizer on its rank, in the order of first steps, from 0."""
    number: int
    """Number of the step, from 1."""
    parameters: tuple[int, ...]
    """Indices in `RankFacts.parameters` of all parameters of the optimizer."""
    site: Site | None = None
    before: dict[int, Vector] = field(default_factory=dict)
    gradients: dict[int, Vector] = field(default_factory=dict)
    """Gradients that the optimizer reads, after any reduction, by parameter."""
    local: dict[int, list[Vector]] = field(default_factory=dict)
    """Gradients of this rank's own backward passes, before any reduction, one for each micro-batch, by parameter."""
    after: dict[int, Vector] = field(default_factory=dict)
    state: dict[int, dict[str, Vector]] = field(default_factory=dict)
    """Optimizer state before the step, by parameter and name of the entry."""
    hyperparameters: dict[int, tuple[tuple[str, float], ...]] = field(default_factory=dict)
    without_gradient: int = 0
    """Number of parameters whose `.grad` was None."""
    owns_state: bool = True
    """False for ZeRO, where the optimizer state of each parameter is on one rank only."""
    has_closure: bool = False
    window: Window = field(default_factory=Window)


class RankFacts(Struct):
    """All facts of one rank."""

    rank: int
    parameters: list[ParameterFact] = field(default_factory=list)
    steps: list[StepFact] = field(default_factory=list)
    """Steps of all optimizers, in program order."""
    rest: Window = field(default_factory=Window)
    """Events after the last step."""

    @property
    def is_empty(self) -> bool:
        """Return whether there is nothing to check: no step, and no event that is checked without one."""
        return not (self.steps or self.rest.groups or self.rest.parts or self.rest.placements)


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
    GROUP_RANKS_SORTED = "group_ranks_sorted"
    PARTS_UNLIKE_CHUNKS = "parts_unlike_chunks"
    SAMPLES_OVERLAP = "samples_overlap"
    SAMPLES_UNSEEN = "samples_unseen"
    SPLITS_DIFFER = "splits_differ"
    SHARDS_ALIKE = "shards_alike"

    @property
    def label(self) -> str:
        """Return the kind as text, such as `replicas diverge`."""
        return self.value.replace("_", " ")


@dataclass(frozen=True, slots=True)
class Sighting:
    """Fault that a check saw in one tensor of one set of ranks."""

    kind: SilentKind
    ranks: tuple[int, ...]
    step: int
    """Number of the optimizer's step; 0 is before the first step."""
    reason: str
    """Sentence on the fault, with the fields `{tensor}` and `{ranks}`. Sightings with equal reasons become one
    finding.
    """
    tensor: str = ""
    """Name of the tensor; empty if the fault does not concern a tensor."""
    site: Site | None = None
    evidence: str = ""
    """Sentence on why the ranks should agree, with the fields `{tensor}` and `{ranks}`."""
    suggestion: str = ""
    """Sentence on the remedy, with the same fields and `{first}`, the first tensor; empty for its kind's."""
    level: Severity | None = None
    """Severity; None for its kind's."""
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
    distance: Number | None = None

    @property
    def see(self) -> str:
        """Return the section of the documentation that describes the kind."""
        return f"docs/silent.md#{self.kind.value}"

    def to_json(self) -> dict[str, Any]:
        """Return the finding as plain data for a report."""
        content = plain(self)
        content["site"] = self.site and self.site.to_json()
        return {**content, "see": self.see}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> SilentFinding:
        """Return the finding that `to_json` wrote. Raises ValueError if it is not one."""
        return convert(document, cls)


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
