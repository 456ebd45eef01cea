"""How a simulating process ended, when it could not report that itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["ProcessOutcome"]


@dataclass(frozen=True, slots=True)
class ProcessOutcome:
    """How a process that simulated came to an end that it could not tell."""

    rank: int | None
    """The rank that ran; None: none did."""
    stack: tuple[tuple[str, int, str], ...]
    """File, line and function, innermost first."""
    signal_name: str | None
    """Of what crashed it; None: it was stuck, and ended from outside."""
    stuck_s: float
    now_s: float
    """Virtual time."""
    events: int
    wall_s: float
    """Since the simulation began."""
    facts: dict[str, Any]
