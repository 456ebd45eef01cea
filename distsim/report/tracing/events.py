"""Events of the Trace Event Format, as dictionaries."""

from __future__ import annotations

from typing import Any

__all__ = ["Event", "meta", "slice_event", "us"]

Event = dict[str, Any]


def slice_event(
    pid: int, tid: int, name: str, category: str, start_s: float, end_s: float, args: dict[str, Any]
) -> Event:
    """A complete event."""
    start, end = us(start_s), us(end_s)
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": start,
        "dur": round(max(end - start, 0.0), 3),
        "args": args,
    }


def meta(pid: int, what: str, tid: int = 0, **args: Any) -> Event:
    """What a process or a track is called, and where it stands."""
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args}


def us(seconds: float) -> float:
    """Microseconds to the nanosecond: nested slices keep their order when rounded alike."""
    return round(seconds * 1e6, 3)
