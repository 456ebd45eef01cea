"""Finds out whether a training program fits into GPU memory, and what its memory is needed for."""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distsim.collectives.uncertainty import memory_error
from distsim.debug.records import P2P
from distsim.errors import UsageError
from distsim.scenario.apart import run_forked
from distsim.sim import RunRequest, run_program

if TYPE_CHECKING:
    from distsim.sim import Outcome
    from distsim.sim.observe.metrics import MemorySite, RankTraining, Training

STEPS = 2
"""The optimizer makes its state at the end of the first step: the second is the first with all that training keeps."""
VOCABULARY = {
    "_log_softmax": "log-probabilities of the loss",
    "_log_softmax_backward_data": "gradient of the logits",
    "nll_loss_backward": "gradient of the log-probabilities",
    "nll_loss_forward": "loss",
}
"""Operators of F.cross_entropy, with descriptions of their results."""


@dataclass(frozen=True, slots=True)
class RankPeak:
    """The memory of ranks that need the same, in bytes."""

    ranks: tuple[int, ...]
    stage: str
    """Pipeline stage, such as `pp 0`: the position in the group whose members send to each other; empty without sends.
    """
    reserved: int
    allocated: int
    runs_out: bool


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """Memory in use at the peak for one line of the program and one operator."""

    kind: str
    name: str
    """Description of the memory if the operator determines it, such as `gradient of the logits`."""
    site: MemorySite


@dataclass(slots=True)
class Fit:
    """Memory that one run needs."""

    outcome: Outcome
    training: Training
    capacity: int
    """Bytes of one GPU, without those outside torch's allocator."""
    peaks: list[RankPeak] = field(default_factory=list)
    held: list[PeakMemory] = field(default_factory=list)
    """Memory at the peak of the fullest rank, largest first."""

    @property
    def fits(self) -> bool:
        return not self.training.out_of_memory

    @property
    def fullest(self) -> RankTraining:
        """Return the rank with the highest peak."""
        return max(self.training.ranks, key=lambda rank: (rank.peak_allocated_bytes, -rank.rank))

    @property
    def needed(self) -> int:
        """Return the bytes reserved at the peak if the program fits, else the bytes allocated.

        What is reserved on a larger GPU does not tell what a smaller one would reserve, which has to release segments.
        """
        ranks = self.training.ranks
        if self.fits:
            return max(rank.peak_reserved_bytes for rank in ranks)
        return max(rank.peak_allocated_bytes for rank in ranks)

    @property
    def is_close(self) -> bool:
        """Return whether the error of such predictions could change the answer."""
        allocated = self.fullest.peak_allocated_bytes
        return abs(allocated - self.capacity) < memory_error().worst * self.capacity

    @property
    def need(self) -> MemoryNeed:
        """Return its figures alone."""
        allocated = self.fullest.peak_allocated_bytes
        return MemoryNeed(self.fits, self.needed, allocated, self.capacity, self.is_close, self.training.num_gpus)


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """What a run needs, in bytes of one GPU: the figures of a `Fit` that a trial in another process returns."""

    fits: bool
    needed: int
    allocated: int
    """At the peak of the fullest rank."""
    capacity: int
    is_close: bool
    num_gpus: int


class NothingOnGpu(UsageError):
    """A program that ended before it used a GPU."""

    def __init__(self, request: RunRequest, outcome: Outcome, last_line: str) -> None:
        self.request, self.outcome, self.last_line = request, outcome, last_line
        super().__init__(
            f"{request.program} on {request.on}: no rank put anything on a GPU (exit code {outcome.exit_code}; last "
            f"line: {last_line})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return NothingOnGpu, (self.request, self.outcome, self.last_line)


def measure(request: RunRequest, with_lines: bool = True) -> Fit:
    """Run the first steps of *request* on a sample of its ranks, whose memory never ends.

    Args:
        request: The program and its cluster.
        with_lines: Whether to find out what lines and operators take memory.

    Raises:
        UsageError: no rank used a GPU.
    """
    with tempfile.TemporaryDirectory(prefix="distsim_fits_") as folder:
        request = replace(
            request,
            last_step=STEPS,
            measures_memory=True,
            keeps_sites=with_lines,
            budget_s=0.0,
            sample_is_enough=True,
            log_dir=folder,
        )
        outcome = run_program(request)
        printed = sorted(Path(folder).rglob("*"))
        text = "\n".join(p.read_text(errors="replace") for p in printed if p.is_file() and p.stat().st_size < 1 << 20)
    training = outcome.training
    if outcome.interrupted:
        raise KeyboardInterrupt
    if training is None:
        last = next((line for line in reversed(text.splitlines()) if line.strip()), "it printed nothing")
        raise NothingOnGpu(request, outcome, last.strip())
    fit = Fit(outcome, training, training.memory_bytes - training.context_bytes)
    fit.peaks = _peaks(outcome, training)
    fit.held = _held(fit.fullest)
    return fit


def measure_apart(request: RunRequest) -> Fit:
    """Do the same in a fork, since a process that has simulated cannot fork: autograd's threads do not survive it."""
    measured = run_forked(partial(_fit_or_error, request)).value
    if measured is None:  # it crashed, or hangs: then it does so here, where the command's watchdog reports it
        return measure(request)
    if isinstance(measured, UsageError):
        raise measured
    assert isinstance(measured, Fit)
    return measured


def _fit_or_error(request: RunRequest) -> Fit | UsageError:
    try:
        fit = measure(request)
    except NothingOnGpu as error:
        error.outcome.gpu_tracks = {}
        return error
    except UsageError as error:
        return error
    fit.outcome.gpu_tracks = {}  # which are in shared memory
    return fit


def _peaks(outcome: Outcome, training: Training) -> list[RankPeak]:
    short = {rank for one in training.out_of_memory for rank in one.ranks}
    alike: dict[tuple[str, int, int, bool], list[int]] = {}
    for rank in training.ranks:
        key = (_stage(outcome, rank.rank), rank.peak_reserved_bytes, rank.peak_allocated_bytes, rank.rank in short)
        alike.setdefault(key, []).extend(rank.like)
    peaks = [RankPeak(tuple(sorted(ranks)), *key) for key, ranks in alike.items()]
    return sorted(peaks, key=lambda peak: peak.ranks)


def _stage(outcome: Outcome, rank: int) -> str:
    for record in outcome.records.get(rank, ()):
        group = record.group
        is_whole = len(group.ranks) == outcome.world_size and group.label == "default_pg"
        if record.op in P2P and rank in group.ranks and not is_whole:
            return f"{group.label} {group.ranks.index(rank)}"
    return ""


def _held(rank: RankTraining) -> list[PeakMemory]:
    """Return the peak by line and operator; what has the shape of the logits is named."""
    logits = next((_numbers(site.tensor) for site in rank.sites if site.operator == "_log_softmax"), None)
    held = []
    for site in rank.sites:
        name = VOCABULARY.get(site.operator, "")
        if not name and logits is not None and _numbers(site.tensor) == logits:
            name = "logits"
        held.append(PeakMemory(site.kind, name, site))
    return held


def _numbers(tensor: str) -> int:
    """Return the number of elements of a tensor such as `float32[8192,128256]`; 0 if unknown."""
    shape = re.search(r"\[([\d,]*)\]$", tensor)
    total = 1 if shape is not None else 0
    for size in shape[1].split(",") if shape is not None and shape[1] else ():
        total *= int(size)
    return total
