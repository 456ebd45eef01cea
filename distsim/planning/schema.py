"""Types of the JSON reports of fits, tune, sweep, buy and equal."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from distsim.planning.memory import RankPeak
from distsim.report.schema import Figure, ShortageEntry

Figures = dict[str, float]
"""Figures of a point by name: `step_s`, `tokens_per_s`, `mfu`, `peak_gpu_memory_bytes`, ..."""


class HeldMemory(TypedDict):
    """Memory in use at the peak for one line of the program and one operator."""

    name: str
    """Description of the memory if the operator determines it, such as `gradient of the logits`."""
    kind: str
    where: str
    """file:line"""
    code: str
    operator: str
    tensor: str
    nbytes: int
    count: int


class TriedChange(TypedDict):
    """A change of the program's arguments that was simulated."""

    change: str
    problem: str
    """Why it did not run; empty if it ran."""
    fits: bool | None
    """Null if it did not run."""
    needed: int | None
    """Bytes of one GPU."""


class TriedNodes(TypedDict):
    """The unchanged program on a number of nodes."""

    nodes: int
    fits: bool | None
    needed: int | None


class FitsReport(TypedDict):
    """Whether a program fits into GPU memory, and what helps.

    Bytes are those of one GPU.
    """

    schema: Literal["distsim.fits/1"]
    program: str
    arguments: list[str]
    cluster: str
    gpu: str
    num_gpus: int
    fits: bool
    is_close: bool
    """Whether the usual error of such predictions could change the answer."""
    capacity: int
    needed: int
    median_error: float
    worst_error: float
    """Of predicted peaks against published ones."""
    steps: int
    """Steps that were simulated."""
    not_traced: list[int]
    """Ranks that did not run."""
    ranks: list[RankPeak]
    """Ranks by equal peak."""
    kinds: dict[str, int]
    """Memory of the fullest rank by what it was for."""
    held: list[HeldMemory]
    out_of_memory: list[ShortageEntry]
    changes: list[TriedChange]
    """In the order in which they were tried."""
    advised: str | None
    """The change, or the least combination of changes, that fits; null: none was found."""
    fits_from_nodes: int | None
    nodes: list[TriedNodes]
    largest: dict[str, int | None]
    """The largest micro-batch and sequence that fit, by flag, all else as given; null: none."""


class PointEntry(TypedDict):
    """One point of a search."""

    settings: dict[str, Any]
    verdict: str
    figures: Figures
    valid: NotRequired[bool]
    why: NotRequired[str]
    """Why it is not valid."""
    exit_code: NotRequired[int]
    wrong: NotRequired[list[str]]
    """Expectations of the scenario that it did not meet."""


class TuneReport(TypedDict):
    """The settings of a training script, the best first."""

    schema: Literal["distsim.tune/1"]
    objective: str
    points: list[PointEntry]
    cannot_be_told_apart: int
    """Points after the best one that are within the error of its figure."""
    ruled_out: list[dict[str, Any]]
    """Settings that need as much memory as a point that ran out of it."""
    untried: list[dict[str, Any]]


class SweepReport(TypedDict):
    """All points of a scenario or script (`distsim sweep`)."""

    schema: Literal["distsim.sweep/1"]
    scenario: str
    points: list[PointEntry]


class OfferEntry(TypedDict):
    """A number of nodes of one kind for a training."""

    machine: str
    nodes: int
    gpus: int
    layout: str
    """Settings that vary, as flags."""
    step_s: float
    step_low_s: Figure
    step_high_s: Figure
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    mfu: Figure
    peak_gpu_memory_bytes: float
    gpu_memory_share: float
    seconds: float
    """Time of the whole training."""
    seconds_low: Figure
    seconds_high: Figure
    gpu_hours: float
    price: Figure
    """Price of one GPU hour."""
    price_basis: str
    """Source and date of a public list price; empty for a price of the user's."""
    amount: Figure
    """Cost in the currency of the price."""
    energy_kwh: Figure
    energy_is_limit: bool
    goodput: Figure
    """Share of the time in new steps, with --mtbf or --failures."""
    checkpoint_every_s: Figure
    """Seconds of steps between checkpoints, likewise."""
    bound: str
    """What bounds the step."""
    bound_share: float
    """Its share of the step."""


class ChoiceEntry(TypedDict):
    """A chosen offer."""

    title: str
    """recommended, cheapest or fastest."""
    machine: str
    layout: str
    reason: str
    cannot_be_told_apart: list[str]
    """Offers that may be as good."""


class BuyReport(TypedDict):
    """Machines and numbers of nodes for a training, and the choice."""

    schema: Literal["distsim.buy/1"]
    script: str
    tokens: float
    deadline_s: Figure
    budget: Figure
    offers: list[OfferEntry]
    choices: list[ChoiceEntry]
    nearest: str
    """The sentence about limits that nothing meets; empty if something does."""
    notes: list[str]


class DeviationEntry(TypedDict):
    """A tensor that is not equal in two layouts."""

    kind: str
    name: str
    step: int
    ranks: list[int]
    relation: str
    factor: Figure
    distance: Figure
    """Relative distance; null: not a number, or the sizes differ."""
    threshold: float
    """Distance up to which it is rounding."""
    site: str
    explanation: str


class EqualReport(TypedDict):
    """Whether two layouts train alike (`distsim equal`)."""

    schema: Literal["distsim.equal/1"]
    equal: bool
    steps: int
    compared: dict[str, int]
    """Tensors that were compared, by kind."""
    largest_distance: Figure
    first: DeviationEntry | None
    """The first tensor that differs."""
    deciding: list[DeviationEntry]
    started_alike: list[str]
    """Parameters for which the second layout got the first one's values."""
    left_out: dict[str, str]
    """Tensors that were not compared, and why."""
