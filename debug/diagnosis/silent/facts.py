"""What one rank records of its training: parameters, steps of optimizers, and what happens between two steps.

Plain data without torch. A vector is the sketch of a tensor (`collect/sketch.py`): 16 numbers, linear in the tensor, so
that sketches of gradients add up as gradients do and distances of sketches are distances of tensors.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from distsim.debug.records import Site

__all__ = [
    "BufferFact",
    "CallCount",
    "ClipFact",
    "DropoutFact",
    "EpochFact",
    "InputFact",
    "LossFact",
    "ParameterFact",
    "PlacementFact",
    "RankFacts",
    "StepFact",
    "TrainingPhase",
    "Vector",
    "Window",
]

Vector = NDArray[np.float32]
"""Sketch of a tensor: shape (16,)."""


class TrainingPhase(enum.StrEnum):
    """Position in a training step."""

    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCTION = "reduction"
    """After a backward pass, before the step."""
    BETWEEN = "between"
    """Before the first backward pass of a step."""


@dataclass(slots=True)
class ParameterFact:
    """One parameter of one rank."""

    name: str
    """As `named_parameters` of its model has it."""
    shape: tuple[int, ...]
    """Of the part that this rank holds."""
    module: str = ""
    """Name of the module that owns it."""
    constant: bool = False
    """All its elements were equal at first sight: zeros of a bias, ones of a norm."""
    ddp: tuple[int, ...] = ()
    """Ranks of the DistributedDataParallel that has it."""
    mesh: tuple[int, ...] = ()
    """Ranks that hold the same part of a DTensor, by its placements."""
    fsdp: tuple[int, ...] = ()
    """Ranks among which fully_shard divides it: they are data parallel."""
    compressed: bool = False
    """DDP has a communication hook: its gradient may be an approximation."""
    varies: bool = False
    """The program said that it may differ (`distsim.varies`)."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(slots=True)
class CallCount:
    """Equal calls of a window, counted."""

    op: str
    ranks: tuple[int, ...]
    """Of the group; of a message its two ends."""
    reduce_op: str | None
    pass_: TrainingPhase
    by_torch: bool
    """The reducer of DDP or FSDP's own code made it."""
    site: Site | None = None
    count: int = 0
    largest: int = 0
    """Elements of its largest tensor."""
    gradients: set[int] = field(default_factory=set)
    """Parameters whose `.grad` was in it."""
    values: set[int] = field(default_factory=set)
    """Parameters that were in it themselves."""


@dataclass(slots=True)
class InputFact:
    """The tensors that a model was called with, outside of any other module."""

    model: str
    training: bool
    shapes: tuple[tuple[int, ...], ...]
    vectors: tuple[Vector, ...]
    constant: bool
    site: Site | None = None


@dataclass(slots=True)
class LossFact:
    """One call of a loss function: how much each counted target weighs in the gradient."""

    reduction: str
    """`mean`, `sum`, or `none`: nobody knows what this backward pass began with."""
    targets: int
    """Counted: without those that are ignored."""
    weight: float | None = None
    """The gradient that came in at the scalar; None: no backward pass came here."""
    counts_tokens: bool = False
    """Its targets are classes, of which some may be ignored."""
    site: Site | None = None


@dataclass(slots=True)
class ClipFact:
    """One clipping of gradients."""

    limit: float
    norm: float | None
    is_plain: bool
    """The norm is of plain tensors; that of DTensors is the same on all ranks."""
    site: Site | None = None


@dataclass(slots=True)
class EpochFact:
    """One pass over data that a DistributedSampler shuffles."""

    sampler: int
    """Number of the sampler on its rank."""
    epoch: int
    site: Site | None = None


@dataclass(slots=True)
class PlacementFact:
    """An input of a module that is declared to be replicated."""

    module: str
    ranks: tuple[int, ...]
    vector: Vector
    shape: tuple[int, ...]
    site: Site | None = None


@dataclass(slots=True)
class DropoutFact:
    """The random state and the input of one dropout."""

    state: int
    """Hash of the generator's state."""
    vector: Vector
    shape: tuple[int, ...]
    site: Site | None = None


@dataclass(slots=True)
class BufferFact:
    """A floating-point buffer of a module that is no normalization, under DDP."""

    name: str
    ranks: tuple[int, ...]
    vector: Vector


@dataclass(slots=True)
class Window:
    """What a rank did between two steps of its optimizers."""

    calls: list[CallCount] = field(default_factory=list)
    inputs: list[InputFact] = field(default_factory=list)
    losses: list[LossFact] = field(default_factory=list)
    placements: list[PlacementFact] = field(default_factory=list)
    dropouts: list[DropoutFact] = field(default_factory=list)
    buffers: list[BufferFact] = field(default_factory=list)
    aliased: list[tuple[str, tuple[int, ...], Site | None]] = field(default_factory=list)
    """Operation, ranks and line of calls whose outputs share memory."""
    clips: list[ClipFact] = field(default_factory=list)
    epochs: list[EpochFact] = field(default_factory=list)
    lost_writes: list[str] = field(default_factory=list)
    """Parameters that were written while fully_shard had gathered them: it frees what was written."""


@dataclass(slots=True)
class StepFact:
    """One step of one optimizer. Vectors are there for the parameters that were sampled in it."""

    optimizer: int
    """Number of the optimizer on its rank, in the order of first steps, from 0."""
    number: int
    """From 1."""
    parameters: tuple[int, ...]
    """All of the optimizer, by their place in `RankFacts.parameters`."""
    site: Site | None = None
    before: dict[int, Vector] = field(default_factory=dict)
    gradients: dict[int, Vector] = field(default_factory=dict)
    """As the optimizer finds them."""
    local: dict[int, list[Vector]] = field(default_factory=dict)
    """Gradients of this rank's own backward passes, before any reduction, one for each micro-batch."""
    after: dict[int, Vector] = field(default_factory=dict)
    state: dict[int, dict[str, Vector]] = field(default_factory=dict)
    """The optimizer's state before the step."""
    hyperparameters: dict[int, tuple[tuple[str, float], ...]] = field(default_factory=dict)
    without_gradient: int = 0
    """Parameters whose `.grad` was None."""
    owns_state: bool = True
    """False for ZeRO, where the state of a parameter lives on one rank."""
    has_closure: bool = False
    window: Window = field(default_factory=Window)


@dataclass(slots=True)
class RankFacts:
    """All that one rank has recorded."""

    rank: int
    parameters: list[ParameterFact] = field(default_factory=list)
    steps: list[StepFact] = field(default_factory=list)
    """In program order over all optimizers."""
    rest: Window = field(default_factory=Window)
    """What happened after the last step."""
