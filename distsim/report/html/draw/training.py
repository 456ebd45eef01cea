"""First screen of a training run: four figures, and bars for the step, the memory and the largest gains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distsim.collectives.uncertainty import step_error
from distsim.report.html.draw.plots import ACCUSED, COMMUNICATION, COMPUTE, GREY, OPEN, WAITING, Figure, figure
from distsim.report.training.section import format_duration
from distsim.text.units import format_bytes, format_count, format_time

_STEP = (
    ("compute", "compute_s", COMPUTE),
    ("exposed communication", "exposed_s", COMMUNICATION),
    ("bubble", "bubble_s", WAITING),
    ("host", "host_s", OPEN),
    ("checkpoints", "saving_s", ACCUSED),
)
"""Parts of a step: name, key in the report, colour."""
_MEMORY = {
    "parameters": COMPUTE,
    "gradients": COMMUNICATION,
    "optimizer": WAITING,
    "activations": OPEN,
    "communication": "#7a5cc0",
    "other": GREY,
}


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a bar: its share of the bar's width, and what the legend says."""

    name: str
    text: str
    share: float
    colour: str


@dataclass(frozen=True, slots=True)
class Bar:
    """A stacked bar, or several bars of one segment each."""

    title: str
    segments: list[Segment]
    stacked: bool = True


@dataclass(frozen=True, slots=True)
class Figures:
    """Content of the first screen: cards with a name, a figure and a remark, then bars."""

    cards: list[tuple[str, str, str]]
    bars: list[Bar]


def training_figures(document: Mapping[str, Any]) -> Figures | None:
    """Return the first screen of the run, or None where no training step ended."""
    training = document.get("training") or {}
    if not training.get("step_time_s"):
        return None
    bars = [bar for bar in (_step(training), _memory(training), _gains(training)) if bar.segments]
    return Figures(_cards(training), bars)


def _cards(training: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    low_s, high_s = training.get("step_low_s"), training.get("step_high_s")
    measured = ""
    if low_s is not None and high_s is not None:
        measured = f"{format_time(low_s)} to {format_time(high_s)} in 8 cases of 10"
        beyond = step_error(training["step_regime"], training["num_gpus"], training["gpu"]).unmeasured
        measured = "; ".join((measured, *beyond))
    cards = [("step", format_time(training["step_time_s"]), measured)]
    if training.get("tokens_per_s"):
        per_gpu = training["tokens_per_s"] / training["num_gpus"]
        cards.append(("tokens/s", f"{training['tokens_per_s']:,.0f}", f"{per_gpu:,.0f} per GPU"))
    if training.get("mfu") is not None:
        cards.append(("MFU", f"{training['mfu']:.1%}", f"of the peak of {training['num_gpus']:,} {training['gpu']}"))
    if (cost := training.get("cost")) and cost.get("amount") is not None:
        listed = " (list price)" if cost.get("price_basis") else ""
        remark = f"{format_count(cost['tokens'])} tokens in {format_duration(cost['seconds'])}"
        cards.append(("cost", format_count(cost["amount"]), f"{remark}, {cost['price']:g} a GPU hour{listed}"))
    peak, capacity = training.get("peak_memory_bytes"), _usable_bytes(training)
    if peak and capacity:
        cards.append(("peak memory", format_bytes(peak), f"{peak / capacity:.0%} of {format_bytes(capacity)}"))
    return cards


def _step(training: Mapping[str, Any]) -> Bar:
    if not training.get("ranks"):
        return Bar("", [])
    slowest = _pacing(training)
    whole_s = sum(slowest[key] for _, key, _ in _STEP)
    segments = [
        Segment(name, f"{format_time(slowest[key])}, {slowest[key] / whole_s:.1%}", slowest[key] / whole_s, colour)
        for name, key, colour in _STEP
        if whole_s and slowest[key] > 0.0005 * whole_s
    ]
    return Bar(f"Step time of rank {slowest['rank']}, which sets the pace", segments)


def _pacing(training: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the figures of the rank for which the others wait."""
    ranks: list[Mapping[str, Any]] = training["ranks"]
    return next((rank for rank in ranks if rank["rank"] == training.get("pacing_rank")), ranks[0])


def _memory(training: Mapping[str, Any]) -> Bar:
    ranks = training.get("ranks")
    if not ranks:
        return Bar("", [])
    fullest = max(ranks, key=lambda rank: (rank["peak_allocated_bytes"], -rank["rank"]))
    capacity = _usable_bytes(training)
    held = {name: nbytes for name, nbytes in fullest["memory"].items() if nbytes > 0.0005 * capacity}
    reserved = fullest["peak_reserved_bytes"] - sum(fullest["memory"].values())
    if reserved > 0.0005 * capacity:
        held["reserved, not allocated"] = reserved
    segments = [
        Segment(name, f"{format_bytes(nbytes)}, {nbytes / capacity:.1%}", nbytes / capacity, _MEMORY.get(name, GREY))
        for name, nbytes in sorted(held.items(), key=lambda each: -each[1])
    ]
    return Bar(f"Peak memory of rank {fullest['rank']}, of {format_bytes(capacity)}", segments)


def _usable_bytes(training: Mapping[str, Any]) -> int:
    """Return the memory of a GPU without the part that the CUDA context takes, as the terminal report does."""
    return int(training.get("gpu_memory_bytes") or 0) - int(training.get("context_bytes") or 0)


def memory_plot(training: Mapping[str, Any]) -> Figure | None:
    """Return stacked areas of a GPU's memory by kind over the step with the peak, which is marked; None without one."""
    curve = training.get("memory_curve")
    if not curve:
        return None
    totals = [sum(held.values()) for held in curve]
    shares = [100 * number / len(curve) for number in range(len(curve))]
    traces = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": kind,
            "stackgroup": "memory",
            "x": shares,
            "y": [held[kind] / 2**30 for held in curve],
            "line": {"width": 0, "shape": "hv"},
            "fillcolor": colour,
            "hovertemplate": f"%{{y:.2f}} GiB {kind}<extra></extra>",
        }
        for kind, colour in _MEMORY.items()
        if any(held[kind] > 0.0005 * max(totals) for held in curve)
    ]
    peak = totals.index(max(totals))
    mark = {
        "x": shares[peak],
        "y": totals[peak] / 2**30,
        "text": f"peak {format_bytes(totals[peak])}",
        "showarrow": True,
        "arrowhead": 2,
        "ax": 0 if 15 < shares[peak] < 85 else (40 if peak < len(curve) / 2 else -40),
        "ay": -24,
    }
    return figure(
        traces,
        300,
        "progress through the allocations and frees of the step (%)",
        yaxis={"title": {"text": "GiB"}, "rangemode": "tozero"},
        margin={"t": 40},
        annotations=[mark],
        hovermode="x unified",
    )


def _gains(training: Mapping[str, Any]) -> Bar:
    step_s = _pacing(training)["step_s"] if training.get("gains") else 0.0
    segments = []
    for gain in training.get("gains") or ():
        less = 1 - gain["step_s"] / step_s
        segments.append(Segment(f"{gain['name']}: {gain['how']}", f"{less:.1%} less", max(0.0, less), COMPUTE))
    return Bar("Possible speed-ups, as a share of the mean step", segments, stacked=False)
