"""Facts that one rank records of its training: parameters, optimizer steps, and events between them.

They are plain data without torch. A vector is the sketch of a tensor (`collect/sketch.py`): 16 numbers that are
linear in the tensor. The sketch of a sum of gradients is the sum of their sketches, and the distance of two sketches
estimates the distance of the tensors.
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
    """Phase of a training step."""

    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCTION = "reduction"
    """After a backward pass and before the optimizer's step."""
    BETWEEN = "between"
    """Phase after a step and before the next backward pass, outside of any forward pass."""


@dataclass(slots=True)
class ParameterFact:
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
        return math.prod(self.shape)


@dataclass(slots=True)
class CallCount:
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


@dataclass(slots=True)
class InputFact:
    """Inputs of one call of an outermost model (not of a module inside another)."""

    model: str
    training: bool
    shapes: tuple[tuple[int, ...], ...]
    vectors: tuple[Vector, ...]
    constant: bool
    site: Site | None = None


@dataclass(slots=True)
class LossFact:
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


@dataclass(slots=True)
class ClipFact:
    """One call that clips gradients by their norm."""

    limit: float
    norm: float | None
    is_plain: bool
    """Whether the norm is a plain tensor. The norm of DTensors is the same on all ranks."""
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
    """A DTensor input of a module that is declared as replicated."""

    module: str
    ranks: tuple[int, ...]
    vector: Vector
    shape: tuple[int, ...]
    site: Site | None = None


@dataclass(slots=True)
class DropoutFact:
    """One call of dropout: the generator's state, and the sketch of the input."""

    state: int
    """Hash of the generator's state."""
    vector: Vector
    shape: tuple[int, ...]
    site: Site | None = None


@dataclass(slots=True)
class BufferFact:
    """A floating-point buffer under DDP that does not belong to a normalization layer."""

    name: str
    ranks: tuple[int, ...]
    vector: Vector


@dataclass(slots=True)
class Window:
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
    lost_writes: list[str] = field(default_factory=list)
    """Names of parameters that were written to while fully_shard had gathered them. fully_shard discards such
    writes.
    """


@dataclass(slots=True)
class StepFact:
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


@dataclass(slots=True)
class RankFacts:
    """All facts of one rank."""

    rank: int
    parameters: list[ParameterFact] = field(default_factory=list)
    steps: list[StepFact] = field(default_factory=list)
    """Steps of all optimizers, in program order."""
    rest: Window = field(default_factory=Window)
    """Events after the last step."""
