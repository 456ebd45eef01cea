"""The section `training` of the JSON report: what cannot be said is null.

Without a step, that is all that is a step's; without tokens, what is made of them.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from distsim.report.training.section import cost_of, gains, remedies, saving_share

if TYPE_CHECKING:
    from distsim.sim.observe.metrics import OutOfMemory, RankTraining, Training


def training_section(training: Training) -> dict[str, Any]:
    """Return the values of the keys of `TrainingEntry`, with dataclasses in place of objects."""
    from distsim.report.schema import TrainingEntry

    pacing, cost = training.pacing, cost_of(training)
    return {name: getattr(training, name) for name in TrainingEntry.__annotations__ if hasattr(training, name)} | {
        "gpu_memory_bytes": training.memory_bytes,
        "peak_memory_bytes": training.peak_reserved_bytes,
        "pacing_rank": None if pacing is None else pacing.rank,
        "ranks": [_rank(rank) for rank in training.ranks],
        "out_of_memory": [_short(short, training) for short in training.out_of_memory],
        "gains": gains(training),
        "checkpoints": _checkpoints(training),
        "cost": None if cost is None else asdict(cost) | {"power_w": training.power_w},
        "unknown_reads": training.reads,
    }


def _short(short: OutOfMemory, training: Training) -> dict[str, Any]:
    section = asdict(short) | {"remedies": remedies(short, training)}
    if short.site is None:
        del section["site"]
    return section


def _checkpoints(training: Training) -> dict[str, Any]:
    section = {"rank": training.saved_rank} | asdict(training.saved)
    del section["by_step"], section["spans"]
    saved = training.saved
    return section | {"every_steps": saved.every, "mean_write_s": saved.mean_s, "share": saving_share(training)}


def _rank(rank: RankTraining) -> dict[str, Any]:
    result = asdict(rank)
    result["alike"] = len(result.pop("like"))
    if not rank.sites:
        del result["sites"]
    return result
