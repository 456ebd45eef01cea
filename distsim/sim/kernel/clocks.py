"""Vector clocks: which steps of other actors happen before a step."""

from __future__ import annotations

from collections.abc import Mapping

Clock = Mapping[str, int]
"""For each actor the number of its last step that happens before. Clocks are never changed, only replaced."""

START: Clock = {}
"""The clock of an actor before anything has happened."""


def joined(first: Clock, second: Clock) -> Clock:
    """Return the clock of what happens after both *first* and *second*."""
    if first is second or not second:
        return first
    if not first:
        return second
    later = {actor: number for actor, number in second.items() if number > first.get(actor, 0)}
    return {**first, **later} if later else first


def includes(clock: Clock, actor: str, number: int) -> bool:
    """Return whether step *number* of *actor* happens before what has *clock*."""
    return clock.get(actor, 0) >= number
