"""How many orders of a program to try."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass

from distsim.errors import UsageError
from distsim.text.untrusted_input import brief

KINDS = ("kill", "store-loss", "timeout", "buffered")
"""What can be explored beside the order of operations."""
NO_KINDS = {
    "slow": "a rank's speed orders nothing, so that all speeds are explored; a limit that strikes is 'timeout'",
    "drop": "transports of torch.distributed lose no message; its sender's death is 'kill'",
}
"""Faults that are none here, and why."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of an exploration; without any it ends when every class has been run."""

    runs: int | None = None
    wall_s: float | None = None

    @classmethod
    def read(cls, value: str | int) -> Budget:
        """Return the budget that `all`, a number of runs (`200`) or a time (`60s`) means.

        Raises:
            UsageError: *value* is none of these.
        """
        text = "" if isinstance(value, bool) else str(value)
        if text == "all":
            return cls()
        if re.fullmatch(r"[1-9]\d{0,8}", text):
            return cls(runs=int(text))
        if (match := re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)s", text)) and float(match[1]) > 0:
            return cls(wall_s=float(match[1]))
        raise UsageError(f"expected 'all', a number of runs (200) or a time ('60s'), got {brief(str(value))!r}")

    @property
    def half(self) -> Budget:
        """Return half of it."""
        return Budget(
            None if self.runs is None else max(1, self.runs // 2), None if self.wall_s is None else self.wall_s / 2
        )

    def runs_after(self, runs: int) -> int:
        """Return how many more runs it allows, as far as it limits their number."""
        return sys.maxsize if self.runs is None else max(0, self.runs - runs)

    def over(self, runs: int, wall_s: float) -> bool:
        """Return whether it is used up."""
        return (self.runs is not None and runs >= self.runs) or (self.wall_s is not None and wall_s >= self.wall_s)

    def __str__(self) -> str:
        return "all" if self == Budget() else f"{self.runs}" if self.runs is not None else f"{self.wall_s:g}s"


def check_kinds(kinds: object) -> tuple[str, ...]:
    """Return the names of what else is explored, from a list or a text with commas.

    Raises:
        UsageError: One of them is unknown.
    """
    names = kinds.split(",") if isinstance(kinds, str) else list(kinds) if isinstance(kinds, list | tuple) else [kinds]
    for name in names:
        if name in NO_KINDS:
            raise UsageError(f"{name}: expected some of {', '.join(KINDS)}: {NO_KINDS[name]}")
        if name not in KINDS:
            raise UsageError(f"expected some of {', '.join(KINDS)}, got {brief(str(name))!r}")
    return tuple(dict.fromkeys(names))
