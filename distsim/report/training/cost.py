"""What a training costs: its time, GPU hours, money and energy for a number of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from distsim.text.units import format_count

if TYPE_CHECKING:
    from distsim.sim.observe.metrics import Training

__all__ = ["TrainingCost", "cost_of", "cost_text", "saving_share"]

DEFAULT_TOKENS = 1e9
"""Where a price is known and no number of tokens."""
HOUR_S, DAY_S = 3600.0, 86400.0


@dataclass(frozen=True, slots=True)
class TrainingCost:
    """Of so many tokens, with checkpoints as often as the program writes them."""

    tokens: float
    seconds: float
    gpu_hours: float
    price: float | None
    """Of a GPU's hour."""
    amount: float | None
    """Of all, in the price's currency."""
    energy_kwh: float | None
    """Of the GPUs at work all the time."""
    energy_is_limit: bool
    """Whether it is what their makers allow at most."""


def saving_share(training: Training) -> float | None:
    """Return the share of the time that the checkpoints take, at the interval seen; None where that is not known."""
    saved, step_s = training.saved, training.step_time_s
    if saved.every is None or not step_s:
        return None
    return saved.mean_s / (saved.mean_s + saved.every * step_s)


def cost_of(training: Training) -> TrainingCost | None:
    """Return the cost of the tokens that were asked for; None where neither these nor a price are known, or no rate."""
    tokens = training.planned_tokens
    if training.tokens_per_s is None or (tokens is None and training.price is None):
        return None
    tokens = DEFAULT_TOKENS if tokens is None else tokens
    seconds = tokens / training.tokens_per_s / (1.0 - (saving_share(training) or 0.0))
    hours = seconds / HOUR_S * training.num_gpus
    return TrainingCost(
        tokens,
        seconds,
        hours,
        training.price,
        None if training.price is None else hours * training.price,
        None if training.power_w is None else hours * training.power_w / 1e3,
        training.power_is_limit,
    )


def cost_text(cost: TrainingCost, training: Training) -> str:
    """Return `1T tokens: 29.2 days, 5.6M GPU hours, 14M at 2.5 a GPU hour, at most 3.92 GWh at
    700 W a GPU`."""
    parts = [_duration(cost.seconds), f"{format_count(cost.gpu_hours)} GPU hours"]
    if cost.amount is not None:
        parts.append(f"{format_count(cost.amount)} at {cost.price:g} a GPU hour")
    if cost.energy_kwh is not None:
        most = "at most " if cost.energy_is_limit else ""
        parts.append(f"{most}{_energy(cost.energy_kwh)} at {training.power_w:g} W a GPU")
    return f"{format_count(cost.tokens)} tokens: {', '.join(parts)}"


def _energy(kwh: float) -> str:
    for unit, scale in (("GWh", 1e6), ("MWh", 1e3)):
        if kwh >= scale:
            return f"{kwh / scale:.3g} {unit}"
    return f"{kwh:.3g} kWh"


def _duration(seconds: float) -> str:
    if seconds < HOUR_S:
        return f"{seconds / 60.0:.3g} minutes"
    return f"{seconds / HOUR_S:.3g} hours" if seconds < 2 * DAY_S else f"{seconds / DAY_S:,.1f} days"
