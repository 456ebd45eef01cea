"""Why one training point is better than another, from the figures of their own reports."""

from __future__ import annotations

from typing import Any

from distsim.scenario.expect.result import Result
from distsim.text.units import format_bytes, format_time

__all__ = ["difference", "spent"]

LEAST = 0.01
"""Smallest share of a step that is worth mentioning."""
ATTENTION = 0.05
"""Share of all flops below which extra computation is attributed to attention's backward, which recomputes its scores.
"""
PARTS = {
    "compute": "step_compute_s",
    "exposed communication": "step_exposed_s",
    "bubble": "step_bubble_s",
    "host-bound": "step_host_s",
}


def spent(result: Result) -> str:
    """Return where a step goes: `81% compute, 12% exposed communication (all_gather of dp 8%), 7% host-bound`."""
    figures, step_s = result.figures, result.figures["step_s"]
    parts = []
    for name, figure in PARTS.items():
        share = figures.get(figure, 0.0) / step_s
        if share < LEAST:
            continue
        text = f"{share:.0%} {name}"
        if name == "exposed communication" and (waits := _waits(result, step_s)):
            text += f" ({waits})"
        parts.append(text)
    recomputed = 1.0 - figures.get("mfu", 0.0) / (figures.get("hfu") or 1.0) if "mfu" in figures else 0.0
    if recomputed > ATTENTION:
        parts.append(f"{recomputed:.0%} of its flops are recomputed")
    return f"a step of {format_time(step_s)}: {', '.join(parts)}"


def _waits(result: Result, step_s: float) -> str:
    training = result.document.get("training", {})
    pacing = [rank for rank in training.get("ranks", ()) if rank["rank"] == training.get("pacing_rank")]
    waits: list[dict[str, Any]] = pacing[0]["waits"] if pacing else []
    shares = [((wait["moving_s"] + wait["late_s"]) / step_s, wait) for wait in waits]
    shares_text = [f"{wait['op']} of {wait['group']} {share:.0%}" for share, wait in shares[:2] if share >= LEAST]
    return ", ".join(shares_text)


def difference(best: Result, other: Result, objective: str) -> str:
    """Return by how much *other* is worse than *best*, and which parts of its step cause that."""
    if objective == "memory":
        more = other.figures["peak_gpu_memory_bytes"] - best.figures["peak_gpu_memory_bytes"]
        return f"{format_bytes(int(more))} more at the peak"
    best_s, other_s = _for_a_token(best), _for_a_token(other)
    slower = other_s / best_s - 1.0
    grown = []
    for name, figure in PARTS.items():
        mine = best.figures.get(figure, 0.0) / best.figures["step_s"] * best_s
        its = other.figures.get(figure, 0.0) / other.figures["step_s"] * other_s
        share = (its - mine) / best_s
        if abs(share) >= LEAST / 2:
            word = "more" if share > 0 else "less"
            waits = _waits(other, other.figures["step_s"]) if name == "exposed communication" and share > 0 else ""
            grown.append(
                (-abs(share), f"{abs(share):.1%} {word} {name}" + (f" ({waits} of its step)" if waits else ""))
            )
    parts = ", ".join(text for _, text in sorted(grown))
    return f"takes {slower:.1%} longer for a token" + (f": {parts}" if parts else "")


def _for_a_token(result: Result) -> float:
    """Seconds of one GPU for a token; for a step where tokens are not known."""
    figures = result.figures
    rate = figures.get("tokens_per_s", 1.0 / figures["step_s"])
    return max(figures.get("gpus", 1.0), 1.0) / rate
