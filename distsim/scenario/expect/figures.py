"""The figures of a run that scenarios bound and sweeps compare."""

from __future__ import annotations

from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distsim.sim import Outcome
    from distsim.sim.observe.metrics import Training

__all__ = ["figures", "step_time_s"]


def figures(outcome: Outcome) -> dict[str, float]:
    """Name -> figure; the unit is in the name."""
    result = {"virtual_time_s": outcome.virtual_time_s, "events": float(outcome.events)}
    for part in ("compute_s", "communication_s", "exposed_s", "idle_s"):
        values = [getattr(rank, part) for rank in outcome.ranks]
        result[part] = max(values, default=0.0)
    result |= _sure(outcome, result["exposed_s"])
    peaks = [rank.peak_memory_bytes for rank in outcome.ranks if rank.peak_memory_bytes is not None]
    if peaks:
        result["peak_memory_bytes"] = float(max(peaks))
    for total in outcome.collectives:
        name = f"busbw_bytes_per_s.{total.op}"
        result[name] = max(result.get(name, 0.0), total.busbw_bytes_per_s)
    if outcome.links:
        result["busiest_link"] = max(link.mean_utilisation for link in outcome.links)
    if outcome.training is not None:
        result |= _of_training(outcome.training)
    return result


def _of_training(training: Training) -> dict[str, float]:
    """Return the step time of the slowest rank and the peak memory of the fullest GPU.

    If a rank ran out of memory, the peak is the least that it would have needed.
    """
    peak = float(training.peak_reserved_bytes)
    short = max((one.allocated + one.asked for one in training.out_of_memory), default=0)
    missing = max((one.missing for one in training.out_of_memory), default=0)
    capacity = training.memory_bytes - training.context_bytes
    values = {
        "gpus": float(training.num_gpus),
        "peak_gpu_memory_bytes": max(peak, float(short)),
        "gpu_memory_share": max(peak, float(short)) / capacity if capacity > 0 else 0.0,
        "fits": float(not training.out_of_memory),
        "missing_gpu_memory_bytes": float(missing),
    }
    figures = {
        "step_s": training.step_time_s,
        "tokens_per_step": training.tokens_per_step,
        "tokens_per_s": training.tokens_per_s,
        "mfu": training.mfu,
        "hfu": training.hfu,
        "price": training.price,
    }
    pacing = training.pacing
    if pacing is not None:
        figures |= {
            "step_compute_s": pacing.compute_s,
            "step_exposed_s": pacing.exposed_s,
            "step_bubble_s": pacing.bubble_s,
            "step_host_s": pacing.host_s,
        }
    return values | {name: value for name, value in figures.items() if value is not None}


def _sure(outcome: Outcome, exposed_s: float) -> dict[str, float]:
    """Return the intervals of the run and of a step that hold eight of ten measured times: those of collectives,
    weighted by their exposed share. Empty without measurements."""
    known = [total for total in outcome.collectives if total.low_s is not None and total.high_s is not None]
    if not known:
        return {}
    time_s = sum(total.time_s for total in outcome.collectives) or 1.0
    lower_s = sum(total.time_s - (total.low_s or 0.0) for total in known)
    higher_s = sum((total.high_s or 0.0) - total.time_s for total in known)
    result = {
        "virtual_time_low_s": outcome.virtual_time_s - exposed_s * lower_s / time_s,
        "virtual_time_high_s": outcome.virtual_time_s + exposed_s * higher_s / time_s,
    }
    training = outcome.training
    if training is not None and training.step_low_s is not None and training.step_high_s is not None:
        result |= {"step_low_s": training.step_low_s, "step_high_s": training.step_high_s}
    return result


def step_time_s(outcome: Outcome, lines: list[int]) -> float | None:
    """Median time between one call at a marked line and the next, on the rank that is slowest; None where
    no rank came there twice. Without lines: the whole run."""
    if not lines:
        return outcome.virtual_time_s
    slowest: float | None = None
    for records in outcome.records.values():
        times = [r.issued_s for r in records if r.site is not None and r.site.line in lines]
        if len(times) > 1:
            step_s = median(after - before for before, after in pairwise(times))
            slowest = step_s if slowest is None else max(slowest, step_s)
    return slowest
